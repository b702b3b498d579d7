"""``python -m benchmarks.algorithms PEERS_PYTHON``: a table of differences, then one JSON line.

Each number is the largest absolute difference, of the loss and of its gradient by the logits (of advantages, and of
returns). All arithmetic is float32, so equal formulas differ by rounding only. The exit status is 1 where a difference
is above the bound of its case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.algorithms import ours
from benchmarks.algorithms.cases import ADVANTAGES, LOSSES, Case

ROUNDING = 1e-6
PEERS = ("trl", "verl")
SCRIPT = Path(__file__).with_name("peers.py")


def main() -> int:
    python = Path(sys.argv[1])
    batch = ours.make_batch()
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "batch.npz", **batch)  # type: ignore[arg-type]  # its stubs know one signature too few
        subprocess.run([python, "-W", "ignore", SCRIPT, folder], check=True, timeout=600, stdout=sys.stderr)
        theirs = {peer: dict(np.load(Path(folder) / f"{peer}.npz")) for peer in PEERS}
    rows = [_row(case, ours.loss(case, batch), theirs) for case in LOSSES]
    rows += [_row(case, ours.advantage(case, batch), theirs) for case in ADVANTAGES]
    versions = _versions(python)
    _print(rows, versions)
    print(json.dumps({"bench": "algorithms", "versions": versions, "rows": rows}))
    return 0 if all(row["within_bound"] for row in rows) else 1


def _row(case: Case, found: ours.Arrays, theirs: dict[str, ours.Arrays]) -> dict[str, Any]:
    differences = {
        peer: {
            key: float(np.abs(value.astype(np.float64) - theirs[peer][f"{case.name}/{key}"]).max())
            for key, value in found.items()
        }
        for peer in PEERS
        if getattr(case, peer) is not None
    }
    largest = max(value for peer in differences.values() for value in peer.values())
    verdict = {"equal": largest <= ROUNDING, "within_bound": largest <= case.bound, "intended": case.intended}
    return {"case": case.name, **differences, **verdict}


def _versions(python: Path) -> dict[str, str]:
    folders = [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")]
    return {d.name: d.version for d in distributions(path=folders) if d.name in PEERS}


def _print(rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    heads = [f"{peer} {versions.get(peer, '?')}" for peer in PEERS]
    print(f"{'largest difference to':34}{heads[0]:>22}{heads[1]:>22}")
    for row in rows:
        cells = [" / ".join(f"{value:.1e}" for value in row.get(peer, {}).values()) or "-" for peer in PEERS]
        note = "" if row["equal"] else f"  meant: {row['intended']}" if row["within_bound"] else "  DIFFERS"
        print(f"{row['case']:34}{cells[0]:>22}{cells[1]:>22}{note}")
    print("of losses: loss / gradient by the logits; of advantages: advantages / returns; -: the peer has none")


if __name__ == "__main__":
    sys.exit(main())
