"""What a weight update costs the agents, for each engine and way of transfer, behind the real proxy.

    make bench-sync                                # every engine that is built
    python -m benchmarks.sync --engines embedded scripted

Agents stream long answers; meanwhile the weights change several times, by the code that a node agent and a lease run.
*Pause to first token* is from the moment the route is held until the first agent has a token of the new weights; *held*
is the gap in each agent's stream. A token is *lost* if an agent did not get it as the journal has it (and, where the
engine keeps one, its own log); *again* counts those that were computed but cut off. Prints a table and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sync.agents import Agents
from benchmarks.sync.measure import Row, Update, headline, judge, print_table
from benchmarks.sync.rig import LIMIT_S, RUN, Rig, rig
from workers.engines.kinds import KINDS
from workflows.spec import EngineSpec

CASES = {
    "embedded": (("disk", "in_place"), ("disk", "retract"), ("disk", "abort")),
    "scripted": (("disk", "in_place"),),
    "sglang": (("disk", "in_place"), ("collective", "in_place")),
    "vllm": (("disk", "in_place"), ("collective", "in_place")),
}
"""Engine -> transfers and what running requests do."""
BETWEEN = 12
"""Tokens that an agent has, on average, between two updates."""


async def measure(case: tuple[str, str], made: Rig, plan: argparse.Namespace) -> Row:
    """Agents under several updates of one kind."""
    transfer, mode = case
    before = made.made()
    agents = Agents(made.url, made.control, RUN, plan.agents, plan.tokens)
    agents.start()
    updates: list[Update] = []
    try:
        for _ in range(plan.updates):
            await _more(agents)
            weights = await asyncio.to_thread(made.publish)
            updates.append(await made.update(weights, transfer, mode))
        await _more(agents)
    finally:
        await agents.stop()
    await made.complete(agents.answers)
    after = made.made()
    count = None if before is None or after is None else after - before
    return judge((made.kind, transfer, mode), updates, list(agents.answers.values()), count)


async def _more(agents: Agents) -> None:
    """Wait until the agents have more tokens."""
    wanted, end = agents.arrived() + BETWEEN * agents.count, time.monotonic() + LIMIT_S
    while agents.arrived() < wanted:
        if time.monotonic() > end:
            raise TimeoutError(f"{agents.count} agents had no {BETWEEN} tokens each within {LIMIT_S:g} s")
        await asyncio.sleep(0.02)


async def run(plan: argparse.Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    for kind in plan.engines:
        problem = KINDS[kind].problem(EngineSpec(kind=kind))
        if problem is not None:
            print(f"{kind} is left out: {problem}\n", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix=f"bench-sync-{kind}-") as folder:
            async with rig(kind, Path(folder)) as made:
                rows += [await measure(case, made, plan) for case in CASES[kind]]
    print(print_table(rows))
    return headline(rows)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--engines", nargs="+", choices=sorted(CASES), default=list(CASES))
    flags.add_argument("--agents", type=int, default=8)
    flags.add_argument("--updates", type=int, default=5, help="of each kind")
    flags.add_argument("--tokens", type=int, default=160, help="of each answer")
    plan = flags.parse_args()
    started = time.monotonic()
    print(f"{plan.agents} agents, answers of {plan.tokens} tokens\n", flush=True)
    figures = asyncio.run(run(plan))
    print(f"\ntook {time.monotonic() - started:.0f} s")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
