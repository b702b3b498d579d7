"""Adapter for engines that speak SGLang's native HTTP wire: the embedded and the scripted engine as they are.

Always streamed upstream. What a real SGLang server needs on top is in :mod:`workers.engines.sglang_server`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import orjson

from storage.errors import EngineError, EngineProtocolError, EngineRejected
from workers.engines.base import (
    Chunk,
    EngineInfo,
    Loaded,
    PauseMode,
    Sampling,
    Stats,
    TokenIds,
    Transfer,
    in_json,
    outside,
)
from workers.engines.http import GATHER_S as GATHER_S
from workers.engines.http import HttpEngine
from workers.engines.stream import StreamReader, parse_version


class SglangEngine(HttpEngine):
    """An :class:`~workers.engines.base.Engine`; options are those of :class:`HttpEngine`.

    Args:
        url: base URL, e.g. ``http://127.0.0.1:31000``.
        vocab_size: prompt and output ids at or above it are refused; None skips the check.
    """

    def __init__(self, url: str, *, vocab_size: int | None = None, **options: float) -> None:
        super().__init__(url, **options)
        self._vocab_size = vocab_size

    async def generate(
        self, ids: TokenIds, sampling: Sampling, *, request_id: str, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """See :meth:`workers.engines.base.Engine.generate`."""
        await self._admit(ids, sampling, request_id)
        body = _generate_body(ids, sampling, request_id, salt)
        reader = StreamReader(request_id, self._vocab_size)
        async with contextlib.aclosing(self._stream("generate", body, reader, whole=sampling.whole)) as chunks:
            async for chunk in chunks:
                yield chunk

    def continuable(self, sampling: Sampling) -> bool:
        """What depends on the output so far cannot move: a stop string that straddles a cut, a grammar, penalties."""
        return not (sampling.stop or sampling.json_schema or sampling.presence_penalty or sampling.frequency_penalty)

    async def pause(self, mode: PauseMode) -> None:
        await self._post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("continue_generation", {})

    async def abort(self, request_id: str | None) -> None:
        await self._post("abort_request", {"rid": request_id or "", "abort_all": request_id is None})
        if request_id is None:
            self._streams.hurry()

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
                running_tokens=_sum(loads, "num_running_tokens"),
                generated=_sum(loads, "num_generated_tokens"),
            )
        except (KeyError, TypeError):
            raise EngineProtocolError(f"{self.url}: /v1/loads answered {answer!r}") from None

    async def _admit(self, ids: TokenIds, sampling: Sampling, request_id: str) -> None:
        """Raise :class:`EngineRejected` for a request that must not be sent."""
        if not len(ids):
            raise EngineRejected("the prompt is empty: an engine needs at least one token")
        if self._vocab_size is not None and (bad := outside(ids, self._vocab_size)) is not None:
            raise EngineRejected(f"prompt id {bad} is outside the vocabulary of {self._vocab_size}")


def _generate_body(ids: TokenIds, sampling: Sampling, request_id: str, salt: str) -> bytes:
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
        "input_ids": in_json(ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": True,
        "extra_key": salt,
    }
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _sum(loads: Sequence[Mapping[str, Any]], field: str) -> int | None:
    """Of a figure that only our engine tells."""
    return sum(load[field] for load in loads) if all(field in load for load in loads) else None
