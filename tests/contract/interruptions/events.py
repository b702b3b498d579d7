"""What happens to the engines while agents talk, and whom it hit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from storage.errors import NotFoundError
from tests.contract.interruptions.agents import Agents
from tests.contract.interruptions.cluster import Cluster, Node
from workers.engines.base import PauseMode

Kind = Literal["update", "preemption", "kill"]
MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort")
VICTIMS = ("all", "server", "worker")
EVENT_LIMIT_S = 1200.0
"""A real server is started within, also on a busy machine."""
PACE = 3
"""Chunks of streams between two events, for each conversation that waits for an answer."""


def interrupted(choice: Mapping[str, Any]) -> bool:
    """Whether a generation, as the control API shows it, had tokens and got more in another segment, or in the same one
    of other weights."""
    count, segments = choice["completion_tokens"], choice["segments"]
    return len(choice["versions"]) > 1 or any(0 < segment["end"] < count for segment in segments[:-1])


@dataclass(frozen=True)
class Event:
    """``hit``: generation -> number of the segment that was seen to run on the engines just before they were struck."""

    kind: Kind
    what: str
    hit: Mapping[str, int]
    version: int
    """Of the weights once it is over."""

    def did_interrupt(self, choice: Mapping[str, Any]) -> bool:
        """Whether it is seen to be what interrupted the generation; of one that began just then this is unknown."""
        number = self.hit.get(choice["generation"])
        if number is None:
            return False
        segment = choice["segments"][number]
        if self.kind == "update" and self.what != "abort":
            versions = [version for version, count in choice["versions"] for _ in range(count)]
            made = versions[segment["start"] : segment["end"]]
            return min(made, default=0) < self.version <= max(made, default=0)
        return number < len(choice["segments"]) - 1 and 0 < segment["end"] < choice["completion_tokens"]


class Events:
    """One after the other."""

    def __init__(self, cluster: Cluster, agents: Agents, seed: int) -> None:
        self.over: list[Event] = []
        self._cluster = cluster
        self._agents = agents
        self._rng = random.Random(f"{seed}/events")
        self._modes = itertools.cycle(MODES)
        self._victims = itertools.cycle(VICTIMS)

    @property
    def count(self) -> Counter[Kind]:
        return Counter(event.kind for event in self.over)

    def kinds(self, choice: Mapping[str, Any]) -> set[Kind]:
        """What is known to have interrupted a generation."""
        return {event.kind for event in self.over if event.did_interrupt(choice)}

    async def next(self, kind: Kind) -> None:
        """Let the agents come forward, then do it; raises TimeoutError if either does not end."""
        for node in self._cluster.nodes.values():
            node.check()
        async with asyncio.timeout(EVENT_LIMIT_S):
            await self._progress()
            await {"update": self._update, "preemption": self._preemption, "kill": self._kill}[kind]()

    async def settled(self) -> None:
        """Returns when both nodes serve."""
        async with asyncio.timeout(EVENT_LIMIT_S):
            while not all(node.up for node in self._cluster.nodes.values()):
                for node in self._cluster.nodes.values():
                    node.check()
                await asyncio.sleep(0.1)

    async def _update(self) -> None:
        mode = next(self._modes)
        serving = [name for name, node in self._cluster.nodes.items() if node.up]
        async with self._noted("update", mode, *serving):
            await self._cluster.update(mode)

    async def _preemption(self) -> None:
        await self.settled()
        node = self._any()
        async with self._noted("preemption", node.name, node.name):
            await node.preempt()
        await self._progress()
        await node.give_back()

    async def _kill(self) -> None:
        """Every third one strikes in the middle of a weight update."""
        await self.settled()
        node, whom = self._any(), next(self._victims)
        async with self._noted("kill", f"{whom} of {node.name}", node.name):
            if self.count["kill"] % 3 == 1:
                update = asyncio.create_task(self._cluster.update("in_place"))
                await asyncio.sleep(self._rng.random() * 0.2)
                node.kill(whom)
                await update
            else:
                node.kill(whom)

    def _any(self) -> Node:
        return self._rng.choice(list(self._cluster.nodes.values()))

    async def _progress(self) -> None:
        """Wait until the agents have been told something more."""
        due = self._agents.heard + PACE * len(self._agents.talking)
        while self._agents.heard < due:  # noqa: ASYNC110 - it is only counted
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def _noted(self, kind: Kind, what: str, *nodes: str) -> AsyncIterator[None]:
        hit = await self._running_on(*nodes)
        yield
        self.over.append(Event(kind, what, hit, self._cluster.newest.version))

    async def _running_on(self, *nodes: str) -> dict[str, int]:
        views = await asyncio.gather(*(self._view(session) for session in list(self._agents.talking)))
        found: dict[str, int] = {}
        for view in views:
            for choice in view["turns"][-1]["choices"] if view["turns"] else ():
                segments = choice["segments"]
                if choice["status"] == "open" and segments and segments[-1]["node"] in nodes:
                    found[choice["generation"]] = segments[-1]["number"]
        return found

    async def _view(self, session: str) -> dict[str, Any]:
        try:
            return await self._cluster.control.session(session)
        except NotFoundError:
            return {"turns": []}
