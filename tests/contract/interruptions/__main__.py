"""``make prove-interruptions``: agents talk to engines that are updated, pre-empted and killed under them.

Prints a table and, last, one JSON line; exits 1 unless every engine meets the bar: no error that an agent sees, every
token told, recorded and logged once, in so many interrupted generations and kills.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import tempfile
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tests.contract.engines.rigs.every import rig_of
from tests.contract.interruptions.campaign import campaign
from tests.contract.interruptions.model import write_models

BARS = {"embedded": 1000, "sglang": 50, "vllm": 50}
"""Interrupted generations of each engine."""
CONVERSATIONS = {"embedded": 48, "sglang": 16, "vllm": 16}
"""At a time."""
KILLS = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract.interruptions", description=__doc__)
    parser.add_argument("--engine", action="append", choices=sorted(BARS), help="may be repeated; default: all built")
    parser.add_argument("--generations", type=int, help="interrupted generations wanted; default: the bar")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--agents", type=int, help="conversations at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder in which journals and logs are left, made for it")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    kinds = options.engine or [kind for kind in BARS if rig_of(kind).missing() is None]
    reports = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        models = write_models(folder / "models")
        for kind in kinds:
            wanted, agents = options.generations or BARS[kind], options.agents or CONVERSATIONS[kind]
            (folder / kind).mkdir(parents=True)
            work = campaign(folder / kind, kind, models, wanted, options.kills, agents, options.seed)
            reports.append(asyncio.run(work))
            print(reports[-1].text(), flush=True)
    print(json.dumps({"bench": "interruptions", "rows": [report.row() for report in reports]}))
    return 0 if all(report.passed() for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
