"""What happens to the engines while agents talk, and which generations it interrupted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tests.contract.interruptions.agents import Agents
from tests.contract.interruptions.cluster import Cluster, Node
from workers.engines.base import PauseMode

Kind = Literal["update", "preemption", "kill", "other"]
MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort")
VICTIMS = ("all", "server", "worker")
EVENT_LIMIT_S = 1200.0
"""A real server is started within, also on a busy machine."""
PACE = 3
"""Chunks of streams between two events, for each conversation that waits for an answer."""


def interruptions(cluster: Cluster, choice: Mapping[str, Any]) -> set[Kind]:
    """What interrupted a generation, as the control API shows it: it had tokens and got more, in another segment or in
    the same one of other weights."""
    versions = [version for version, count in choice["versions"] for _ in range(count)]
    found: set[Kind] = set()
    for segment, after in zip(choice["segments"], [*choice["segments"][1:], None], strict=True):
        made = versions[segment["start"] : segment["end"]]
        if len(set(made)) > 1:
            found.add("update")
        if after is not None and 0 < segment["end"] < len(versions):
            last = max([segment["version"], *made])
            if any(cluster.modes[taken] == "abort" for taken in range(last + 1, after["version"] + 1)):
                found.add("update")
            else:
                found.add(cluster.ended.get((segment["node"], segment["epoch"]), "other"))
    return found


class Events:
    """One after the other."""

    def __init__(self, cluster: Cluster, agents: Agents, seed: int) -> None:
        self.count: Counter[Kind] = Counter()
        self._cluster = cluster
        self._agents = agents
        self._rng = random.Random(f"{seed}/events")
        self._modes = itertools.cycle(MODES)
        self._victims = itertools.cycle(VICTIMS)

    async def next(self, kind: Kind) -> None:
        """Let the agents come forward, then do it; raises TimeoutError if either does not end.

        While an engine starts again no other node is pre-empted: weights are updated instead.
        """
        if kind == "preemption" and len(self._up()) < len(self._cluster.nodes):
            kind = "update"
        for node in self._cluster.nodes.values():
            node.check()
        async with asyncio.timeout(EVENT_LIMIT_S):
            await self._progress()
            await {"update": self._update, "preemption": self._preemption, "kill": self._kill}[kind]()
        self.count[kind] += 1

    async def settled(self) -> None:
        """Returns when every node serves."""
        await self._until(lambda up: len(up) == len(self._cluster.nodes))

    async def _update(self) -> None:
        await self._cluster.update(next(self._modes))

    async def _preemption(self) -> None:
        await self.settled()
        node = self._any()
        await node.preempt()
        await self._progress()
        await node.give_back()

    async def _kill(self) -> None:
        """Of a node that serves, perhaps the last one; every third strikes in the middle of a weight update."""
        await self._until(lambda up: bool(up))
        node, whom = self._any(), next(self._victims)
        if self.count["kill"] % 3 == 1:
            update = asyncio.create_task(self._cluster.update("in_place"))
            await asyncio.sleep(self._rng.random() * 0.2)
            node.kill(whom)
            await update
        else:
            node.kill(whom)

    async def _until(self, enough: Callable[[list[Node]], bool]) -> None:
        async with asyncio.timeout(EVENT_LIMIT_S):
            while not enough(self._up()):
                for node in self._cluster.nodes.values():
                    node.check()
                await asyncio.sleep(0.1)

    def _any(self) -> Node:
        return self._rng.choice(self._up())

    def _up(self) -> list[Node]:
        return [node for node in self._cluster.nodes.values() if node.up]

    async def _progress(self) -> None:
        """Wait until the agents have been told something more."""
        due = self._agents.heard + PACE * len(self._agents.talking)
        while self._agents.heard < due:  # noqa: ASYNC110 - it is only counted
            await asyncio.sleep(0.02)
