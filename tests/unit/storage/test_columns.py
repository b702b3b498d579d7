"""Columns: written and read, found by token whatever batch holds it, refused if they are of another."""

from __future__ import annotations

import numpy as np
import pytest
from memory_store import MemoryStore

from storage.columns import Column, decode_column, encode_column, find_column, key_for, look_up, write_column
from storage.errors import IntegrityError


def column(*tokens: tuple[int, int, int]) -> Column:
    """Values 0, 1, 2, ..."""
    places = np.array(tokens, np.int64).reshape(-1, 3)
    return Column("reference_logprob", places, np.arange(len(tokens), dtype=np.float32))


def test_a_column_reads_as_it_was_written_and_the_same_one_has_the_same_bytes() -> None:
    given = column((2**40, 4, 0), (2**40, 4, 1), (3, 1, 0))
    read = decode_column(encode_column(given))
    assert read.name == "reference_logprob"
    assert np.array_equal(read.place_N3, given.place_N3)
    assert np.array_equal(read.value_N, given.value_N)
    assert encode_column(given) == encode_column(column((2**40, 4, 0), (2**40, 4, 1), (3, 1, 0)))


def test_tokens_are_found_in_any_order_and_over_shares() -> None:
    first, second = column((1, 0, 5), (1, 0, 6)), column((2, 0, 5))
    wanted = np.array([[2, 0, 5], [1, 0, 6]], np.int64)
    assert look_up([first, second], wanted).tolist() == [0.0, 1.0]
    assert look_up([column()], np.empty((0, 3), np.int64)).tolist() == []


def test_a_token_that_nobody_spoke_of_is_named() -> None:
    with pytest.raises(IntegrityError, match="says nothing of token 7 of span 0 of task 1"):
        look_up([column((1, 0, 5))], np.array([[1, 0, 5], [1, 0, 7]], np.int64))


def test_a_share_is_found_by_who_computes_it_again_unless_it_cannot_be_read() -> None:
    store = MemoryStore()
    key = key_for("demo", "reference_logprob", "ab" * 32, "initial", share=0, shares=2)
    assert find_column(store, key) is None  # type: ignore[arg-type]  # it gets and puts
    digest = write_column(store, key, column((1, 0, 5)))  # type: ignore[arg-type]
    assert find_column(store, key) == digest  # type: ignore[arg-type]
    store.put(key, b"half a col")
    assert find_column(store, key) is None  # type: ignore[arg-type]
    assert key != key_for("demo", "reference_logprob", "ab" * 32, "initial", share=1, shares=2)


@pytest.mark.parametrize("data", [b"", b"nonsense", encode_column(column((1, 0, 5)))[:-40]])
def test_bytes_that_are_no_column_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a readable column"):
        decode_column(data)
