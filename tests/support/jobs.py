"""Small real jobs for tests: the run file of demo-tiny, made smaller."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from storage.ledger import Books, Ledger
from workers.cluster import StateFolder

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Job:
    """A run file and the state folder it runs in."""

    file: Path
    state: StateFolder
    run: str

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).with_name("seamlessflow")), *arguments]

    def demo(self, *more: str) -> list[str]:
        """Command line that runs the job to its end; its last line of output is the JSON object."""
        return self.command("demo", str(self.file), "--state", str(self.state.root), "--keep", *more)

    def books(self) -> Books:
        """What became of the run's samples, as the ledger has it."""
        ledger = Ledger(self.state.cluster().ledger_url)
        try:
            return ledger.books(self.run)
        finally:
            ledger.close()


def write_job(folder: Path, model: Path, run: str, **changes: dict[str, Any] | list[Any]) -> Job:
    """``examples/demo-tiny.yaml`` with four groups of four a step, and ``changes`` by section."""
    data = yaml.safe_load((EXAMPLES / "demo-tiny.yaml").read_text())
    data["run"] = run
    data["model"]["path"] = str(model / "model")
    data["data"] = {"path": str(model / "tasks.jsonl"), "held_out": str(folder / "held_out.jsonl")}
    lines = (model / "held_out.jsonl").read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(lines[:8]) + "\n")
    data["engine"]["log_tokens"] = True
    data["algorithm"] |= {"group_size": 4, "groups_per_step": 4}
    data["pipeline"] |= {"steps": 3, "target_in_flight": 24}
    data["evaluation"]["samples"] = 1
    for section, values in changes.items():
        data[section] = data.get(section, {}) | values if isinstance(values, dict) else values
    file = folder / f"{run}.yaml"
    file.write_text(yaml.safe_dump(data))
    return Job(file, StateFolder(folder / "state"), run)
