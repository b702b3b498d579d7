"""Our proxy against what else stands between agents and engines: CPU, latency, memory, bytes, and a weight update.

    make bench-proxy                       # makes the peers' environments, then measures: eight minutes
    python -m benchmarks.proxy --quick     # whether everything runs: one minute

One run, contestants in turn, round after round, one scripted engine for all (:mod:`benchmarks.proxy.engine`), each
contestant a process of its own. ``rllm-model-gateway`` does the same job as ours; ``smg``, ``sglang-router`` and
``vllm-router`` record nothing. Bodies and answers are the same for all (:mod:`benchmarks.proxy.traffic`): the headline
figures are of later turns, in which a request repeats the whole history. CPU is the process's own clock over many
requests, so a busy machine changes it little; latencies and rates want a quiet one. Prints tables and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.proxy import report
from benchmarks.proxy.contestants import Contestant, Gateway, Ours, Plain, peers, stopped_at_end
from benchmarks.proxy.growth import Growth, grow_gateway, grow_ours
from benchmarks.proxy.held import hold
from benchmarks.proxy.measure import Result, Scenario, run_round
from benchmarks.proxy.model import END_OF_TURN, Prose, model_directory
from benchmarks.proxy.process import Process, processors, python
from benchmarks.proxy.scenarios import Plan, full, quick
from benchmarks.proxy.traffic import ANSWER_TOKENS
from storage.ports import free_port


def make_answers(model: Path) -> dict[str, dict[str, Any]]:
    """What the engine says, token by token: plain text and the end of the turn, as many tokens as each answer has."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(re.sub(r"\s+", " ", Prose(3).text(4_000))).ids
    answers = {}
    for name, count in ANSWER_TOKENS.items():
        said = ids[: count - 1]
        answers[name] = {"ids": [*said, END_OF_TURN], "texts": [*(tokenizer.decode([token]) for token in said), ""]}
    return answers


async def measure(plan: Plan, folder: Path, environments: Path) -> dict[str, Any]:
    """Run the plan, print its tables, return the headline."""
    model = model_directory(environments / "model")
    answers = make_answers(model)
    texts = {name: "".join(answer["texts"]) for name, answer in answers.items()}
    (folder / "answers.json").write_text(json.dumps(answers))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = python("benchmarks.proxy.engine", "--port", str(port), "--answers", str(folder / "answers.json"))
    engine = Plain(report.ENGINE, url, Process(command, folder / "engine.log"), direct=True)
    running: list[Any] = [engine]
    async with stopped_at_end(running):
        await engine.started()
        ours = await Ours.start(report.OURS, folder / "process", url, model, "process")
        running.append(ours)
        running.append(await Ours.start(report.POWER, folder / "power", url, model, "power"))
        others, missing = await peers(environments, folder, url)
        running.extend(others)
        for name, reason in missing.items():
            print(f"{name} is not measured: {reason}\n")
        results = {scenario.name: await _scenario(scenario, running, url, texts) for scenario in plan.scenarios}
        growths = await _growth(plan, ours, others, texts)
        held = await hold(ours, url, texts["long"], requests=plan.held_requests, seconds=plan.held_s)
        print(report.held_table(held, plan.held_s) + "\n")
    return report.headline(results, growths[report.OURS], held)


async def _scenario(
    scenario: Scenario, running: Sequence[Contestant], engine: str, texts: dict[str, str]
) -> dict[str, Result]:
    contestants = [one for one in running if one.records or one.direct or not scenario.recorders_only]
    results = {one.name: Result() for one in contestants}
    for number in range(scenario.rounds):
        await run_round(scenario, contestants, engine, texts, _seed(scenario.name, number), results)
    print(report.scenario_table(scenario, results) + "\n", flush=True)
    return results


async def _growth(plan: Plan, ours: Ours, others: Sequence[Plain], texts: dict[str, str]) -> dict[str, Growth]:
    seed = _seed("growth", 0)
    growths = {ours.name: await grow_ours(ours, plan.growing, plan.grown_sessions, texts, seed)}
    for gateway in others:
        if isinstance(gateway, Gateway):
            growths[gateway.name] = await grow_gateway(gateway, plan.growing, texts, seed)
    print(report.growth_table(growths, plan.growing.turns) + "\n", flush=True)
    return growths


def _seed(name: str, number: int) -> int:
    return sum(name.encode()) * 100 + number


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="one short round of everything")
    flags.add_argument("--environments", type=Path, default=Path(".bench"), help="of the peers; also keeps the model")
    arguments = flags.parse_args()
    started = time.monotonic()
    load = os.getloadavg()[0]
    print(f"{processors()} cores, load {load:.1f}, Python {platform.python_version()}, {platform.platform()}")
    print("CPU is of the contestant's processes, in ms a request; latencies are added to the engine's own, in ms\n")
    plan = quick() if arguments.quick else full()
    with (
        tempfile.TemporaryDirectory(prefix="bench-proxy-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        figures = runner.run(measure(plan, Path(folder), arguments.environments.absolute()))
    print(f"took {time.monotonic() - started:.0f} s")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
