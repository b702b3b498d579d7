"""Reasoning is told from the answer, wherever its marks are and however the text comes."""

from __future__ import annotations

import pytest

from proxy.trajectory.reasoning import Reasoning, opened, reasoning_factory
from storage.errors import ConfigError


def read(kind, text, *, opened=False, step=None):
    """(reasoning, answer) of ``text`` fed in portions of ``step`` characters."""
    parser = reasoning_factory(kind)(opened)
    step = step or len(text) or 1
    pieces = [piece for at in range(0, len(text), step) for piece in parser.feed(text[at : at + step])]
    pieces += parser.finish()
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return thoughts, "".join(piece for piece in pieces if isinstance(piece, str))


@pytest.mark.parametrize("step", [None, 1, 3])
@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("think", "<think>\nhm\n\nhm\n</think>\n\nso\n", ("hm\n\nhm", "so\n")),
        ("think", "\n <think>hm</think>so", ("hm", "so")),
        ("think", "<think>\n\n</think>\n\nso", ("", "so")),
        ("think", "<think> a </think> b", (" a ", " b")),
        ("think", "so", ("", "so")),
        ("think", " so <think>hm</think>", ("", " so <think>hm</think>")),
        ("think", "<think>a</think>b</think>c<think>d", ("a", "b</think>c<think>d")),
        ("think", "<think>a <think> </thin </think>b", ("a <think> </thin ", "b")),
        ("think", "<thinking>so", ("", "<thinking>so")),
        ("think", "<thi", ("", "<thi")),
        ("think", "", ("", "")),
        ("mistral", "[THINK]\n hm\n[/THINK]\n so", ("\n hm\n", "\n so")),
        ("mistral", "<think>hm</think>so", ("", "<think>hm</think>so")),
        ("none", "<think>hm</think>so", ("", "<think>hm</think>so")),
    ],
)
def test_a_block_in_front_of_the_answer_is_reasoning(kind, text, found, step):
    assert read(kind, text, step=step) == found


@pytest.mark.parametrize("step", [None, 1, 3])
@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("think", "hm\n</think>\n\nso", ("hm", "so")),
        ("think", "</think>so", ("", "so")),
        ("think", "\nhm</think>so</think>", ("hm", "so</think>")),
        ("mistral", "hm [/THINK]so", ("hm ", "so")),
        ("none", "hm</think>so", ("", "hm</think>so")),
    ],
)
def test_32_a_block_that_the_prompt_opened_has_only_its_closing_mark_in_the_answer(kind, text, found, step):
    assert read(kind, text, opened=True, step=step) == found


@pytest.mark.parametrize("step", [None, 1, 3])
@pytest.mark.parametrize(
    ("text", "is_opened", "thought"),
    [("<think>\nhm\nhm", False, "hm\nhm"), ("hm </thi", True, "hm </thi"), ("\n\n", True, ""), ("a\n", True, "a")],
)
def test_reasoning_that_is_never_closed_stays_reasoning(text, is_opened, thought, step):
    assert read("think", text, opened=is_opened, step=step) == (thought, "")


@pytest.mark.parametrize("step", [None, 1])
def test_an_answer_that_begins_with_the_closing_mark_had_no_reasoning(step):
    assert read("think", "\n</think>\n\n<tool_call>", step=step) == ("", "<tool_call>")


def test_reasoning_and_text_that_are_certain_are_not_held_back():
    parser = reasoning_factory("think")(True)
    assert [parser.feed(text) for text in ("hm", " hm", "</", "think>", "so", "\n")] == [
        *([Reasoning("hm")], [Reasoning(" hm")], [], [], ["so"], ["\n"])
    ]


@pytest.mark.parametrize(
    ("kind", "prompt_end", "is_opened"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<think>\n\n</think>\n\n", False),
        ("think", "<|im_start|>assistant\n", False),
        ("mistral", "[/INST][THINK]", True),
        ("mistral", "<think>", False),
        ("none", "<think>", False),
    ],
)
def test_whether_the_prompt_ends_inside_reasoning(kind, prompt_end, is_opened):
    assert opened(kind, prompt_end) is is_opened


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="'thinking' does not exist: none or think, mistral"):
        reasoning_factory("thinking")
