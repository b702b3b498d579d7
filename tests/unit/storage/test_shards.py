"""The rules of the token tree, and how a shard looks to people."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from storage.columns import key_for as column_key
from storage.errors import IntegrityError
from storage.shards import (
    Generation,
    SessionRow,
    Shard,
    Span,
    TreePath,
    decode,
    digest_of,
    encode,
    key_for,
    paths,
    prefix_of,
    show,
)

NO_IDS = np.array([], dtype=np.int32)
NO_LOGPROBS = np.array([], dtype=np.float32)


def prompt(parent: int, *ids: int) -> Span:
    return Span(parent, "prompt", np.array(ids, dtype=np.int32), NO_LOGPROBS, (NO_IDS, NO_IDS), "")


def completion(parent: int, generation: str, *ids: int, versions: tuple[tuple[int, int], ...]) -> Span:
    values, lengths = (np.array(column, dtype=np.int32) for column in zip(*versions, strict=True))
    logprobs = np.full(len(ids), -0.5, dtype=np.float32)
    return Span(parent, "completion", np.array(ids, dtype=np.int32), logprobs, (values, lengths), generation)


def generation(name: str, session: str, turn: int, *spans: int) -> Generation:
    segments = ({"node": "a", "engine": "e", "start": 0, "end": 2},)
    return Generation(name, session, turn, 0, spans, "stop", 1.0, 1.0, True, segments)


# Two samples of one task: the prompt is shared; the first has a second turn.
SHARD = Shard(
    "demo",
    "train",
    7,
    (
        prompt(-1, 1, 2, 3),
        completion(0, "g0", 4, 5, versions=((0, 1), (1, 1))),
        completion(0, "g1", 4, 6, versions=((1, 2),)),
        prompt(1, 7),
        completion(3, "g2", 8, versions=((-1, 1),)),
    ),
    (generation("g0", "s0", 0, 1), generation("g1", "s1", 0, 2), generation("g2", "s0", 1, 4)),
    (
        SessionRow("s0", 0, 1, 1.0, "finished", 2, 0, (4,)),
        SessionRow("s1", 1, 2, 0.0, "finished", 1, 0, (2,)),
    ),
)
SEGMENTS = 'segments [{"end":2,"engine":"e","node":"a","start":0}]'


def broken(**changes: object) -> Shard:
    return replace(SHARD, **changes)  # type: ignore[arg-type]


def with_span(index: int, **changes: object) -> Shard:
    spans = list(SHARD.spans)
    spans[index] = replace(spans[index], **changes)  # type: ignore[arg-type]
    return broken(spans=tuple(spans))


def test_a_trajectory_is_the_path_from_the_root_to_its_leaf() -> None:
    assert paths(decode(encode(SHARD))) == [TreePath("s0", 4, (0, 1, 3, 4)), TreePath("s1", 2, (0, 2))]


def test_each_token_knows_its_version() -> None:
    assert SHARD.spans[1].token_versions().tolist() == [0, 1]
    assert SHARD.spans[0].token_versions().tolist() == []


def test_the_key_of_a_shard_is_its_content() -> None:
    digest = digest_of(encode(SHARD))
    assert key_for("demo", 7, digest) == f"runs/demo/shards/00000007-{digest}.arrow"


@pytest.mark.parametrize("run", ["demo", "r", "runs"])
def test_the_shards_of_a_run_are_told_from_its_columns_and_from_other_runs_by_their_keys(run: str) -> None:
    assert key_for(run, 7, "ab" * 32).startswith(prefix_of(run))
    others = [column_key(run, "returns", "ab" * 32, "l0"), key_for(f"{run}-2", 7, "ab" * 32)]
    assert not [key for key in others if key.startswith(prefix_of(run))]


def test_a_shard_is_shown_as_a_tree() -> None:
    assert show(SHARD).splitlines() == [
        "group demo/train/7: 2 sessions, 5 spans, 4 prompt and 5 completion tokens",
        "  [0] prompt 3 tokens: 1 2 3",
        "    [1] completion 2 tokens: 4 5 | g0 | v0x1 v1x1 | mean logprob -0.5000",
        "      [3] prompt 1 tokens: 7",
        "        [4] completion 1 tokens: 8 | g2 | v-1x1 | mean logprob -0.5000",
        "    [2] completion 2 tokens: 4 6 | g1 | v1x2 | mean logprob -0.5000",
        "session s0 sample 0 attempt 1 reward 1 finished turns 2 forks 0 leaves [4]",
        "  generation g0 turn 0 choice 0 spans [1] stop temperature 1 top_p 1 " + SEGMENTS,
        "  generation g2 turn 1 choice 0 spans [4] stop temperature 1 top_p 1 " + SEGMENTS,
        "session s1 sample 1 attempt 2 reward 0 finished turns 1 forks 0 leaves [2]",
        "  generation g1 turn 0 choice 0 spans [2] stop temperature 1 top_p 1 " + SEGMENTS,
    ]


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        (with_span(0, parent=0), "span 0 has parent 0"),
        (with_span(1, parent=4), "span 1 has parent 4"),
        (with_span(0, ids=np.array([1], dtype=np.int64)), "span 0 has ids of int64"),
        (with_span(0, ids=np.zeros((1, 1), dtype=np.int32)), "span 0 has ids of int32"),
        (with_span(0, generation="g0"), "span 0 is a prompt"),
        (with_span(0, logprobs=np.zeros(3, dtype=np.float32)), "span 0 is a prompt"),
        (with_span(0, kind="thought"), "span 0 has kind 'thought'"),
        (with_span(1, logprobs=np.zeros(1, dtype=np.float32)), "2 ids and 1 log-probs"),
        (with_span(1, logprobs=np.array([0, np.nan], dtype=np.float32)), "not finite"),
        (with_span(1, versions=(np.array([0], dtype=np.int32), np.array([1], dtype=np.int32))), "versions of 1 tokens"),
        (
            with_span(1, versions=(np.array([0, 0, 0], dtype=np.int32), np.array([1, 0, 1], dtype=np.int32))),
            "versions of 2 tokens and 2 ids",
        ),
        (with_span(1, generation="g1"), "claims span 1"),
        (broken(generations=SHARD.generations[:2]), "completion span 4 belongs to no generation"),
        (broken(generations=(*SHARD.generations, generation("g3", "s0", 2, 9))), "claims span 9"),
        (broken(generations=(*SHARD.generations, generation("g0", "s0", 2))), "two generations have the same id"),
        (broken(sessions=SHARD.sessions[:1]), "session s1, which is not here"),
        (broken(sessions=(*SHARD.sessions, SHARD.sessions[0])), "two sessions have the same id"),
        (broken(sessions=(replace(SHARD.sessions[0], leaves=(5,)), SHARD.sessions[1])), "there are 5 spans"),
    ],
)
def test_a_tree_that_breaks_a_rule_is_never_written(shard: Shard, problem: str) -> None:
    with pytest.raises(IntegrityError, match="group demo/train/7") as caught:
        encode(shard)
    assert problem in str(caught.value)


def test_bytes_after_the_shard_are_refused() -> None:
    with pytest.raises(IntegrityError, match="1 bytes after the last table"):
        decode(encode(SHARD) + b"x")
