"""What is trained: tasks, settings, seeds, and the run file of each. Pure, but for reading the demos' run files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.runfile import absolute, read_document
from storage.errors import ConfigError
from workflows.spec import NodeSpec, RunSpec

ROOT = Path(__file__).resolve().parents[2]
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """What a model has to learn: a demo with smaller steps."""

    demo: str
    """Its run file; model, agent, reward and engine are taken from there."""
    build: tuple[str, ...]
    """Modules that make model and tasks, each called with ``--out <folder>``."""
    settings: tuple[str, ...]
    seeds: int
    first: int
    """A run begins with the mean reward of so many steps."""
    last: int
    """It ends with the mean reward of so many."""
    lanes: tuple[tuple[str, ...], ...]
    """Nodes of a run, the one that trains first. Each lane makes one run after another, lanes side by side."""
    sections: Sections
    """What differs from the demo, in all settings."""
    ppo: dict[str, Any] = field(default_factory=dict)
    """Keys of ``algorithm`` that only PPO has."""


LANES = (("a-0", "a-1"), ("b-0", "b-1"))
NODES = tuple(
    NodeSpec(id=name, tags=frozenset({"rollout", "train"} if name.endswith("0") else {"rollout"}))
    for lane in LANES
    for name in lane
)
"""The cluster. Nodes are not pinned: whoever has work uses a core."""

TASKS = {
    "tiny": Task(
        demo="demo-tiny.yaml",
        build=("examples.models.tiny",),
        settings=("on_policy", "corrected", "uncorrected", "ppo"),
        seeds=3,
        first=2,
        last=6,
        lanes=LANES,
        sections={
            "algorithm": {
                "group_size": 4,
                "groups_per_step": 8,
                "drop_zero_variance": False,
                "entropy_coefficient": 0.01,
            },
            "trainer": {"learning_rate": 1e-4},
            "pipeline": {"steps": 40, "target_in_flight": 32},
        },
        ppo={"critic_learning_rate": 1e-3},
    ),
    "smollm2": Task(
        demo="demo.yaml",
        build=("examples.models.smollm2", "examples.calculator.make_tasks"),
        settings=("on_policy", "corrected"),
        seeds=1,
        first=1,
        last=4,
        lanes=(LANES[0],),
        sections={
            "algorithm": {"group_size": 4, "groups_per_step": 8, "drop_zero_variance": False},
            "trainer": {"learning_rate": 5e-6},
            "pipeline": {"steps": 20, "target_in_flight": 32},
        },
    ),
}

ON_POLICY = {"name": "colocated", "max_staleness": None}
ONE_STEP_OFF = {"name": "multiplexed", "max_staleness": 1}
SETTINGS: dict[str, Sections] = {
    "on_policy": {"algorithm": {"name": "grpo"}, "pipeline": ON_POLICY},
    "corrected": {"algorithm": {"name": "grpo", "correction": "truncate"}, "pipeline": ONE_STEP_OFF},
    "uncorrected": {"algorithm": {"name": "grpo", "correction": "none"}, "pipeline": ONE_STEP_OFF},
    "ppo": {"algorithm": {"name": "ppo"}, "pipeline": ON_POLICY},
}
"""By name: what a setting says in the run file; nothing else differs between settings, but for the critic's keys."""


@dataclass(frozen=True)
class Cell:
    """One run of the proof."""

    task: str
    setting: str
    seed: int
    lane: int
    """Of the task's; a run that was cut goes on where it was."""

    @property
    def run(self) -> str:
        return f"{self.task}-{self.setting.replace('_', '-')}-{self.seed}"

    def digest(self) -> str:
        """Of its whole run file, wherever the models are: a result of another plan is not this one's."""
        spec = run_file(self, Path("/models"))
        return hashlib.sha256(json.dumps([spec.digest(), spec.resumable()], sort_keys=True).encode()).hexdigest()


def plan(
    tasks: Collection[str] = tuple(TASKS), settings: Collection[str] = tuple(SETTINGS), seeds: int | None = None
) -> list[Cell]:
    """The proof's runs, or those of some tasks, settings and the first seeds; each is what it is in the whole.

    Raises :class:`ConfigError` if there is none.
    """
    chosen = [
        c for c in _everything() if c.task in tasks and c.setting in settings and (seeds is None or c.seed < seeds)
    ]
    if not chosen:
        asked = f"tasks {', '.join(tasks)}, settings {', '.join(settings)}, seeds {seeds}"
        raise ConfigError(f"the proof has no such run ({asked}): leave an option out")
    return chosen


def _everything() -> list[Cell]:
    cells = []
    for name, task in TASKS.items():
        pairs = [(setting, seed) for setting in task.settings for seed in range(task.seeds)]
        cells += [Cell(name, *pair, lane=number % len(task.lanes)) for number, pair in enumerate(pairs)]
    return cells


def run_file(cell: Cell, models: Path) -> RunSpec:
    """The run file of one run; ``models``: folder in which each task has model and data in a folder of its name."""
    task = TASKS[cell.task]
    demo = read_document(ROOT / "examples" / task.demo)
    data = absolute(demo.data, demo.base())
    for sections in (task.sections, SETTINGS[cell.setting]):
        for name, keys in sections.items():
            data[name] = {**data[name], **keys}
    if cell.setting == "ppo":
        data["algorithm"] |= task.ppo
    folder = models / cell.task
    data["model"]["path"], data["data"] = str(folder / "model"), {"path": str(folder / "tasks.jsonl")}
    nodes = [node for node in NODES if node.id in task.lanes[cell.lane]]
    return RunSpec.model_validate(
        {**data, "run": cell.run, "seed": cell.seed, "code": str(ROOT), "nodes": nodes, "evaluation": {}}
    )
