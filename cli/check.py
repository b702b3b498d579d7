"""`seamlessflow check`: everything that is wrong with a run file, at once, before anything starts.

Each check looks at one section. A section that the schema refuses is skipped, the others are still looked at.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from cli import memory, targets
from cli.runfile import Document, Location, Problem, RunFileError, absolute, read_document, validate
from workers.engines.embedded.architectures import SUPPORTED
from workers.engines.kinds import KINDS
from workflows.spec import (
    AgentSpec,
    AlgorithmSpec,
    DataSpec,
    EngineSpec,
    ModelSpec,
    NodeSpec,
    RewardSpec,
    RunSpec,
    TrackerSpec,
)

MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
MOST_DATA_PROBLEMS = 5

Found = Iterator[tuple[Location, str]]
Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True)
class Checked:
    """Result of :func:`check_run`: the spec if nothing is wrong, else the problems in line order."""

    spec: RunSpec | None
    problems: tuple[Problem, ...]


def check_run(path: Path, *, engine: str | None = None, steps: int | None = None) -> Checked:
    """Look at the run file at ``path``; starts nothing, imports no user code, never raises for what is wrong in it.

    ``engine`` stands in for its ``engine.kind``, ``steps`` for its ``pipeline.steps``.
    """
    try:
        document = read_document(path)
    except RunFileError as error:
        return Checked(None, error.problems)
    for name, key, value in (("engine", "kind", engine), ("pipeline", "steps", steps)):
        section = document.data.get(name, {})
        if value is not None and isinstance(section, dict):
            document = replace(document, data={**document.data, name: {**section, key: value}})
    spec, problems = validate(document)
    problems += [document.problem(location, message) for location, message in _world(document, spec)]
    problems.sort(key=lambda problem: (problem.line or 0, problem.where))
    return Checked(None if problems else spec, tuple(problems))


def require_run(path: Path, *, engine: str | None = None, steps: int | None = None) -> RunSpec:
    """The checked spec, as of :func:`check_run`. Raises :class:`RunFileError` that lists all problems."""
    checked = check_run(path, engine=engine, steps=steps)
    if checked.spec is None:
        raise RunFileError(path, checked.problems)
    return checked.spec


def _world(document: Document, spec: RunSpec | None) -> Found:
    data = absolute(document.data, document.base())
    model = _section(ModelSpec, data.get("model"))
    engine = _section(EngineSpec, data.get("engine", {}))
    nodes = _nodes(data.get("nodes"))
    code = Path(str(data["code"]))
    if not code.is_dir():
        yield ("code",), f"{code} is no folder"
    if model:
        yield from check_model(model, engine)
    if (tasks := _section(DataSpec, data.get("data"))) is not None:
        yield from check_data(tasks)
    if (agent := _section(AgentSpec, data.get("agent", {}))) is not None:
        yield from check_agent(agent, code)
    if (reward := _section(RewardSpec, data.get("reward"))) is not None:
        yield from check_reward(reward, code)
    if engine:
        yield from check_engine(engine)
    if (algorithm := _section(AlgorithmSpec, data.get("algorithm", {}))) is not None:
        yield from check_algorithm(algorithm, code)
    for index, node in nodes:
        yield from check_node(node, index)
    if (trackers := _section(TrackerSpec, data.get("trackers", {}))) is not None:
        yield from check_trackers(trackers)
    if spec is not None:
        yield from memory.check_memory(spec)


def check_model(model: ModelSpec, engine: EngineSpec | None = None) -> Found:
    """The folder, its files, and that the engine knows the architecture."""
    place: Location = ("model", "path")
    folder = Path(model.path)
    if not folder.is_dir():
        yield place, f"{folder} is no folder: give the directory of a Hugging Face causal LM"
        return
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        yield place, f"{folder} lacks {', '.join(missing)}"
    if "config.json" in missing:
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        yield place, f"{folder / 'config.json'} is not valid JSON: {error}"
        return
    names = config.get("architectures") or []
    if (engine is None or engine.kind == "embedded") and not SUPPORTED.intersection(names):
        name, known = ", ".join(names) or "unknown", ", ".join(sorted(SUPPORTED))
        yield (
            place,
            f"architecture {name} is not supported by the embedded engine; it runs {known}",
        )
    context = config.get("max_position_embeddings")
    if isinstance(context, int) and model.max_context > context:
        yield ("model", "max_context"), f"{model.max_context} is more than the model's {context} positions"


def check_data(data: DataSpec) -> Found:
    """Both task files: one JSON object a line."""
    if data.source is None:
        yield from _check_jsonl(("data", "path"), Path(data.path))
    if data.held_out is not None:
        yield from _check_jsonl(("data", "held_out"), Path(data.held_out))


def check_agent(agent: AgentSpec, code: Path) -> Found:
    if agent.kind == "python" and agent.target:
        yield from _check_target(("agent", "target"), agent.target, code)
    elif agent.kind == "command" and agent.target:
        yield from _check_command(("agent", "target"), agent.target, code)


def check_reward(reward: RewardSpec, code: Path) -> Found:
    check = _check_target if reward.kind == "python" else _check_command
    yield from check(("reward", "target"), reward.target, code)


def check_engine(engine: EngineSpec) -> Found:
    """Its environment is there, and it can do what is asked."""
    place = "kind" if engine.python is None else "python"
    if engine.kind not in KINDS:
        yield ("engine", "kind"), f"{engine.kind!r} is not supported here, only {', '.join(sorted(KINDS))}"
    elif (reason := KINDS[engine.kind].problem(engine)) is not None:
        yield ("engine", place), reason


def check_algorithm(algorithm: AlgorithmSpec, code: Path) -> Found:
    """The user's functions exist, and the folders of other models."""
    for name in ("advantage", "loss"):
        target = getattr(algorithm, name)
        if target is not None and ":" in target:
            yield from _check_target(("algorithm", name), target, code)
    for name in ("reference", "critic"):
        folder = getattr(algorithm, name)
        if folder is not None and not (Path(folder) / "config.json").is_file():
            yield ("algorithm", name), f"{folder} holds no config.json: give the directory of a Hugging Face causal LM"


def check_node(node: NodeSpec, index: int) -> Found:
    """Cores must exist, and be ours to use."""
    here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    absent = sorted(set(node.cores) - here)
    if absent:
        yield (
            ("nodes", index, "cores"),
            f"core {', '.join(map(str, absent))} does not exist here; there are {_ranges(sorted(here))}",
        )


def check_trackers(trackers: TrackerSpec) -> Found:
    if trackers.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield ("trackers", "wandb"), "wandb is not installed here: install the project with its `wandb` extra"


def _check_jsonl(place: Location, path: Path) -> Found:
    if not path.is_file():
        yield place, f"{path} is no file"
        return
    tasks = problems = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            tasks += 1
            if (reason := _task_problem(line)) is None:
                continue
            problems += 1
            if problems > MOST_DATA_PROBLEMS:
                yield place, f"{path}: more lines are wrong; the first {MOST_DATA_PROBLEMS} are listed"
                return
            yield place, f"{path}:{number}: {reason}"
    if not tasks:
        yield place, f"{path} holds no task"


def _task_problem(line: bytes) -> str | None:
    try:
        task = json.loads(line)
    except ValueError as error:
        return f"not valid JSON: {error}"
    return None if isinstance(task, dict) else f"is a {type(task).__name__}; a task is a JSON object"


def _check_target(place: Location, target: str, code: Path) -> Found:
    if (reason := targets.problem(target, code)) is not None:
        yield place, reason


def _check_command(place: Location, command: str, code: Path) -> Found:
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield place, f"{command!r} is no command line: {error}"
        return
    if not words:
        yield place, "is an empty command line"
    elif shutil.which(words[0]) is None and not os.access(code / words[0], os.X_OK):
        yield place, f"program {words[0]!r} is neither on PATH nor in {code}"


def _section(kind: type[Section], data: object) -> Section | None:
    """The section, or None where the schema refuses it (which is told by ``validate``)."""
    try:
        return kind.model_validate(data)
    except ValidationError:
        return None


def _nodes(data: object) -> list[tuple[int, NodeSpec]]:
    if not isinstance(data, list):
        return []
    nodes = ((index, _section(NodeSpec, item)) for index, item in enumerate(data))
    return [(index, node) for index, node in nodes if node is not None]


def _ranges(numbers: list[int]) -> str:
    """*Example*: ``[0, 1, 2, 5]`` is ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
