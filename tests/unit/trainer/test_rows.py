"""Which tokens are trained, and behind which."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import IntegrityError
from workers.trainer.rows import Trajectory, group_rows


def _ids(trajectory: Trajectory) -> list[int]:
    return [int(i) for segment in trajectory.segments for i in segment.ids]


def _trained(trajectory: Trajectory) -> list[int]:
    return [int(segment.ids[i]) for segment in trajectory.segments for i in segment.trained]


def test_a_two_turn_session_is_one_trajectory_with_both_answers_trained(make: Any) -> None:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1, 2])
    first = shard.completion(root, [7, 8], session="a", logprobs=[-0.5, -0.25], versions=[3, 4])
    last = shard.completion(shard.prompt(first, [5]), [9], session="a", logprobs=[-2.0], versions=[5])
    shard.session("a", reward=1.0, leaves=[last])

    (row,) = group_rows(shard.build(), ["a"]).trajectories

    assert _ids(row) == [1, 2, 7, 8, 5, 9]
    assert _trained(row) == [7, 8, 9]
    assert [v for s in row.segments for v in s.versions] == [3, 4, 5]
    assert [p for s in row.segments for p in s.engine_logprobs] == [-0.5, -0.25, -2.0]


def test_a_token_shared_by_two_leaves_is_trained_once(make: Any) -> None:
    shard = make.ShardBuilder()
    first = shard.completion(shard.prompt(-1, [1]), [7, 8], session="a")
    left = shard.completion(shard.prompt(first, [2]), [9], session="a")
    right = shard.completion(shard.prompt(first, [3]), [10], session="a")
    shard.session("a", reward=1.0, leaves=[left, right])

    rows = group_rows(shard.build(), ["a"]).trajectories

    assert [_ids(row) for row in rows] == [[1, 7, 8, 2, 9], [1, 7, 8, 3, 10]]
    assert [_trained(row) for row in rows] == [[7, 8, 9], [10]]


def test_tokens_of_unknown_version_stay_context(make: Any) -> None:
    shard = make.ShardBuilder()
    leaf = shard.completion(shard.prompt(-1, [1]), [7, 8, 9], session="a", versions=[2, -1, 2], logprobs=[-1, -2, -3])
    shard.session("a", reward=1.0, leaves=[leaf])

    group = group_rows(shard.build(), ["a"])

    assert _trained(group.trajectories[0]) == [7, 9]
    assert group.trajectories[0].segments[1].engine_logprobs.tolist() == [-1.0, -3.0]
    assert group.masked == 1


def test_a_generation_that_is_not_trainable_stays_context_for_the_next_turn(make: Any) -> None:
    shard = make.ShardBuilder()
    first = shard.completion(shard.prompt(-1, [1]), [7, 8], session="a", trainable=False)
    last = shard.completion(shard.prompt(first, [2]), [9], session="a")
    shard.session("a", reward=1.0, leaves=[last])

    group = group_rows(shard.build(), ["a"])

    assert _ids(group.trajectories[0]) == [1, 7, 8, 2, 9]
    assert _trained(group.trajectories[0]) == [9]
    assert group.masked == 2


def test_what_follows_the_last_trained_token_is_not_computed(make: Any) -> None:
    shard = make.ShardBuilder()
    first = shard.completion(shard.prompt(-1, [1]), [7], session="a")
    cut = shard.completion(shard.prompt(first, [2, 3]), [9], session="a", trainable=False)
    shard.session("a", reward=1.0, leaves=[cut])

    (row,) = group_rows(shard.build(), ["a"]).trajectories

    assert _ids(row) == [1, 7]


def test_a_session_without_trainable_tokens_counts_in_the_statistics_but_has_no_trajectory(make: Any) -> None:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1])
    shard.session("a", reward=1.0, leaves=[shard.completion(root, [7], session="a", trainable=False)])
    shard.session("b", reward=0.0, leaves=[shard.completion(root, [8], session="b")])

    group = group_rows(shard.build(), ["a", "b"])

    assert group.rewards == {"a": 1.0, "b": 0.0}
    assert [row.session for row in group.trajectories] == ["b"]


def test_only_the_manifest_s_sessions_are_trained(make: Any) -> None:
    group = group_rows(make.random_shard(0, 1), ["s0.1", "s0.2"])
    assert {row.session for row in group.trajectories} == set(group.rewards) == {"s0.1", "s0.2"}


def test_a_manifest_of_another_shard_is_refused(make: Any) -> None:
    with pytest.raises(IntegrityError, match=r"lacks session other"):
        group_rows(make.random_shard(0, 1), ["s0.1", "other"])


@pytest.mark.parametrize("prompt", [None, []])
def test_a_completion_without_a_prompt_is_refused(make: Any, prompt: list[int] | None) -> None:
    shard = make.ShardBuilder()
    parent = -1 if prompt is None else shard.prompt(-1, prompt)
    shard.session("a", reward=1.0, leaves=[shard.completion(parent, [7], session="a")])
    with pytest.raises(IntegrityError, match=r"without a prompt"):
        group_rows(shard.build(), ["a"])


def test_a_path_through_another_session_s_answer_is_refused(make: Any) -> None:
    shard = make.ShardBuilder()
    foreign = shard.completion(shard.prompt(-1, [1]), [7], session="a")
    shard.session("a", reward=1.0, leaves=[foreign])
    shard.session("b", reward=0.0, leaves=[shard.completion(shard.prompt(foreign, [2]), [8], session="b")])
    with pytest.raises(IntegrityError, match=r"session b passes through completion span 1"):
        group_rows(shard.build(), ["b"])
