"""What a person sees while a run runs."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from cli.progress import PLAIN_EVERY_S, FailureRow, PlainView, Snapshot, picture, snapshot
from workflows.messages import EvaluationOutcome, NodeStatus, PoolStatus, RunStatus, StepStatus

METRICS = {"reward_mean": 0.25, "seconds": 2.5, "logprob_gap_mean": 2.5e-6, "tokens_on_policy": 40}
CONTROL: dict[str, Any] = {
    "steps": [{"step": 0, "lineage": 0, "metrics": METRICS}, {"step": 1, "metrics": {}}],
    "evaluations": [],
    "tokens": {"journalled": 1200, "per_s": 321.4},
    "sessions_in_flight": 7,
}


def run_status(**values: Any) -> RunStatus:
    base: dict[str, Any] = {
        "run": "toy",
        "phase": "training",
        "lineage": 0,
        "step": 2,
        "steps": 3,
        "version": 2,
        "paused": None,
        "stopping": None,
        "waiting_for": "",
        "engines": (),
        "evaluations": (EvaluationOutcome(version=0, mean=0.4, samples=8),),
        "metrics": {},
        "last_failure": "",
    }
    return RunStatus(**{**base, **values})


def pool_status() -> PoolStatus:
    node = NodeStatus(node="n0", tags=("train",), health="alive", activity="train", epoch=4, lease="l1")
    return PoolStatus(cluster="local", nodes=(node,), requests=(), shares=(), decisions=(), leases=())


def test_the_plain_view_says_each_step_and_evaluation_once() -> None:
    lines: list[str] = []
    view = PlainView(lines.append, clock=lambda: 0.0)
    now = snapshot("toy", CONTROL, run_status(), pool_status())
    view.show(now)
    view.show(now)
    assert lines == [
        "evaluation of version 0: held-out reward 0.400",
        "step 1/3  reward 0.250  log-prob gap 2.5e-06  321 tokens/s  n0: train (alive)",
        "step 2/3  reward -  321 tokens/s  n0: train (alive)",
    ]


def test_the_plain_view_gives_a_sign_of_life_while_nothing_finishes() -> None:
    lines: list[str] = []
    time = 0.0
    view = PlainView(lines.append, clock=lambda: time)
    waiting = Snapshot("toy", phase="collecting", steps=3, waiting_for="groups (2 of 8)")
    view.show(waiting)
    view.show(waiting)
    time = PLAIN_EVERY_S
    view.show(waiting)
    assert lines == ["step 1/3, collecting, waits for groups (2 of 8)  0 tokens/s"] * 2


def test_while_a_step_is_in_work_the_line_says_what_the_step_waits_for() -> None:
    step = StepStatus(
        lineage=0, step=2, phase="claiming", waiting_for="enough complete groups", manifest=None, lease=None
    )
    run = run_status(waiting_for="step 2 (n0 is held by run other)", queue_notice="n0 is held by run other")
    now = snapshot("toy", CONTROL, run, pool_status(), step=step)
    assert (now.phase, now.waiting_for) == ("claiming", "enough complete groups; n0 is held by run other")
    lines: list[str] = []
    view = PlainView(lines.append, clock=lambda: 0.0)
    view.show(replace(now, rows=(), evaluations=()))
    assert lines[0].startswith("step 3/3, claiming, waits for enough complete groups; n0 is held by run other")
    now = snapshot("toy", CONTROL, run, pool_status(), step=step.model_copy(update={"waiting_for": ""}))
    assert now.waiting_for == "n0 is held by run other"


def test_the_live_table_shows_reward_nodes_and_links() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(snapshot("toy", CONTROL, run_status(), pool_status()), {"Temporal UI": "http://127.0.0.1:1"}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in (
        "toy",
        "training",
        "321 tokens/s",
        "0.250",
        "█████",
        "n0: train (alive)",
        "http://127.0.0.1:1",
        "version 0: 0.400",
    ):
        assert part in text


def test_what_does_not_answer_is_shown_as_trouble_and_the_rest_still_shows() -> None:
    now = snapshot("toy", None, run_status(), None, "proxy: no answer")
    assert (now.phase, now.trouble, now.rows, now.nodes) == ("training", "proxy: no answer", (), {})


FAILURE = {
    "cause": "agent_error",
    "attempts": 3,
    "last": {"stream": "train", "ordinal": 7, "sample": 1, "attempt": 1, "session": "s", "detail": "KeyError: 'a'"},
}


def test_attempts_without_a_result_are_shown_by_cause() -> None:
    now = snapshot("toy", {**CONTROL, "failures": [FAILURE]}, run_status(), None)
    assert now.failures == (FailureRow("agent_error", 3, "train/7.1", "KeyError: 'a'"),)
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(now, {}))
    assert isinstance(console.file, io.StringIO)
    assert "attempts without a result: agent_error 3" in console.file.getvalue()


def test_a_step_whose_samples_all_had_one_reward_is_marked() -> None:
    step = {"step": 0, "metrics": {"reward_mean": 0.0, "reward_std": 0.0}}
    lines: list[str] = []
    PlainView(lines.append, clock=lambda: 0.0).show(snapshot("toy", {"steps": [step]}, run_status(), None))
    assert "step 1/3  reward 0.000 (the same for every sample)  0 tokens/s" in lines


def test_a_warning_of_the_run_is_shown_unless_something_failed() -> None:
    assert snapshot("toy", CONTROL, run_status(warning="constant reward"), None).trouble == "constant reward"
    both = run_status(warning="constant reward", last_failure="engine of n1 died")
    assert snapshot("toy", CONTROL, both, None).trouble == "engine of n1 died"


def test_the_last_failure_of_a_run_is_shown() -> None:
    assert snapshot("toy", CONTROL, run_status(last_failure="engine of n1 died"), None).trouble == "engine of n1 died"
