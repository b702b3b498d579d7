"""Client of the proxy's control API: one method per endpoint.

Used by activities, agent workers, node agents and the command line. The proxy
may be restarting at any time, so every call is repeated on connection errors
until its deadline; all endpoints are idempotent under that. The error that
the proxy raised is raised again here as the same class of `storage.errors`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast
from urllib.parse import quote

import aiohttp
import orjson

from storage import errors

RouteState = Literal["open", "held", "closed"]
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class ClaimedSample:
    """One attempt of one agent at one sample; made by the proxy, run by an agent worker."""

    ordinal: int
    sample: int
    attempt: int
    session: str
    api_key: str
    base_url: str
    """Value for an OpenAI client's ``base_url``; ends in ``/v1``."""
    model: str


@dataclass(frozen=True)
class ClaimedScore:
    """A finished sample whose reward is wanted.

    ``transcript``: ``[{"request": {"messages": [...]}, "response": {"message": {...}}}]``, one entry a turn.
    """

    ordinal: int
    sample: int
    attempt: int
    stream: str
    session: str
    output: Any
    transcript: list[dict[str, Any]]


class ControlClient:
    """Talks to the proxy at ``url`` with the control ``key``; usable as an async context manager.

    Of several URLs it talks to one, any, as long as that one answers.
    ``deadline_s`` bounds each call, retries included. Raises the proxy's own
    error, or :class:`~storage.errors.DeadlineError` when it cannot be reached
    in time.
    """

    def __init__(self, url: str | Sequence[str], key: str, *, deadline_s: float = 120.0) -> None:
        urls = [url] if isinstance(url, str) else random.sample(url, len(url))
        self._urls = deque(each.rstrip("/") for each in urls)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._deadline_s = deadline_s
        self._http: aiohttp.ClientSession | None = None
        self._claims_in_doubt: set[tuple[str, str, str]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the client may be used again afterwards."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    # Runs

    async def create_run(self, run: str, spec: Mapping[str, Any], spec_digest: str) -> None:
        """Register ``run`` and load its tokenizer; the same digest again is accepted, another is a ConfigError."""
        await self._call("POST", "/control/runs", {"run": run, "spec": dict(spec), "spec_digest": spec_digest})

    async def run_status(self, run: str) -> dict[str, Any]:
        """Books, steps, evaluations, token counts, forks, routes and overlap of ``run``."""
        return cast(dict[str, Any], await self._call("GET", f"/control/runs/{_q(run)}"))

    async def set_admission(
        self,
        run: str,
        stream: str,
        *,
        admit_until: int,
        target_in_flight: int,
        samples_per_task: int,
        paused: bool = False,
    ) -> None:
        """Allow ordinals below ``admit_until`` of ``stream`` to start."""
        body = {
            "stream": stream,
            "admit_until": admit_until,
            "target_in_flight": target_in_flight,
            "samples_per_task": samples_per_task,
            "paused": paused,
        }
        await self._call("POST", f"/control/runs/{_q(run)}/admission", body)

    async def audit(self, run: str) -> dict[str, Any]:
        """Journal against shards: sessions, tokens_journalled, tokens_in_shards, tokens_lost, mismatches."""
        return cast(dict[str, Any], await self._call("GET", f"/control/runs/{_q(run)}/audit"))

    # Samples

    async def claim_samples(
        self, run: str, stream: str, worker: str, limit: int, *, holding: Iterable[str] = ()
    ) -> list[ClaimedSample]:
        """Take up to ``limit`` samples to run; each comes with a fresh session and key.

        ``holding`` names the sessions this worker has already. It is sent when
        an earlier answer may have been lost, so that samples which the worker
        was given but never saw are put back. One claim at a time per worker.
        """
        body: dict[str, Any] = {"stream": stream, "worker": worker, "limit": limit}
        doubt = {"holding": list(holding)}
        path = f"/control/runs/{_q(run)}/samples/claim"
        claim = (run, stream, worker)
        body |= doubt if claim in self._claims_in_doubt else {}
        self._claims_in_doubt.add(claim)
        rows = await self._call("POST", path, body, again={**body, **doubt})
        self._claims_in_doubt.discard(claim)
        return [ClaimedSample(**row) for row in rows]

    async def finish_sample(self, run: str, session: str, output: Any) -> str:
        """Seal the session and hand in the agent's output.

        Returns the sample's new state: ``finished``, or ``queued``/``failed``
        if the session was hit by an infrastructure fault that the agent hid.
        """
        body = {"session": session, "output": output}
        return str((await self._call("POST", f"/control/runs/{_q(run)}/samples/finish", body))["state"])

    async def fail_sample(self, run: str, session: str, cause: str, detail: str, *, retry: bool) -> str:
        """Seal the session as failed; returns ``queued`` (a new attempt follows) or ``failed``."""
        body = {"session": session, "cause": cause, "detail": detail, "retry": retry}
        return str((await self._call("POST", f"/control/runs/{_q(run)}/samples/fail", body))["state"])

    async def release_worker(self, run: str, stream: str, worker: str) -> None:
        """Give back everything that ``worker`` was running: it restarts and has no memory of it."""
        await self._call("POST", f"/control/runs/{_q(run)}/samples/release", {"stream": stream, "worker": worker})

    async def claim_scores(self, run: str, worker: str, limit: int) -> list[ClaimedScore]:
        """Take up to ``limit`` finished samples to score, of every stream."""
        rows = await self._call("POST", f"/control/runs/{_q(run)}/scores/claim", {"worker": worker, "limit": limit})
        return [ClaimedScore(**row) for row in rows]

    async def commit_score(self, run: str, session: str, reward: float) -> None:
        """Record the reward; completes the group and writes its shard if it was the last one."""
        await self._call("POST", f"/control/runs/{_q(run)}/scores/commit", {"session": session, "reward": reward})

    async def fail_score(self, run: str, session: str, cause: str, detail: str) -> None:
        """Record that the reward is missing.

        ``cause`` is reward_missing, reward_invalid, reward_timeout or reward_error.
        """
        body = {"session": session, "cause": cause, "detail": detail}
        await self._call("POST", f"/control/runs/{_q(run)}/scores/commit", body)

    # Sessions of remote agents

    async def create_session(
        self,
        run: str,
        *,
        parent: str | None = None,
        label: str | None = None,
        max_turns: int | None = None,
        max_session_tokens: int | None = None,
        time_limit_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """A session outside the sample queue: ``{"session", "api_key", "base_url", "model"}``.

        Limits may only be narrower than the run's. With a ``parent`` it ends when that session ends. Calls with the
        same ``idempotency_key`` have the same session; without one every call has its own, however often it is sent.
        """
        limits = {"max_turns": max_turns, "max_session_tokens": max_session_tokens, "time_limit_s": time_limit_s}
        key = idempotency_key or secrets.token_urlsafe(32)
        body = {"run": run, "parent": parent, "label": label, "limits": limits, "idempotency_key": key}
        return cast(dict[str, Any], await self._call("POST", "/control/sessions", body))

    async def session(self, session: str) -> dict[str, Any]:
        """Whose the session is, its limits, children, turns, outcomes and tree."""
        return cast(dict[str, Any], await self._call("GET", f"/control/sessions/{_q(session)}"))

    async def sessions(
        self, run: str, *, open_only: bool = False, after: str = "", limit: int = 100
    ) -> list[dict[str, Any]]:
        """Sessions of a run by id without their turns, at most ``limit`` of those behind ``after``."""
        query = f"open_only={str(open_only).lower()}&after={_q(after)}&limit={limit}"
        return cast(list[dict[str, Any]], await self._call("GET", f"/control/runs/{_q(run)}/sessions?{query}"))

    async def finish_session(self, session: str, output: Any = None) -> str:
        """Seal a session; returns ``closed``, or for one of a sample the sample's new state."""
        return str((await self._call("POST", f"/control/sessions/{_q(session)}/finish", {"output": output}))["state"])

    async def reward_session(self, session: str, reward: float | None, *, cause: str = "", detail: str = "") -> None:
        """Record the reward, once; None: it is missing, for ``cause``."""
        body = {"reward": reward} if reward is not None else {"cause": cause, "detail": detail}
        await self._call("POST", f"/control/sessions/{_q(session)}/reward", body)

    # Routes

    async def routes(self) -> list[dict[str, Any]]:
        """Every route: lease, run, node, url, engine_kind, epoch, version, state, live."""
        return cast(list[dict[str, Any]], await self._call("GET", "/control/routes"))

    async def put_route(
        self,
        lease: str,
        *,
        run: str,
        node: str,
        url: str,
        epoch: int,
        version: int,
        state: RouteState,
        engine_kind: str = "embedded",
    ) -> None:
        """Set a route for the generations of ``run``; returns once it is in force.

        ``held``: nothing new starts on it. ``closed``: its generations were cut
        and continue elsewhere. Raises FencedError for an epoch out of date.
        """
        body = {
            "run": run,
            "node": node,
            "url": url,
            "epoch": epoch,
            "version": version,
            "state": state,
            "engine_kind": engine_kind,
        }
        await self._call("PUT", f"/control/routes/{_q(lease)}", body)

    async def delete_route(self, lease: str, epoch: int) -> None:
        """Close the route and forget it; an unknown lease is no error."""
        await self._call("DELETE", f"/control/routes/{_q(lease)}?epoch={epoch}")

    async def healthy(self) -> bool:
        """One probe of ``/healthz``, without retries."""
        try:
            status, _ = await self._send("GET", "/healthz", None, 5.0)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return status == 200

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        again: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send until answered or the deadline; connection errors and 503 are repeated, with the body ``again``."""
        started = time.monotonic()
        attempt = 0
        while True:
            left = self._deadline_s - (time.monotonic() - started)
            try:
                data = None if body is None else orjson.dumps(body)
                status, answer = await self._send(method, path, data, max(left, 0.001))
                if status != 503:
                    return _unwrap(method, path, status, answer)
                problem = "it is starting"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            asked = self._urls[0]
            self._urls.rotate(-1)
            pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
            if time.monotonic() - started + pause > self._deadline_s:
                raise errors.DeadlineError(
                    f"{method} {asked}{path}: no answer from the proxy within {self._deadline_s:g} s ({problem})"
                )
            attempt += 1
            body = body if again is None else again
            await asyncio.sleep(pause)

    async def _send(
        self, method: str, path: str, data: bytes | None, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(timeout_s, 5.0))
        async with self._http.request(
            method, self._urls[0] + path, data=data, timeout=timeout, headers=headers
        ) as answer:
            return answer.status, await answer.read()


def _q(name: str) -> str:
    return quote(name, safe="")


def _unwrap(method: str, path: str, status: int, data: bytes) -> Any:
    if status < 400:
        return orjson.loads(data) if data else None
    try:
        error = orjson.loads(data)["error"]
        kind, message = str(error["type"]), str(error["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        kind, message = "SeamlessFlowError", f"{method} {path}: HTTP {status}: {data[:500].decode(errors='replace')}"
    known = getattr(errors, kind, errors.SeamlessFlowError)
    if not (isinstance(known, type) and issubclass(known, errors.SeamlessFlowError)):
        known = errors.SeamlessFlowError
    raise known(message)
