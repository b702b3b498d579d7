"""What a contract test drives an engine with."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contract.engines.models import CONTEXT, VOCAB
from tests.contract.engines.rigs.base import Process, Rig
from workers.engines.base import Chunk, Engine, Loaded, Sampling
from workers.engines.sglang import GATHER_S

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 6000
"""Tokens of a request that is still running when the test gets to it."""
LIMIT_S = 90.0


@dataclass(frozen=True)
class Checkpoints:
    """Two weight versions of one model."""

    first: Path
    second: Path
    vocab_size: int = VOCAB
    max_context: int = CONTEXT


@dataclass
class Generation:
    """A running request and what it has given so far."""

    rid: str
    prompt: list[int]
    sampling: Sampling
    chunks: list[Chunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.grown.set()
        if chunk.ids:
            self.begun.set()

    @property
    def finish(self) -> str | None:
        last = self.chunks[-1].finish
        return last.kind if last is not None else None

    @property
    def versions(self) -> list[int | None]:
        return [span.version for span in self.chunks[-1].spans or () for _ in range(span.start, span.end)]

    async def end(self) -> Generation:
        """Raises what the adapter raised."""
        assert self.task is not None
        await asyncio.wait_for(self.task, LIMIT_S)
        return self

    async def reach(self, tokens: int) -> None:
        """Returns when so many tokens are there, or the request has ended."""
        assert self.task is not None
        async with asyncio.timeout(LIMIT_S):
            while len(self.ids) < tokens and not self.task.done():
                self.grown.clear()
                waits = {self.task, asyncio.ensure_future(self.grown.wait())}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


@dataclass
class Bench:
    """One test's hold of an engine: request ids and salts of its own, and how to put the engine back."""

    rig: Rig
    process: Process
    checkpoints: Checkpoints
    engine: Engine
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    version: int = 0
    live: list[Generation] = field(default_factory=list)

    def can(self, ability: str) -> bool:
        return ability in self.rig.abilities

    def start(
        self,
        *,
        tokens: int = 8,
        prompt: list[int] | None = None,
        rid: str | None = None,
        salt: str = "",
        **options: Any,
    ) -> Generation:
        """A request in a task of its own; KV is shared within the test and weight version only."""
        if self.can("seeds"):
            options.setdefault("seed", 1)
        sampling = Sampling(max_new_tokens=tokens, **options)
        generation = Generation(rid or uuid.uuid4().hex, prompt or PROMPT, sampling)
        salted = f"{self.salt}-{salt or self.version}"

        async def read() -> None:
            async for chunk in self.engine.generate(
                generation.prompt, sampling, request_id=generation.rid, salt=salted
            ):
                generation.add(chunk)

        generation.task = asyncio.create_task(read())
        self.live.append(generation)
        return generation

    async def generate(self, **options: Any) -> Generation:
        """A request, to its end."""
        return await self.start(**options).end()

    async def running(self, tokens: int = LONG, **options: Any) -> Generation:
        """A long request that has given its first tokens."""
        generation = self.start(tokens=tokens, **options)
        await generation.reach(1)
        assert generation.begun.is_set()
        return generation

    async def load(self, model: Path, version: int) -> Loaded:
        loaded = await self.engine.load_weights(str(model), version)
        self.version = version
        return loaded

    async def calm(self) -> None:
        """Returns when what a paused engine has made is read: an adapter gathers what it reads for a moment."""
        await self.engine.info()
        await asyncio.sleep(10 * GATHER_S)

    async def until_live(self, count: int) -> None:
        """Returns when the engine says that so many requests run or wait."""
        async with asyncio.timeout(LIMIT_S):
            while (stats := await self.engine.stats()).running + stats.waiting != count:  # noqa: ASYNC110 - it tells no one
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        """Returns when the engine has no request left."""
        await self.until_live(0)

    async def restore(self) -> None:
        """As the test found it: no request, not paused, the first checkpoint as version 0."""
        await self.engine.resume()
        await self.engine.abort(None)
        for generation in self.live:
            if generation.task is not None:
                await asyncio.wait({generation.task}, timeout=LIMIT_S)
                generation.task.cancel()
        await asyncio.gather(*(g.task for g in self.live if g.task is not None), return_exceptions=True)
        await self.idle()
        info = await self.engine.info()
        if (info.model_path, info.weight_version) != (str(self.checkpoints.first), 0):
            await self.load(self.checkpoints.first, 0)
