"""One engine's campaign, from its start to the verdict."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.interruptions.agents import Agents, Asked
from tests.contract.interruptions.cluster import RUN, Cluster
from tests.contract.interruptions.declared import Declared, declared
from tests.contract.interruptions.events import Events, Kind, interruptions
from tests.contract.interruptions.evidence import Findings, weigh

KINDS: tuple[Kind, ...] = ("update", "preemption")
"""In turn, between the kills."""
SAY_EVERY = 10
"""Events."""


@dataclass(frozen=True)
class Report:
    """What came of one engine."""

    engine: str
    wanted: int
    kills_wanted: int
    seconds: float
    cluster: Cluster
    asked: list[Asked]
    events: Events
    findings: Findings
    declared: Declared

    @property
    def errors(self) -> list[str]:
        """What agents saw that was no answer."""
        return [f"{one.session}: {one.error}" for one in self.asked if one.error is not None]

    def passed(self) -> bool:
        """Whether the bar is met."""
        found = self.findings
        enough = found.interrupted >= self.wanted and self.events.count["kill"] >= self.kills_wanted
        return enough and not (self.errors or found.faults or self.declared.faults)

    def row(self) -> dict[str, Any]:
        """For the JSON line."""
        found = self.findings
        return {
            "engine": self.engine,
            "interrupted": found.interrupted,
            "by_update": found.by["update"],
            "by_preemption": found.by["preemption"],
            "by_kill": found.by["kill"],
            "updates": self.events.count["update"],
            "preemptions": self.events.count["preemption"],
            "kills": self.events.count["kill"],
            "requests": len(self.asked),
            "generations": found.generations,
            "agent_errors": len(self.errors),
            "mismatches": len(found.faults),
            "tokens": found.tokens,
            "tokens_undelivered": found.undelivered,
            "tokens_recomputed": found.recomputed,
            "versions_unknown": found.unknown,
            "declared": self.declared.kept,
            "declared_broken": len(self.declared.faults),
            "seconds": round(self.seconds, 1),
        }

    def text(self) -> str:
        """As a table of two columns, with the first of what is wrong below."""
        wrong = [*self.errors, *self.findings.faults, *self.declared.faults][:20]
        lines = [f"{name:>20}  {value}" for name, value in self.row().items()]
        return "\n".join([*lines, *(f"  ! {problem}" for problem in wrong)])


async def campaign(
    folder: Path, kind: str, models: tuple[Path, Path], wanted: int, kills: int, conversations: int, seed: int
) -> Report:
    """Interrupt until ``wanted`` generations were, and ``kills`` engines killed; ``folder`` has to be empty."""
    cluster = Cluster(folder, kind, models)
    begun = time.monotonic()
    async with cluster.running():
        agents = Agents(cluster.control, RUN, seed)
        events = Events(cluster, agents, seed)
        talking = asyncio.create_task(agents.talk(conversations), name="agents")
        try:
            await _interrupt(cluster, events, agents, wanted, kills, talking)
        finally:
            agents.enough.set()
        await events.settled()
        await talking
        kept = await declared(cluster)
        status = await cluster.control.run_status(RUN)
    findings = await asyncio.to_thread(weigh, cluster, agents.asked)
    if findings.undelivered is None:
        findings.undelivered = int(status["tokens"]["undelivered"])
    seconds = time.monotonic() - begun
    return Report(kind, wanted, kills, seconds, cluster, agents.asked, events, findings, kept)


async def _interrupt(
    cluster: Cluster, events: Events, agents: Agents, wanted: int, kills: int, talking: asyncio.Task[None]
) -> None:
    """The kills are spread over the campaign."""
    for number in itertools.count():
        choices = [choice for view in agents.ended for turn in view["turns"] for choice in turn["choices"]]
        count, killed = sum(bool(interruptions(cluster, choice)) for choice in choices), events.count["kill"]
        if number % SAY_EVERY == 0:
            print(f"{count} of {wanted} interrupted, events: {dict(events.count)}", file=sys.stderr, flush=True)
        if count >= wanted and killed >= kills:
            return
        if talking.done():
            talking.result()
        due = killed < kills and count * (kills + 1) >= wanted * (killed + 1)
        await events.next("kill" if due else KINDS[number % len(KINDS)])
