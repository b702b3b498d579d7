"""Any valid token tree comes back from its shard to the bit; anything else is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import IntegrityError
from storage.shards import ROOT, Generation, SessionRow, Shard, Span, decode, encode, paths, show

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)
FINITE32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
EMPTY_IDS = np.array([], dtype=np.int32)
EMPTY_LOGPROBS = np.array([], dtype=np.float32)


def prompt(parent: int, ids: list[int]) -> Span:
    return Span(parent, "prompt", np.array(ids, dtype=np.int32), EMPTY_LOGPROBS, (EMPTY_IDS, EMPTY_IDS), "")


@st.composite
def completions(draw: st.DrawFn, parent: int, generation: str) -> Span:
    runs = draw(st.lists(st.tuples(st.integers(-1, 9), st.integers(1, 4)), max_size=3))
    n = sum(length for _, length in runs)
    ids = np.array(draw(st.lists(INT32, min_size=n, max_size=n)), dtype=np.int32)
    logprobs = np.array(draw(st.lists(FINITE32, min_size=n, max_size=n)), dtype=np.float32)
    versions = (np.array([v for v, _ in runs], dtype=np.int32), np.array([k for _, k in runs], dtype=np.int32))
    return Span(parent, "completion", ids, logprobs, versions, generation)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    spans: list[Span] = []
    generations: list[Generation] = []
    sessions = [f"s{i}" for i in range(draw(st.integers(1, 3)))]
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(ROOT, index - 1))
        if draw(st.booleans()):
            spans.append(prompt(parent, draw(st.lists(INT32, max_size=6))))
            continue
        spans.append(draw(completions(parent, f"g{index}")))
        policy = (draw(TEXT), draw(st.floats(0, 2)), draw(st.floats(0, 1)), draw(st.booleans()))
        segments = tuple(draw(st.lists(st.fixed_dictionaries({"node": TEXT, "start": INT32}), max_size=2)))
        owner = draw(st.sampled_from(sessions))
        generations.append(Generation(f"g{index}", owner, draw(st.integers(0, 9)), 0, (index,), *policy, segments))
    leaves = st.lists(st.integers(0, len(spans) - 1), max_size=3).map(tuple)
    rewards = st.floats(allow_nan=False, allow_infinity=False)
    rows = [SessionRow(s, i, 1, draw(rewards), draw(TEXT), 2, 0, draw(leaves)) for i, s in enumerate(sessions)]
    return Shard("demo", "train", draw(st.integers(0, 2**40)), tuple(spans), tuple(generations), tuple(rows))


@given(shard=shards())
@settings(max_examples=60)
def test_a_shard_comes_back_to_the_bit_and_always_has_the_same_bytes(shard: Shard) -> None:
    data = encode(shard)
    back = decode(data)
    assert back == shard
    assert encode(back) == data
    for path in paths(back):
        assert [back.spans[i].parent for i in path.spans] == [ROOT, *path.spans[:-1]]
    assert show(back).startswith(f"group demo/train/{shard.ordinal}:")


@given(shard=shards(), data=st.data())
@settings(max_examples=60)
def test_a_damaged_shard_is_an_integrity_error_or_still_a_valid_tree(shard: Shard, data: Any) -> None:
    encoded = bytearray(encode(shard))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(IntegrityError):
        decode(bytes(encoded)).validate()


@given(shard=shards(), data=st.data())
@settings(max_examples=30)
def test_a_cut_shard_is_an_integrity_error(shard: Shard, data: Any) -> None:
    encoded = encode(shard)
    with pytest.raises(IntegrityError, match="not a readable shard"):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 9))])


@given(shard=shards())
@settings(max_examples=10)
def test_a_shard_is_readable_by_pyarrow_alone(shard: Shard) -> None:
    reader = pa.BufferReader(encode(shard))
    spans, generations, sessions = (pa.ipc.open_stream(reader).read_all() for _ in range(3))
    assert spans.column("ids").to_pylist() == [span.ids.tolist() for span in shard.spans]
    assert generations.column("id").to_pylist() == [generation.id for generation in shard.generations]
    assert sessions.column("reward").to_pylist() == [row.reward for row in shard.sessions]
    assert spans.schema.metadata[b"seamlessflow.schema"] == b"1"
