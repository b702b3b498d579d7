"""The embedded engine as a backend of the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Self

import torch

from storage.errors import EngineError, EngineRejected
from workers.engines.base import FEATURES, PauseMode
from workers.engines.embedded.architectures import read_stop_ids
from workers.engines.embedded.model import Forward, KvRows
from workers.engines.embedded.scheduler import Capacity, Scheduler
from workers.engines.embedded.settings import Settings
from workers.engines.embedded.stops import StopFinder
from workers.engines.embedded.thread import ModelThread
from workers.engines.embedded.tokenlog import TokenLog
from workers.engines.embedded.weights import Weights, load
from workers.engines.server import DropConnection, LoadRequest
from workers.engines.wire import GenerateRequest, Limits

log = logging.getLogger(__name__)

PREFILL_TOKENS = 512


def compute_type(dtype: str) -> torch.dtype:
    """bfloat16 weights are computed in bfloat16 where the CPU has instructions for it, else in float32.

    Without them (AVX-512 alone) bfloat16 products emulate and take 2 to 3 times as long as float32 ones, which are
    also nearer to the exact policy.
    """
    capabilities = torch.cpu.get_capabilities()
    native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    return torch.bfloat16 if dtype == "bfloat16" and native else torch.float32


class EmbeddedEngine:
    """One model, its scheduler and its thread. Create with :meth:`start`, end with :meth:`stop`."""

    def __init__(self, settings: Settings, weights: Weights, scheduler: Scheduler, limits: Limits) -> None:
        self._settings = settings
        self._config = weights.config
        self._scheduler = scheduler
        self._limits = limits
        self._path = str(settings.model_path)
        self._digest = weights.digest
        self._loading = asyncio.Lock()
        self._streams: dict[asyncio.Queue[dict[str, Any] | None], None] = {}
        self._started = time.monotonic()
        self.failed = asyncio.Event()
        """Set when the model thread has died: the process is of no use any more."""
        self._thread = ModelThread(scheduler, asyncio.get_running_loop(), self._on_failure)

    @classmethod
    async def start(cls, settings: Settings) -> Self:
        """Load the model; raises :class:`EngineRejected` if it cannot be served."""
        torch.set_num_threads(settings.threads)
        weights = await asyncio.to_thread(_load, settings, settings.model_path)
        config = weights.config
        compute = compute_type(settings.dtype)
        context = min(settings.max_context or config.max_positions, config.max_positions)
        capacity = Capacity(settings.max_running, settings.kv_tokens, PREFILL_TOKENS)
        stops = StopFinder(settings.model_path / "tokenizer.json")
        scheduler = Scheduler(
            weights,
            # Padding of a prefill may lie behind the last position of the context.
            Forward(config, compute, context + capacity.prefill_tokens),
            KvRows(config, compute),
            capacity,
            version=settings.weight_version,
            stop_ids=read_stop_ids(settings.model_path),
            stop_strings=stops,
            log=TokenLog(settings.log_tokens),
            random=Random(settings.seed),  # noqa: S311 - sampling, not secrets
        )
        limits = Limits(config.vocab_size, context, stops.available, FEATURES["embedded"])
        engine = cls(settings, weights, scheduler, limits)
        engine._thread.start()
        return engine

    async def stop(self) -> None:
        await self._thread.stop()
        self._scheduler.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[dict[str, Any], None]:
        self._limits.check(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._streams[queue] = None
        live = True
        try:
            try:
                await self._thread.call(lambda scheduler: scheduler.submit(request, queue.put_nowait))
            except EngineError:
                live = False
                raise
            while live:
                event = await queue.get()
                if event is None:
                    raise DropConnection
                live = event["meta_info"]["finish_reason"] is None
                yield event
        finally:
            del self._streams[queue]
            if live:
                self._thread.post(lambda: self._scheduler.abort(request.rid))

    async def pause(self, mode: PauseMode) -> None:
        await self._thread.call(lambda scheduler: scheduler.pause(mode))

    async def resume(self) -> None:
        await self._thread.call(lambda scheduler: scheduler.resume())

    async def abort(self, rid: str | None) -> None:
        await self._thread.call(lambda scheduler: scheduler.abort(rid))

    async def load(self, request: LoadRequest) -> dict[str, Any]:
        """Read the checkpoint beside the running model, then swap between two tokens; on an error nothing changes."""
        async with self._loading:
            if request.abort_all:
                await self.abort(None)
            weights = await asyncio.to_thread(_load, self._settings, Path(request.path), self._config)
            version = request.version if request.version is not None else self._scheduler.version
            await self._thread.call(lambda scheduler: scheduler.swap(weights, version))
            self._path, self._digest = request.path, weights.digest
            return {"checksum": weights.digest}

    async def flush_cache(self) -> None:
        await self._thread.call(lambda scheduler: scheduler.flush_cache())

    async def release_memory(self) -> None:
        async with self._loading:
            await self._thread.call(lambda scheduler: scheduler.release())

    async def resume_memory(self) -> None:
        async with self._loading:
            if self._scheduler.weights is not None:
                await self._thread.call(lambda scheduler: scheduler.restore())
                return
            weights = await asyncio.to_thread(_load, self._settings, Path(self._path), self._config)
            if weights.digest != self._digest:
                raise EngineRejected(
                    f"{self._path} has digest {weights.digest}, but {self._digest} was served from it: load a version"
                )
            await self._thread.call(lambda scheduler: scheduler.restore(weights))

    def serving(self) -> bool:
        return self._scheduler.serving and not self.failed.is_set()

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self._path,
            "served_model_name": self._path,
            "tokenizer_path": str(self._settings.model_path),
            "is_generation": True,
            "weight_version": self._scheduler.version,
            "checksum": self._digest,
            "load_format": "safetensors",
            "architectures": [self._config.architecture],
            "vocab_size": self._limits.vocab_size,
            "max_context": self._limits.max_context,
        }

    def server_info(self) -> dict[str, Any]:
        scheduler = self._scheduler
        return {
            "engine": "embedded",
            **self._plain_settings,
            "compute_dtype": str(compute_type(self._settings.dtype)).removeprefix("torch."),
            "paused": scheduler.paused,
            "released": scheduler.released,
            "max_total_num_tokens": self._settings.kv_tokens,
            "generated_tokens": scheduler.generated,
            "prefilled_tokens": scheduler.prefilled,
            "cached_tokens": scheduler.cache.tokens,
            "uptime_s": time.monotonic() - self._started,
        }

    def loads(self) -> dict[str, Any]:
        scheduler = self._scheduler
        return {
            "loads": [
                {
                    "num_running_reqs": scheduler.running,
                    "num_waiting_reqs": len(scheduler.waiting),
                    "num_used_tokens": scheduler.used_tokens,
                    "num_running_tokens": scheduler.running_tokens,
                    "num_generated_tokens": scheduler.generated,
                }
            ]
        }

    @cached_property
    def _plain_settings(self) -> dict[str, Any]:
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self._settings).items()
        }

    def _on_failure(self, error: BaseException) -> None:
        log.error("the engine is dead: %r", error)
        self.failed.set()
        for queue in self._streams:
            queue.put_nowait(None)


def _load(settings: Settings, path: Path, expected: Any = None) -> Weights:
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    return load(path, dtype=dtype, compute=compute_type(settings.dtype), expected=expected)
