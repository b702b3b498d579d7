"""What somebody who has only the Temporal UI reads of a run."""

from __future__ import annotations

from typing import Any

from workflows.markdown import LIMIT_BYTES
from workflows.messages import CheckpointRef, EngineView, EvaluationOutcome, Pause, RunState, WeightsRef
from workflows.run_page import RunView, run_page
from workflows.spec import RunSpec

SPEC = RunSpec.model_validate(
    {
        "run": "r",
        "model": {"path": "/m"},
        "data": {"path": "/d"},
        "reward": {"target": "a:b"},
        "nodes": [{"id": "n0", "tags": ["rollout", "train"]}, {"id": "n1", "tags": ["rollout"]}],
    }
)
CHECKPOINT = CheckpointRef(
    lineage=0,
    step=1,
    version=2,
    path="/c",
    digest="d",
    weights=WeightsRef(version=2, path="/w", digest="d"),
)


def page(working: str | None = None, **state: Any) -> str:
    return run_page(RunView(SPEC, RunState(**state), "step 2", working))


def engine(**values: Any) -> dict[str, EngineView]:
    return {"e": EngineView(lease="e", epoch=3, node="n1", **values)}


def test_it_says_how_far_the_run_is_and_what_it_waits_for() -> None:
    shown = page(phase="training", step=2)
    assert "r: training, 2 of 10 steps done" in shown
    assert "Waits for step 2." in shown


def test_it_says_who_paused_it_and_how_it_goes_on() -> None:
    shown = page(phase="training", paused=Pause(mode="now", actor="ann", why="GPU is needed"))
    assert "training (paused)" in shown
    assert "**Paused** (now) by ann: GPU is needed. The update `resume` lets it go on." in shown


def test_it_says_what_each_node_does() -> None:
    ready = page("s", phase="training", checkpoint=CHECKPOINT, engines=engine(state="ready", version=1))
    assert "serves weights 1, loads 2 ([lease](namespaces/default/workflows/lease%2Fe%2F3))" in ready
    assert "trains, or changes over" in ready
    held = page(phase="paused", engines=engine(state="ready", version=2, held=True))
    assert "is held, with weights 2" in held
    assert "engine is down, and is started again" in page(phase="training", engines=engine(state="down"))
    assert page(phase="finished").count("given back") == 2


def test_it_shows_held_out_rewards_of_each_version() -> None:
    before = EvaluationOutcome(version=0, mean=0.25, samples=8)
    none = EvaluationOutcome(version=2, mean=None, samples=0)
    words = page(evaluations=(before, none)).split()
    assert words[words.index("0.25") - 2 : words.index("0.25") + 3] == ["0", "|", "0.25", "|", "8"]
    assert "no sample was scored" in " ".join(words)


def test_it_warns_of_a_reward_that_never_differs_and_leaves_out_figures_that_a_step_has_not() -> None:
    shown = page("s", last_metrics={"reward_mean": 1.0, "reward_std": 0.0, "loss": 0.5})
    assert "**Warning:** every sample of the last step had the same reward" in shown
    assert "| loss" in shown
    assert "| entropy" not in shown


def test_a_page_is_never_longer_than_the_server_takes() -> None:
    assert len(page(last_failure="ü" * 30_000).encode()) <= LIMIT_BYTES


def test_it_shows_nodes_that_help_without_being_named_by_the_run_file() -> None:
    guest = {"e": EngineView(lease="e", epoch=1, node="n7", state="ready", version=0)}
    shown = page(phase="training", engines=guest, guests=("n7",))
    row = next(line for line in shown.splitlines() if "n7" in line)
    assert "serves weights 0" in row
