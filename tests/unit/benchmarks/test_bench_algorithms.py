"""Our side of the comparison with other implementations: each case can be run, and tests something."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.algorithms import ours
from benchmarks.algorithms.cases import ADVANTAGES, LOSSES, Case
from workflows.algorithm import AlgorithmSpec

BATCH = ours.make_batch()


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_a_loss_has_a_gradient_on_trained_tokens_only(case: Case) -> None:
    found = ours.loss(case, BATCH)
    assert np.isfinite(found["loss"])
    assert found["gradient"][BATCH["mask"]].any()
    assert not found["gradient"][~BATCH["mask"]].any()


@pytest.mark.parametrize("case", ADVANTAGES, ids=lambda case: case.name)
def test_an_advantage_is_given_to_each_trained_token(case: Case) -> None:
    found = ours.advantage(case, BATCH)["advantage"]
    assert found.shape == (BATCH["mask"].sum(),)
    assert found.std() > 0.1


def test_losses_differ_from_the_plain_one_on_the_batch() -> None:
    """Else a clip, a band or a term that never acts would compare as equal."""
    losses = {case.name: float(ours.loss(case, BATCH)["loss"]) for case in LOSSES}
    assert len({round(value, 6) for value in losses.values()}) == len(losses)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_band_leaves_tokens_out_and_keeps_others(level: str) -> None:
    algorithm = AlgorithmSpec(correction="mask", correction_level=level)  # type: ignore[arg-type]
    batch = ours.micro_batch(BATCH, algorithm)
    assert batch.importance_N is not None
    assert 0 < (batch.importance_N == 0).mean() < 1
