"""Every ZeRO stage, one rank and two, resumed or not: the same training. Real ranks over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.zero"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["bench"] == "zero"
    found: list[dict[str, Any]] = report["rows"]
    return found


def test_all_stages_give_the_losses_of_one_rank_without_zero(rows: list[dict[str, Any]]) -> None:
    plain = [row for row in rows if row["how"] == "from the start"]
    assert sorted((row["ranks"], row["stage"]) for row in plain) == [(ranks, s) for ranks in (1, 2) for s in STAGES]
    assert all(row["max_loss_diff"] < 1e-4 for row in plain)


def test_the_same_checkpoint_and_batches_give_the_same_weights_at_every_stage(rows: list[dict[str, Any]]) -> None:
    assert {row["stage"]: row["same_weights"] for row in rows if row["same_weights"] is not None} == dict.fromkeys(
        STAGES, True
    )


def test_gradients_accumulated_ahead_are_those_of_the_batch_and_dropped_ones_leave_nothing(
    rows: list[dict[str, Any]],
) -> None:
    ahead = {row["stage"]: row["max_loss_diff"] for row in rows if row["how"] == "ahead"}
    assert sorted(ahead) == STAGES
    assert max(ahead.values()) < 1e-5


def test_another_number_of_ranks_and_another_stage_go_on_with_the_same_losses(rows: list[dict[str, Any]]) -> None:
    resumed = {(row["ranks"], row["stage"]): row["max_loss_diff"] for row in rows if row["how"].startswith("resumed")}
    assert sorted(resumed) == [(ranks, stage) for ranks in (1, 2) for stage in STAGES]
    assert max(resumed.values()) < 1e-5
