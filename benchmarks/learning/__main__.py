"""The learning proof: that agents are really trained, and that training one step off policy costs nothing if corrected.

    make bench-learning
    python -m benchmarks.learning --task tiny --setting on_policy --seeds 1

Each run is a whole one: agents on the OpenAI SDK, proxy, engines, shards, DeepSpeed, Temporal; nothing is short-cut.
The settings of a task differ in pipeline and algorithm only. Runs that have ended are kept in the state folder, and one
that was cut goes on: the same command makes what is missing, ``--anew`` makes everything again. Prints a table, the
verdicts and, last, one JSON line, and writes ``learning.png`` into the state folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from benchmarks.learning import report
from benchmarks.learning.curves import Row
from benchmarks.learning.live import run_all
from benchmarks.learning.plan import SETTINGS, TASKS, Cell, plan
from cli import stack
from storage.errors import SeamlessFlowError
from workers.cluster import StateFolder

RESULTS = "results.jsonl"


class Results:
    """The runs that have ended, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row.json()) + "\n")

    def of(self, cells: list[Cell]) -> dict[Cell, Row]:
        """Those of the cells that are there, in the cells' order; of two the newer."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = {row.digest: row for row in (Row.of(json.loads(line)) for line in lines)}
        return {cell: rows[cell.digest()] for cell in cells if cell.digest() in rows}


def bench(state: Path, cells: list[Cell]) -> list[Row]:
    """Make what is missing; all rows. Raises :class:`SeamlessFlowError` if a run fails."""
    state.mkdir(parents=True, exist_ok=True)
    results = Results(state / RESULTS)
    there = results.of(cells)
    missing = [cell for cell in cells if cell not in there]

    def keep(row: Row) -> None:
        results.add(row)
        _say(report.line(row))

    if missing:
        run_all(state, missing, keep, _say)
    return list(results.of(cells).values())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), action="append")
    parser.add_argument("--setting", choices=tuple(SETTINGS), action="append")
    parser.add_argument("--seeds", type=int, help="the first so many of each setting")
    parser.add_argument("--state", type=Path, default=Path(".seamlessflow/bench-learning"))
    parser.add_argument("--anew", action="store_true", help="forget the runs that have ended")
    given = parser.parse_args()
    state = given.state.resolve()
    try:
        cells = plan(given.task or tuple(TASKS), given.setting or tuple(SETTINGS), given.seeds)
        if given.anew:
            stack.down(StateFolder(state))
            shutil.rmtree(state, ignore_errors=True)
        rows = bench(state, cells)
    except (SeamlessFlowError, KeyboardInterrupt) as error:
        raise SystemExit(f"{str(error) or 'interrupted'}: the same command goes on with what is missing") from error
    report.draw(rows, state / "learning.png")
    print(report.table(rows))
    print("\n".join(["", *report.verdicts(rows), f"curves: {state / 'learning.png'}", ""]))
    print(json.dumps(report.headline(rows)))


if __name__ == "__main__":
    main()
