"""Packed sequences and their distribution over ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from workers.trainer.packing import MicroBatch, TokenColumns, WeightedTrajectory, assign, pack, plan
from workers.trainer.rows import group_rows


def _weighted(shard: Any, weight: float = 0.1) -> list[WeightedTrajectory]:
    group = group_rows(shard, [row.id for row in shard.sessions])
    first, weighted = 0, []
    for n, row in enumerate(group.trajectories):
        count = len(row.turns)
        columns = TokenColumns(
            token_N=np.arange(first, first + count),
            engine_logprob_N=row.engine_logprobs,
            version_N=row.versions,
            sequence_N=np.full(count, n),
            advantage_N=np.full(count, n, np.float32),
            weight_N=np.full(count, weight, np.float32),
        )
        weighted.append(WeightedTrajectory(row, columns))
        first += count
    return weighted


def _context(batch: MicroBatch, token: int) -> list[int]:
    """Ids that a token of the sequence sees, itself last, by depth."""
    assert batch.mask_TT is not None
    seen = np.flatnonzero(batch.mask_TT[token])
    assert batch.depth_T[seen].tolist() == list(range(len(seen)))
    return [int(i) for i in batch.ids_T[seen]]


def test_each_token_sees_its_own_trajectory_and_nothing_else(make: Any) -> None:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1, 2])
    a = shard.completion(root, [7, 8], session="a")
    a2 = shard.completion(shard.prompt(a, [3]), [9], session="a")
    b = shard.completion(root, [10], session="b")
    shard.session("a", reward=1.0, leaves=[a2])
    shard.session("b", reward=0.0, leaves=[b])

    batch = pack(_weighted(shard.build()))

    assert batch.ids_T.tolist() == [1, 2, 7, 8, 3, 9, 10]  # the prompt once
    assert _context(batch, 5) == [1, 2, 7, 8, 3, 9]
    assert _context(batch, 6) == [1, 2, 10]
    assert batch.target_N.tolist() == [7, 8, 9, 10]
    # 10 is predicted by the prompt's last token, as 7 is, not by the token in front of it in the sequence
    assert batch.predictor_K[batch.predictor_N].tolist() == [1, 2, 4, 1]
    assert batch.advantage_N.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert batch.token_N.tolist() == [0, 1, 2, 3]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1]


def test_a_single_trajectory_needs_no_mask(make: Any) -> None:
    (row, *_) = _weighted(make.random_shard(0, 1))
    batch = pack([row])
    assert batch.mask_TT is None
    assert batch.depth_T.tolist() == list(range(len(batch.ids_T)))


def test_trajectories_of_different_groups_do_not_see_each_other(make: Any) -> None:
    one, other = _weighted(make.random_shard(0, 1))[0], _weighted(make.random_shard(1, 1))[0]
    batch = pack([one, other])
    assert batch.mask_TT is not None
    length = one.trajectory.length
    assert not batch.mask_TT[length:, :length].any()
    assert batch.depth_T[length] == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 100])
def test_each_trained_token_is_on_exactly_one_rank_and_all_ranks_have_as_many_micro_batches(
    make: Any, ranks: int, micro_batch: int
) -> None:
    rows = [row for ordinal in range(3) for row in _weighted(make.random_shard(ordinal, 5))]
    expected = Counter(int(s.ids[i]) for row in rows for s in row.trajectory.segments for i in s.trained)

    shares = [plan(rows, rank=rank, ranks=ranks, micro_batch=micro_batch)[0] for rank in range(ranks)]

    assert len({len(share) for share in shares}) == 1
    weighted = [batch for share in shares for batch in share if batch.weight_N.any()]
    assert Counter(int(i) for batch in weighted for i in batch.target_N) == expected
    assert sum(float(b.weight_N.sum()) for b in weighted) == pytest.approx(0.1 * sum(expected.values()), rel=1e-5)


def test_a_rank_without_work_of_its_own_takes_part_with_weight_zero(make: Any) -> None:
    (row, *_) = _weighted(make.random_shard(0, 1))
    (batch,), _ = plan([row], rank=1, ranks=2, micro_batch=4)
    assert (batch.weight_N.tolist(), batch.token_N.tolist()) == ([0.0], [-1])
    assert batch.advantage_N.tolist() == [0.0]


def test_sharing_prefixes_computes_fewer_tokens(make: Any) -> None:
    rows = _weighted(make.random_shard(0, 2, samples=8))
    _, shared = plan(rows, rank=0, ranks=1, micro_batch=9)
    _, alone = plan(rows, rank=0, ranks=1, micro_batch=1)
    prompt = len(rows[0].trajectory.segments[0].ids)
    assert alone == sum(row.trajectory.length for row in rows)
    assert shared <= alone - 8 * prompt


def test_the_longest_rows_go_to_the_ranks_with_the_fewest_tokens() -> None:
    assert assign([3, 9, 4, 8, 1], 2) == [[1, 0, 4], [3, 2]]
    assert assign([], 2) == [[], []]


def test_the_plan_is_the_same_each_time(make: Any) -> None:
    rows = _weighted(make.random_shard(0, 3))
    one, other = (plan(rows, rank=0, ranks=2, micro_batch=2)[0] for _ in range(2))
    assert [b.ids_T.tolist() for b in one] == [b.ids_T.tolist() for b in other]
