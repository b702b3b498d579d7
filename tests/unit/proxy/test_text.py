"""Detokenizing and stop strings: never half a character, never part of a stop string."""

from __future__ import annotations

import pytest

from proxy.testing import toy_ids, write_toy_model
from proxy.trajectory.detokenizer import Detokenizer, StopScanner
from proxy.trajectory.renderer import Renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(write_toy_model(tmp_path_factory.mktemp("toy")))


def test_26_the_bytes_of_one_character_are_shown_when_it_is_whole(renderer):
    detokenizer = Detokenizer(renderer.decode)
    shown = [detokenizer.feed([token]) for token in toy_ids("\N{GRINNING FACE}x", end=False)]
    assert shown == ["", "", "", "\N{GRINNING FACE}", "x"]


def test_26_a_character_that_never_comes_whole_is_one_replacement(renderer):
    detokenizer = Detokenizer(renderer.decode)
    assert detokenizer.feed(toy_ids("\N{GRINNING FACE}", end=False)[:3]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("size", [1, 3, 9, 20, 1000])
def test_26_text_that_comes_in_portions_of_any_size_adds_up(renderer, size):
    ids = toy_ids("plain \N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE} and \N{GRINNING FACE}" * 5, end=False)
    detokenizer = Detokenizer(renderer.decode)
    shown = [detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(shown) + detokenizer.flush() == renderer.decode(ids)


@pytest.mark.parametrize("first", range(20))
def test_26_text_adds_up_where_a_decoder_gives_up_all_bytes_in_a_row_for_one(first):
    def decode(ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(ids)

    text = "\U00010000\x80\x80\x80\x7f" * 2 + "x"
    ids = list(text.encode())
    detokenizer = Detokenizer(decode)
    shown = [detokenizer.feed(ids[:first]), *(detokenizer.feed([token]) for token in ids[first:])]
    assert "".join(shown) + detokenizer.flush() == text


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "matched"),
    [
        (("END",), ["a E", "N", "D b"], "a ", "END"),
        (("END",), ["a E", "N", "X"], "a ENX", None),
        (("ab", "b"), ["xa", "b"], "x", "ab"),
        (("aab",), ["aaa", "ab"], "aa", "aab"),
        ((), ["anything"], "anything", None),
    ],
)
def test_stop_strings(stops, parts, shown, matched):
    scanner = StopScanner(stops)
    text = "".join(scanner.feed(part) for part in parts)
    if scanner.matched is None:
        text += scanner.flush()
    assert (text, scanner.matched) == (shown, matched)
