"""Marks that are special tokens: parsers see them, agents do not, and ids are never touched."""

from __future__ import annotations

import pytest
from model_families import FAMILIES

from proxy.trajectory.answer import AnswerBuilder
from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.renderer import Renderer

TOOLS = (
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}},
)
CALL = ToolCall("add", '{"a": 1}')


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    return {name: Renderer(family.write(tmp_path_factory.mktemp("family"))) for name, family in FAMILIES.items()}


def answer(renderer, ids, *, tools=True, opened=False, step=1):
    """The message that ``ids`` are to an agent, and how many of them were accepted."""
    tool_parser, reasoning_parser = renderer.family
    reading = renderer.reading(tool_parser if tools else "none", reasoning_parser)
    parsers = reading.reasoning(opened=opened), reading.calls(TOOLS)
    builder = AnswerBuilder(reading.decode, *parsers, silent=renderer.eos_ids)
    accepted = sum(builder.feed(ids[at : at + step])[0] for at in range(0, len(ids), step))
    builder.finish(ended=True)
    return builder.message(), accepted


WITH_CALLS = [name for name, family in FAMILIES.items() if family.tool_parser != "none"]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_01_calls_are_read_from_ids_and_every_id_is_accepted(renderers, name, step):
    renderer = renderers[name]
    message = Message("assistant", tool_calls=(CALL,))
    before = renderer.text([Message("user", "x")], TOOLS, prompt=True).removesuffix("<think>\n")
    written = renderer.text([Message("user", "x"), message], TOOLS, prompt=False).removeprefix(before)
    ids = renderer.encode(written).tolist()
    assert answer(renderer, ids, step=step) == (message, len(ids))


@pytest.mark.parametrize("step", [1, 1000])
def test_02_reasoning_is_read_from_ids_and_every_id_is_accepted(renderers, step):
    renderer = renderers["magistral"]
    ids = renderer.encode('[THINK]hm[/THINK]so[TOOL_CALLS]add[ARGS]{"a": 1}</s>').tolist()
    assert answer(renderer, ids, step=step) == (Message("assistant", "so", "hm", (CALL,)), len(ids))


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize(
    ("name", "written", "shown"),
    [
        ("magistral", "[TOOL_CALLS]add[ARGS]{}}", None),
        ("magistral", "a[TOOL_CALLS]nothing[ARGS]{}", Message("assistant", "anothing{}")),
        ("magistral", "[THINK]a[TOOL_CALLS]b", Message("assistant", "", "ab")),
        ("magistral", "[THINK]a[/THINK][/THINK]b[THINK]", Message("assistant", "b", "a")),
        ("llama3", "<|python_tag|>print(1)", Message("assistant", "print(1)")),
        ("deepseek-r1", "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>", Message("assistant", "ab")),
        ("deepseek-v3.1", "a<｜tool▁calls▁begin｜>b", Message("assistant", "a<｜tool▁calls▁begin｜>b")),
    ],
)
def test_59_marks_that_are_special_tokens_are_never_shown(renderers, name, written, shown, step):
    renderer = renderers[name]
    message, _ = answer(renderer, renderer.encode(written).tolist(), step=step)
    assert message == (shown or Message("assistant", "}", "", (ToolCall("add", "{}"),)))


@pytest.mark.parametrize(
    ("name", "written"), [("magistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'), ("llama3", '<|python_tag|>{"name": "add"}')]
)
def test_59_marks_are_not_shown_where_calls_are_not_read(renderers, name, written):
    renderer = renderers[name]
    message, _ = answer(renderer, renderer.encode(written).tolist(), tools=False)
    assert not message.tool_calls
    assert "[" not in message.content
    assert "<" not in message.content


def test_59_text_in_front_of_a_call_that_looks_like_a_mark_is_shown_in_its_place(renderers):
    renderer = renderers["magistral"]
    ids = renderer.encode('a [TOOL_[TOOL_CALLS]add[ARGS]{"a": 1}[ARG').tolist()
    assert answer(renderer, ids)[0] == Message("assistant", "a [TOOL_[ARG", "", (CALL,))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_59_a_mark_that_stop_strings_cut_in_two_is_not_shown_either(renderers, step):
    reading = renderers["magistral"].reading("mistral", "mistral")
    text = "a[ARGS]b[TOOL_CALLS]c [CALL_ID"
    reasoning, calls = reading.reasoning(opened=True), reading.calls(TOOLS)
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    assert "".join(piece.text for part in parts for piece in reasoning.feed(part)) == "abc "
    assert [piece.text for piece in reasoning.finish()] == ["[CALL_ID"]
    shown = [piece for part in parts for piece in calls.feed(part)] + calls.finish(ended=True)
    assert "".join(shown) == "abc [CALL_ID"


@pytest.mark.parametrize("name", FAMILIES)
def test_35_a_special_token_in_the_middle_has_no_text_and_keeps_its_place_among_the_ids(renderers, name):
    renderer = renderers[name]
    special = renderer.encode(FAMILIES[name].special[-1] if name != "magistral" else "[INST]").tolist()
    ids = [*renderer.encode("one").tolist(), *special, *renderer.encode("two").tolist()]
    message, accepted = answer(renderer, ids)
    assert message.content.replace(" ", "") == "onetwo"
    assert accepted == len(ids)


def test_a_reading_is_made_once_and_its_parsers_are_for_one_answer_each(renderers):
    renderer = renderers["qwen3"]
    reading = renderer.reading("hermes", "think")
    assert renderer.reading("hermes", "think") is reading
    first, second = reading.calls(TOOLS), reading.calls(TOOLS)
    assert first.feed("<tool_call>") == []
    assert second.feed("a") == ["a"]
