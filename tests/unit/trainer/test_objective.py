"""The loss of a step: right by hand, and the same however the step is cut into sequences and ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from storage.manifests import Manifest
from workers.trainer.batch import Batch, weigh
from workers.trainer.objective import Objective, StepSums, token_logprobs
from workers.trainer.packing import MicroBatch, TokenColumns, pack, plan
from workers.trainer.rows import group_rows
from workflows.spec import AlgorithmSpec


def _batch(make: Any, algorithm: AlgorithmSpec, *, seed: int = 1, groups: int = 2) -> Batch:
    shards = [make.random_shard(ordinal, seed) for ordinal in range(groups)]
    rows = [group_rows(shard, [row.id for row in shard.sessions]) for shard in shards]
    return weigh(rows, Manifest("demo", 0, 0, (), temperature=1.0), algorithm)


def _logits(batch: MicroBatch, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(batch.target_N), 64, generator=generator, dtype=torch.float64).requires_grad_()


def test_logprobs_and_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0) * 2]])
    logprob, entropy = token_logprobs(logits, torch.tensor([1]), temperature=2.0)
    assert logprob.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_weights_of_a_step_sum_to_one_whatever_the_aggregation(make: Any) -> None:
    for aggregation in ("token_mean", "sequence_mean"):
        batch = _batch(make, AlgorithmSpec(aggregation=aggregation))
        assert sum(float(row.columns.weight_N.sum()) for row in batch.rows) == pytest.approx(1.0, rel=1e-6)


def test_a_session_with_two_leaves_counts_once_in_its_group_s_statistics(make: Any) -> None:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1])
    first = shard.completion(root, [7], session="a")
    leaves = [shard.completion(shard.prompt(first, [2 + n]), [9], session="a") for n in range(3)]
    shard.session("a", reward=1.0, leaves=leaves)
    shard.session("b", reward=0.0, leaves=[shard.completion(root, [8], session="b")])
    rows = group_rows(shard.build(), ["a", "b"])

    batch = weigh([rows], Manifest("demo", 0, 0, (), temperature=1.0), AlgorithmSpec(advantage="dr_grpo"))

    assert [row.trajectory.session for row in batch.rows] == ["a", "a", "a", "b"]
    tokens = TokenColumns.concatenate([row.columns for row in batch.rows])
    assert tokens.advantage_N.tolist() == [0.5] * 4 + [-0.5]
    assert tokens.weight_N == pytest.approx([1 / 5] * 5)  # a: 1 + 3 tokens, b: 1


def test_the_first_update_of_a_batch_has_ratio_one_and_the_policy_gradient(make: Any) -> None:
    algorithm = AlgorithmSpec(correction="none")
    batch = pack(_batch(make, algorithm).rows)
    logits = _logits(batch)

    loss, sums = Objective(algorithm, 1.0)(logits, batch)
    (gradient,) = torch.autograd.grad(loss, logits)

    logprob, _ = token_logprobs(logits, torch.from_numpy(batch.target_N), 1.0)
    surrogate = -(torch.from_numpy(batch.advantage_N * batch.weight_N) * logprob).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(surrogate, logits)[0], rtol=1e-5, atol=1e-9)
    assert sums.ratio_max == 1.0
    assert sums.clipped == 0.0
    assert sums.loss == pytest.approx(-float((batch.advantage_N * batch.weight_N).sum()), abs=1e-6)


def test_engine_and_trainer_differences_are_corrected_by_a_truncated_weight(make: Any) -> None:
    algorithm = AlgorithmSpec(correction_cap=1.5)
    batch = pack(_batch(make, algorithm).rows)
    logits = _logits(batch)

    loss, sums = Objective(algorithm, 1.0)(logits, batch)

    logprob = token_logprobs(logits, torch.from_numpy(batch.target_N), 1.0)[0].detach()
    gap = logprob - torch.from_numpy(batch.engine_logprob_N)
    weight = gap.exp().clamp(max=1.5)
    expected = -(torch.from_numpy(batch.advantage_N * batch.weight_N) * weight).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums.mean("importance") == pytest.approx(weight.mean().item(), rel=1e-5)


def test_the_engine_is_held_against_the_trainer_only_for_tokens_of_the_same_weights(make: Any) -> None:
    batch = pack(_batch(make, AlgorithmSpec()).rows)
    version_N = np.arange(len(batch.version_N), dtype=np.int32) % 2 + 3
    batch = dataclasses.replace(batch, version_N=version_N)
    logits = _logits(batch)
    difference_N = token_logprobs(logits.detach(), torch.from_numpy(batch.target_N), 1.0)[0].numpy() - (
        batch.engine_logprob_N
    )
    current_N = version_N == 4

    _, sums = Objective(AlgorithmSpec(), 1.0, step=4)(logits, batch)
    assert (sums.current, sums.stale) == (current_N.sum(), (~current_N).sum())
    assert sums.mean("gap", over="current") == pytest.approx(np.abs(difference_N[current_N]).mean(), rel=1e-5)
    assert sums.gap_max == pytest.approx(np.abs(difference_N[current_N]).max(), rel=1e-5)
    assert sums.mean("stale_ratio", over="stale") == pytest.approx(np.exp(difference_N[~current_N]).mean(), rel=1e-5)

    # After an optimizer step the weights are others: only what they said before it counts.
    _, later = Objective(AlgorithmSpec(), 1.0, step=4, first=False)(logits, batch)
    assert (later.current, later.stale, later.gap_max) == (0, 0, 0)
    known = dataclasses.replace(batch, old_logprob_N=(batch.engine_logprob_N - 0.25).astype(np.float32))
    _, later = Objective(AlgorithmSpec(), 1.0, step=4, first=False)(logits, known)
    assert later.mean("gap", over="current") == pytest.approx(0.25, rel=1e-5)


def test_engine_logprobs_as_old_ones_clip_the_ratio(make: Any) -> None:
    algorithm = AlgorithmSpec(old_logprobs="engine")
    batch = pack(_batch(make, algorithm).rows)
    loss, sums = Objective(algorithm, 1.0)(_logits(batch), batch)
    assert sums.clipped > 0
    assert sums.ratio_max > 1.28
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("old", ["recompute", "engine"])
def test_gradient_equals_finite_differences_of_the_stated_loss(make: Any, old: str) -> None:
    """With recomputed old log-probs these and the importance weights are constants: they are frozen for the check."""
    algorithm = AlgorithmSpec(old_logprobs=old, correction="none" if old == "recompute" else None)
    batch = pack(_batch(make, algorithm, groups=1).rows)
    logits = _logits(batch)
    objective = Objective(algorithm, 0.7)
    (gradient,) = torch.autograd.grad(objective(logits, batch)[0], logits)
    frozen = token_logprobs(logits.detach(), torch.from_numpy(batch.target_N), 0.7)[0]

    def loss(moved: Tensor) -> float:
        logprob = token_logprobs(moved, torch.from_numpy(batch.target_N), 0.7)[0].double()
        before = frozen.double() if old == "recompute" else torch.from_numpy(batch.engine_logprob_N).double()
        ratio = (logprob - before).exp()
        advantage, weight = torch.from_numpy(batch.advantage_N), torch.from_numpy(batch.weight_N)
        each = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        each = torch.where(advantage < 0, each.minimum(-3 * advantage), each)
        return float((each * weight).sum())

    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        h = 1e-3  # log-probs are float32
        difference = (loss(logits.detach() + h * direction) - loss(logits.detach() - h * direction)) / (2 * h)
        assert float((gradient * direction).sum()) == pytest.approx(difference, rel=2e-2, abs=2e-4)


def test_tokens_of_weight_zero_leave_no_trace_in_loss_and_metrics(make: Any) -> None:
    rows = _batch(make, AlgorithmSpec()).rows[:1]
    (padding,), _ = plan(rows, rank=1, ranks=2, row_tokens=64)
    loss, sums = Objective(AlgorithmSpec(), 1.0)(_logits(padding), padding)
    assert loss.item() == 0.0
    assert sums == StepSums()
    assert sums.importance_bins.sum() == 0
