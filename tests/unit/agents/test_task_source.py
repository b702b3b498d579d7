"""An ordinal names one task for everybody, today and after any restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, NotFoundError
from workers.agents.data import TaskSource, source_for
from workflows.spec import RunSpec


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(count: int = 10, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"n": n, "text": f"Aufgabe {n} ü"}) + "\n" for n in range(count)))
        return path

    return write


def numbers(source: TaskSource, ordinals: range) -> list[int]:
    return [source.task(ordinal)["n"] for ordinal in ordinals]


def test_without_shuffling_tasks_come_as_in_the_file(file: Callable[..., Path]) -> None:
    assert numbers(TaskSource(file()), range(10)) == list(range(10))


def test_every_epoch_has_each_task_once_in_an_order_of_its_own(file: Callable[..., Path]) -> None:
    source = TaskSource(file(), seed=1, shuffle=True, epochs=None)
    epochs = [numbers(source, range(10 * epoch, 10 * epoch + 10)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed_and_on_nothing_else(file: Callable[..., Path]) -> None:
    path = file()
    first = TaskSource(path, seed=1, shuffle=True, epochs=None)
    again = TaskSource(path, seed=1, shuffle=True, epochs=None)
    backwards = [again.task(ordinal)["n"] for ordinal in reversed(range(30))]
    assert numbers(first, range(30)) == backwards[::-1]
    assert numbers(TaskSource(path, seed=2, shuffle=True), range(10)) != numbers(first, range(10))


def test_the_data_ends_after_its_epochs(file: Callable[..., Path]) -> None:
    source = TaskSource(file(), epochs=2)
    assert (source.length, source.total) == (10, 20)
    assert source.task(19)["n"] == 9
    with pytest.raises(NotFoundError, match="task 20 does not exist"):
        source.task(20)


def test_data_without_epochs_never_ends(file: Callable[..., Path]) -> None:
    source = TaskSource(file(), epochs=None)
    assert source.total is None
    assert source.task(10**6)["n"] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the tasks: No such file"),
        ("", "holds no task"),
        ("\n\n", "holds no task"),
        ('{"n": 0}\n\n{"n": 1}\n', "line 2: empty line"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_once(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "tasks.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        TaskSource(path)


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"n": 0}\n[1]\n{"n": \n{"n": 3}\n\n')
    source = TaskSource(path)
    problems = list(source.problems())
    assert problems[0].endswith("line 2: a task is a JSON object, not list")
    assert "line 3: not JSON" in problems[1]
    assert len(problems) == 2
    with pytest.raises(ConfigError, match="line 2"):
        source.task(1)


def spec(**data: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "r",
            "seed": 5,
            "model": {"path": "/m"},
            "data": data,
            "reward": {"target": "m:f"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
        }
    )


def test_evaluation_reads_the_held_out_tasks_in_order_once(file: Callable[..., Path]) -> None:
    run = spec(path=str(file()), held_out=str(file(4, "held_out.jsonl")))
    source = source_for(run, "eval/0")
    assert source.total == 4
    assert numbers(source, range(4)) == [0, 1, 2, 3]
    assert source_for(run, "train").total is None


def test_an_evaluation_without_held_out_tasks_is_refused(file: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="held_out"):
        source_for(spec(path=str(file())), "eval/3")
