"""Cells of the simulated bench are simulated once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pipeline import cells
from benchmarks.pipeline.simulated import Cell, scenario
from simulator.advice import Choice
from simulator.run import simulate
from simulator.splits import split


def made(name: str, nodes: int) -> Cell:
    asked = replace(split(scenario("swe-64k", 4, "off_policy"), 2), stop_after=1)
    return Cell(name, nodes, {"off_policy": Choice(2, simulate(asked))}, seconds=1.0)


def test_a_cell_that_was_cut_short_of_the_end_of_the_bench_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def measured(name: str, nodes: int, shares: dict[str, float]) -> Cell:
        calls.append(name)
        return made(name, nodes)

    monkeypatch.setattr(cells, "KEPT", tmp_path)
    monkeypatch.setattr(cells, "measure", measured)
    first, again = cells.cell("swe-64k", 4, {}), cells.cell("swe-64k", 4, {})
    assert calls == ["swe-64k"]
    assert again == first
    cells.cell("swe-64k", 32, {})
    assert len(calls) == 2
