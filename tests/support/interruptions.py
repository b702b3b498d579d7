"""What scenarios of interrupted generations share: the engines' own log, requests that hang up when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from spoken import Spoken

from proxy.app import AgentApp
from proxy.asgi import GONE
from proxy.trajectory.turn import Choice
from workers.engines.scripted import ScriptedEngine


def engine_log(choice: Choice, *engines: ScriptedEngine) -> tuple[list[int], list[int]]:
    """(ids, versions) of a generation's tokens as the engines logged them; tokens that never arrived are left out."""
    outputs = {rid: output for engine in engines for rid, output in engine.outputs.items()}
    ids: list[int] = []
    versions: list[int] = []
    for segment in choice.recording.segments:
        output, length = outputs[segment.rid], segment.end - segment.start
        ids += output.ids[:length]
        versions += [int(version) for version in output.versions[:length]]
    return ids, versions


def assert_as_logged(choice: Choice, *engines: ScriptedEngine) -> None:
    """Every recorded token and its version are those of the engines' own log."""
    assert (choice.recording.ids, choice.recording.versions) == engine_log(choice, *engines)


def sent(engine: ScriptedEngine, tokens: int) -> Callable[[], bool]:
    """Whether some request was sent so many tokens."""
    return lambda: any(len(output.ids) >= tokens for output in engine.outputs.values())


def busy(proxy: Any) -> list[str]:
    """What still runs on behalf of a request."""
    kinds = ("generation ", "read ", "interrupt ", "open turn ", "agent's call")
    tasks = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(kinds)]
    return tasks + [f"live on {route['lease']}" for route in proxy.service.routes.describe() if route["live"]]


class Call:
    """A request in the HTTP server's place: it sees every message of the proxy and hangs up when told to.

    ``gate`` holds back what the proxy writes until it is set; of a ``broken`` body only a part arrives.
    """

    def __init__(
        self,
        bench: Any,
        spoken: Spoken,
        body: dict[str, Any],
        *,
        gate: asyncio.Event | None = None,
        broken: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self._gate = gate
        self._gone = asyncio.get_running_loop().create_future()
        data = orjson.dumps(body)
        self._body = [{"type": "http.request", "body": data[:7] if broken else data, "more_body": broken}]
        named = {"authorization": f"Bearer {bench.session['api_key']}", **(headers or {})}
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/s/{bench.session['session']}{spoken.path}",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            GONE: self._gone,
        }
        app = AgentApp(bench.proxy.service.sessions, _nothing)
        self.task = asyncio.create_task(app(scope, self._receive, self._send), name="agent's call")

    def hang_up(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    @property
    def data(self) -> bytes:
        """The body as far as it was written."""
        return b"".join(message.get("body", b"") for message in self.sent)

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop(0)
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gate is not None:
            await self._gate.wait()
        self.sent.append(dict(message))


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(f"{scope['path']} is none of the agent's paths")
