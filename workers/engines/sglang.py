"""Adapter for engines that speak SGLang's native HTTP wire: the embedded and the scripted engine as they are.

Always streamed upstream. What a real SGLang server needs on top is in :mod:`workers.engines.sglang_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson

from storage.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import Chunk, EngineInfo, Loaded, PauseMode, Sampling, Stats, Transfer
from workers.engines.http import SharedSession
from workers.engines.stream import SseDecoder, StreamReader, parse_version

_DRAIN_S = 1.0
GATHER_S = 0.02
"""Between two reads of one stream: each costs a wake-up here, and a commit, an event and the agent's parsing of it
behind, however few tokens it holds."""


class SglangEngine:
    """An :class:`~workers.engines.base.Engine` at ``url``.

    Args:
        url: base URL, e.g. ``http://127.0.0.1:31000``.
        vocab_size: prompt and output ids at or above it are refused; None skips the check.
        deadline_s: of one control call (pause, resume, abort, info, ...).
        load_deadline_s: of one weight update.
        stall_s: longest silence of a generation's stream, pauses included.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int | None = None,
        deadline_s: float = 30.0,
        load_deadline_s: float = 300.0,
        stall_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s
        self._stall_s = stall_s
        self._http = SharedSession()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """See :meth:`workers.engines.base.Engine.generate`."""
        await self._admit(ids, sampling, request_id)
        body = _generate_body(ids, sampling, request_id, salt)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._deadline_s, sock_read=self._stall_s)
        reader = StreamReader(request_id, self._vocab_size)
        sse = SseDecoder()
        try:
            async with self._http.get().post(
                f"{self.url}/generate", data=body, headers={"Content-Type": "application/json"}, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise self._refusal("generate", response.status, await response.read())
                async for data in _gathered(response.content):
                    for payload in sse.feed(data):
                        if payload == b"[DONE]":
                            continue
                        chunk = reader.read(payload)
                        yield chunk
                        if reader.finished:
                            await _drain(response)
                            return
        except TimeoutError:
            raise EngineUnavailable(
                f"{self.url}: request {request_id} stalled: nothing for {self._stall_s:g} s after {reader.seen} tokens"
            ) from None
        except aiohttp.ClientError as error:
            raise EngineUnavailable(
                f"{self.url}: the stream of request {request_id} broke after {reader.seen} tokens: {error!r}"
            ) from error
        raise EngineUnavailable(
            f"{self.url}: the stream of request {request_id} ended after {reader.seen} tokens without a final event"
        )

    def continuable(self, sampling: Sampling) -> bool:
        """What depends on the output so far cannot move: a stop string that straddles a cut, a grammar, penalties."""
        return not (sampling.stop or sampling.json_schema or sampling.presence_penalty or sampling.frequency_penalty)

    async def pause(self, mode: PauseMode) -> None:
        await self._post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("continue_generation", {})

    async def abort(self, request_id: str | None) -> None:
        await self._post("abort_request", {"rid": request_id or "", "abort_all": request_id is None})

    async def load_weights(self, path: str, version: int, transfer: Transfer | None = None) -> Loaded:
        """Load and confirm; the caches of old versions are kept apart by the salt, not by a flush."""
        if transfer is not None:
            raise EngineRejected(f"{self.url}: this engine receives no broadcast: it loads from disk")
        answer = await self._post(
            "update_weights_from_disk",
            {"model_path": path, "weight_version": str(version), "flush_cache": False},
            deadline_s=self._load_deadline_s,
        )
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineProtocolError(f"{self.url}: update_weights_from_disk({path}) answered {answer!r}")
        serving = (await self.info()).weight_version
        if serving != version:
            raise EngineProtocolError(f"{self.url}: asked for weight version {version}, the engine serves {serving}")
        checksum = answer.get("checksum")
        return Loaded(version, checksum if isinstance(checksum, str) else None)

    async def release_memory(self) -> None:
        await self._post("release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._post("resume_memory_occupation", {}, deadline_s=self._load_deadline_s)

    async def flush_cache(self) -> None:
        """Drop the prefix cache; refused while requests are live."""
        await self._post("flush_cache", {})

    async def ready(self) -> bool:
        """SGLang's own ``/ready`` says no while paused, so this asks ``/model_info``."""
        try:
            await self._get("model_info")
        except EngineError:
            return False
        return True

    async def info(self) -> EngineInfo:
        answer = await self._get("model_info")
        try:
            return EngineInfo(
                model_path=answer["model_path"],
                weight_version=parse_version(answer["weight_version"]),
                vocab_size=answer.get("vocab_size"),
                max_context=answer.get("max_context"),
            )
        except (KeyError, TypeError):
            raise EngineProtocolError(f"{self.url}: /model_info answered {answer!r}") from None

    async def stats(self) -> Stats:
        answer = await self._get("v1/loads")
        try:
            loads = answer["loads"]
            return Stats(
                running=sum(load["num_running_reqs"] for load in loads),
                waiting=sum(load["num_waiting_reqs"] for load in loads),
                used_tokens=sum(load.get("num_used_tokens", 0) for load in loads),
            )
        except (KeyError, TypeError):
            raise EngineProtocolError(f"{self.url}: /v1/loads answered {answer!r}") from None

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any], *, deadline_s: float | None = None) -> Any:
        return await self._call("POST", path, orjson.dumps(body), deadline_s or self._deadline_s)

    async def _get(self, path: str) -> Any:
        return await self._call("GET", path, None, self._deadline_s)

    async def _call(self, method: str, path: str, body: bytes | None, deadline_s: float) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with asyncio.timeout(deadline_s):
                async with self._http.get().request(
                    method, f"{self.url}/{path}", data=body, headers=headers
                ) as response:
                    raw = await response.read()
        except TimeoutError:
            raise EngineUnavailable(f"{self.url}: {path} gave no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}: {path}: {error!r}") from error
        if response.status != 200:
            raise self._refusal(path, response.status, raw)
        return _json(raw)

    def _refusal(self, path: str, status: int, raw: bytes) -> EngineError:
        message = f"{self.url}: {path} answered {status}: {_error_text(raw)}"
        if status == 404:
            return EngineProtocolError(message)
        return EngineRejected(message) if 400 <= status < 500 else EngineUnavailable(message)

    async def _admit(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> None:
        """Raise :class:`EngineRejected` for a request that must not be sent."""
        if not ids:
            raise EngineRejected("the prompt is empty: an engine needs at least one token")
        if self._vocab_size is not None and (min(ids) < 0 or max(ids) >= self._vocab_size):
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise EngineRejected(f"prompt id {bad} is outside the vocabulary of {self._vocab_size}")


def _generate_body(ids: Sequence[int], sampling: Sampling, request_id: str, salt: str) -> bytes:
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    if sampling.min_p:
        parameters["min_p"] = sampling.min_p
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    if sampling.presence_penalty:
        parameters["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        parameters["frequency_penalty"] = sampling.frequency_penalty
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): change for token, change in sampling.logit_bias.items()}
    if sampling.json_schema is not None:
        parameters["json_schema"] = sampling.json_schema
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": ids if isinstance(ids, list) else list(ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": True,
        "extra_key": salt,
    }
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    return orjson.dumps(body)


async def _gathered(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """All data, what comes within :data:`GATHER_S` in one piece; the first and the last piece never wait."""
    ended = asyncio.Event()
    content.on_eof(ended.set)
    while data := await content.readany():
        yield data
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                await ended.wait()


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a finished stream, so that its connection can be used again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):  # the generation is complete whatever happens here
        async with asyncio.timeout(_DRAIN_S):
            await response.read()


def _json(raw: bytes) -> Any:
    """The body as JSON; None if it is empty or plain text, as some SGLang endpoints answer."""
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return None


def _error_text(raw: bytes) -> str:
    answer = _json(raw)
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return str(message)
    return raw[:300].decode(errors="replace")
