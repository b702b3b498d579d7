"""Packed sequences and their distribution over ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from workers.trainer.packing import MicroBatch, TokenColumns, WeightedTrajectory, assign, pack, plan
from workers.trainer.rows import Segment, Trajectory, group_rows


def _weighted(shard: Any, weight: float = 0.1) -> list[WeightedTrajectory]:
    group = group_rows(shard, [row.id for row in shard.sessions])
    weighted: list[WeightedTrajectory] = []
    for n, row in enumerate(group.trajectories):
        first = sum(other.trajectory.trained for other in weighted)
        weighted.append(_weigh(row, first=first, sequence=n, advantage=float(n), weight=weight))
    return weighted


def _weigh(
    row: Trajectory, *, first: int = 0, sequence: int = 0, advantage: float = 0.0, weight: float = 0.1
) -> WeightedTrajectory:
    columns = TokenColumns(
        token_N=np.arange(first, first + row.trained),
        engine_logprob_N=row.engine_logprobs,
        version_N=row.versions,
        sequence_N=np.full(row.trained, sequence),
        advantage_N=np.full(row.trained, advantage, np.float32),
        weight_N=np.full(row.trained, weight, np.float32),
    )
    return WeightedTrajectory(row, columns)


def _context(batch: MicroBatch, token: int) -> list[int]:
    """Ids that a token of the sequence sees, itself last, by depth."""
    seen = np.flatnonzero(batch.end_T[: token + 1] > token)
    assert batch.depth_T[seen].tolist() == list(range(len(seen)))
    return [int(i) for i in batch.ids_T[seen]]


def test_each_token_sees_its_own_trajectory_and_nothing_else(make: Any) -> None:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1, 2])
    a = shard.completion(root, [7, 8], session="a")
    a2 = shard.completion(shard.prompt(a, [3]), [9], session="a")
    b = shard.completion(root, [10, 11], session="b")
    shard.session("a", reward=1.0, leaves=[a2])
    shard.session("b", reward=0.0, leaves=[b])

    batch = pack(_weighted(shard.build()))

    assert batch.ids_T.tolist() == [1, 2, 7, 8, 3, 10]  # the prompt once; the last tokens are only predicted
    assert _context(batch, 4) == [1, 2, 7, 8, 3]
    assert _context(batch, 5) == [1, 2, 10]
    assert batch.target_N.tolist() == [7, 8, 9, 10, 11]
    # 10 is predicted by the prompt's last token, as 7 is, not by the token in front of it in the sequence
    assert batch.predictor_K[batch.predictor_N].tolist() == [1, 2, 4, 1, 5]
    assert batch.advantage_N.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert batch.token_N.tolist() == [0, 1, 2, 3, 4]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1]


def test_answers_that_begin_alike_are_computed_once_and_trained_each(make: Any) -> None:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1, 2])
    shard.session("a", reward=1.0, leaves=[shard.completion(root, [7, 8, 9], session="a", logprobs=[-1, -2, -3])])
    shard.session("b", reward=0.0, leaves=[shard.completion(root, [7, 8, 5], session="b", logprobs=[-4, -5, -6])])

    batch = pack(_weighted(shard.build()))

    assert batch.ids_T.tolist() == [1, 2, 7, 8]
    assert batch.target_N.tolist() == [7, 8, 9, 7, 8, 5]
    assert batch.predictor_K[batch.predictor_N].tolist() == [1, 2, 3, 1, 2, 3]
    assert batch.engine_logprob_N.tolist() == [-1, -2, -3, -4, -5, -6]
    assert batch.advantage_N.tolist() == [0, 0, 0, 1, 1, 1]


def test_prompts_of_different_spans_and_tasks_share_what_they_begin_with(make: Any) -> None:
    rows = []
    for ordinal, prompt in enumerate(([1, 2, 3, 4], [1, 2, 3, 5])):
        shard = make.ShardBuilder(ordinal)
        shard.session("a", reward=1.0, leaves=[shard.completion(shard.prompt(-1, prompt), [7, 8], session="a")])
        rows += _weighted(shard.build())
    assert pack(rows).ids_T.tolist() == [1, 2, 3, 4, 7, 5, 7]


def test_trajectories_of_different_groups_do_not_see_each_other(make: Any) -> None:
    one, other = _weighted(make.random_shard(0, 1))[0], _weighted(make.random_shard(1, 1))[0]
    batch = pack([one, other])
    first = int(batch.end_T[0])
    assert first < batch.tokens
    assert _context(batch, first) == [batch.ids_T[first]]
    assert _context(batch, batch.tokens - 1) == batch.ids_T[first:].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("row_tokens", [1, 30, 100, 1000])
@pytest.mark.parametrize("merge", [True, False])
def test_each_trained_token_is_on_exactly_one_rank_and_all_ranks_have_as_many_micro_batches(
    make: Any, ranks: int, row_tokens: int, merge: bool
) -> None:
    rows = [row for ordinal in range(3) for row in _weighted(make.random_shard(ordinal, 5))]
    expected = Counter(int(i) for row in rows for i in row.trajectory.ids[row.trajectory.trained_at])

    shares = [plan(rows, rank=rank, ranks=ranks, row_tokens=row_tokens, merge=merge)[0] for rank in range(ranks)]

    assert len({len(share) for share in shares}) == 1
    weighted = [batch for share in shares for batch in share if batch.weight_N.any()]
    assert Counter(int(i) for batch in weighted for i in batch.target_N) == expected
    assert sum(float(b.weight_N.sum()) for b in weighted) == pytest.approx(0.1 * sum(expected.values()), rel=1e-5)


def test_a_rank_without_work_of_its_own_takes_part_with_weight_zero(make: Any) -> None:
    (row, *_) = _weighted(make.random_shard(0, 1))
    (batch,), _ = plan([row], rank=1, ranks=2, row_tokens=64)
    assert (batch.weight_N.tolist(), batch.token_N.tolist()) == ([0.0], [-1])
    assert batch.advantage_N.tolist() == [0.0]


def test_sharing_prefixes_computes_fewer_tokens(make: Any) -> None:
    rows = _weighted(make.random_shard(0, 2, samples=8))
    (shared,), tokens = plan(rows, rank=0, ranks=1, row_tokens=1000)
    (alone,), flat = plan(rows, rank=0, ranks=1, row_tokens=1000, merge=False)
    prompt = int(shared.predictor_K[0]) + 1
    assert shared.tokens == tokens <= flat - 8 * prompt
    assert alone.tokens == flat == sum(len(row.trajectory.inputs) for row in rows)


def test_a_tree_above_the_budget_is_cut_where_the_fewest_tokens_repeat() -> None:
    def path(*ids: int) -> WeightedTrajectory:
        zero = np.zeros(1, np.int32)
        segment = Segment((0, 0), np.array(ids, np.int32), zero + len(ids) - 1, zero.astype(np.float32), zero)
        return _weigh(Trajectory("s", (segment,), zero, zero))

    rows = [path(1, 2, 3, 4, 5, 0), path(1, 2, 3, 4, 6, 0), path(1, 7, 8, 0), path(1, 7, 9, 0)]

    batches, tokens = plan(rows, rank=0, ranks=1, row_tokens=7)

    assert [batch.ids_T.tolist() for batch in batches] == [[1, 2, 3, 4, 5, 6], [1, 7, 8, 9]]  # 1 alone is repeated
    assert tokens == 10


def test_a_trajectory_above_the_budget_is_a_row_of_its_own(make: Any) -> None:
    rows = _weighted(make.random_shard(0, 1))
    batches, _ = plan(rows, rank=0, ranks=1, row_tokens=1)
    assert sorted(b.tokens for b in batches) == sorted(len(row.trajectory.inputs) for row in rows)
    assert all((batch.end_T == batch.tokens).all() for batch in batches)


def test_several_ranks_share_one_tree(make: Any) -> None:
    rows = _weighted(make.random_shard(0, 2, samples=8))
    one, tokens = plan(rows, rank=0, ranks=1, row_tokens=1000)
    shares = [plan(rows, rank=rank, ranks=2, row_tokens=1000) for rank in range(2)]
    assert [len(batches) for batches, _ in shares] == [1, 1]
    assert max(batches[0].tokens for batches, _ in shares) < 0.7 * one[0].tokens
    assert tokens < shares[0][1] < tokens + len(one[0].ids_T)


def test_the_longest_rows_go_to_the_ranks_with_the_fewest_tokens() -> None:
    assert assign([3, 9, 4, 8, 1], 2) == [[1, 0, 4], [3, 2]]
    assert assign([], 2) == [[], []]


def test_the_plan_is_the_same_each_time(make: Any) -> None:
    rows = _weighted(make.random_shard(0, 3))
    one, other = (plan(rows, rank=0, ranks=2, row_tokens=60)[0] for _ in range(2))
    assert [b.ids_T.tolist() for b in one] == [b.ids_T.tolist() for b in other]
