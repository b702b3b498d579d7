"""Simulated cells that are kept, so that a bench that was cut goes on where it was.

A cell is a function of its name, its size and the code; it is kept under a digest of all three's sources.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.pipeline.simulated import Cell, measure

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".bench" / "pipeline"
SOURCES = ("simulator/*.py", "simulator/presets.yaml", "workflows/scheduling/*.py", "benchmarks/pipeline/simulated.py")
_CELL = TypeAdapter(Cell)


@cache
def digest() -> str:
    """Of all code that a cell depends on."""
    files = sorted(file for pattern in SOURCES for file in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cell(name: str, nodes: int, shares: dict[str, float]) -> Cell:
    """The cell as it is kept, else measured and kept."""
    file = KEPT / digest() / f"{name}@{nodes}.json"
    if file.exists():
        return _CELL.validate_json(file.read_bytes())
    measured = measure(name, nodes, shares)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(_CELL.dump_json(measured))
    part.rename(file)
    return measured
