"""`seamlessflow status` as text."""

from __future__ import annotations

from typing import Any

from cli.overview import render

TRACE = "Traceback (most recent call last):\n  in [run]\nKeyError: 'tool'\n"


def view(*runs: str) -> dict[str, Any]:
    failure = {"cause": "agent_error", "attempts": 3, "sample": "train/7.1", "detail": TRACE}
    row = {
        "state": "RUNNING",
        "phase": "training",
        "step": 1,
        "steps": 3,
        "reward": 0.5,
        "tokens_per_s": 10.0,
        "waiting_for": "",
        "log_prob_gaps": {0: 2.5e-6, 1: None, 2: 1e-7, 3: None},
        "failures": [failure],
        "trouble": "",
    }
    head = {"state": "/s", "supervisor": "running", "temporal_ui": "http://ui", "services": {}, "nodes": []}
    return {**head, "runs": [{"run": run, **row} for run in runs], "trouble": []}


def test_a_run_is_shown_with_what_happened_to_the_last_attempt_of_each_cause() -> None:
    text = render(view("toy"))
    assert "toy: attempts without a result: agent_error 3" in text
    assert "agent_error, the last one is train/7.1:" in text
    for line in TRACE.splitlines():
        assert f"    {line}" in text


def test_the_log_prob_gap_of_each_step_is_shown() -> None:
    text = render(view("toy")).replace("\n", " ")
    assert "engine and trainer, by step: 1: 2.5e-06, 3: 1.0e-07; no token of the same weights in 2, 4" in text


def test_of_several_runs_only_the_causes_are_shown() -> None:
    text = render(view("one", "two"))
    assert text.count("attempts without a result: agent_error 3") == 2
    assert "KeyError" not in text
