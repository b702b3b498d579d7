"""What holds of every parser for every text and every way to cut it, and of every encoding."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import FAMILIES

from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.detokenizer import Detokenizer
from proxy.trajectory.reading import Reading
from proxy.trajectory.reasoning import MARKS, Reasoning, reasoning_factory
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.toolcalls import ToolParser, marks, parser_factory

KINDS = ["none", "hermes", "qwen_xml", "llama_json", "mistral", "deepseek"]
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "c": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
)
USER = Message("user", "What is it?")
PIECES = st.sampled_from(
    [
        *('{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "parameters": {}}', "add", "now", "{}", "[]", "["),
        *(
            "]",
            "{",
            "}",
            '"',
            "\\",
            ",",
            ";",
            " ",
            "\n",
            "x",
            "1",
            "\N{GRINNING FACE}",
            "```json\n",
            "\n```",
            "function",
        ),
        *("<function=add>", "<parameter=c>", "</parameter>", "</function>", "add[ARGS]{}", '{"name":', "</", "<", "<|"),
    ]
)


def texts(*family: str) -> st.SearchStrategy[str]:
    """Texts in which the marks of ``family`` and pieces of calls come together in all ways."""
    pieces = st.one_of(PIECES, st.sampled_from(family)) if family else PIECES
    return st.lists(pieces, max_size=14).map("".join)


def cut(text: str, data: st.DataObject) -> list[str]:
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *edges], [*edges, len(text)], strict=True)]


def read(parser: ToolParser, parts: Sequence[str], *, ended: bool) -> list[str | ToolCall]:
    found: list[str | ToolCall] = []
    for part in [*(part for text in parts for part in parser.feed(text)), *parser.finish(ended=ended)]:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@settings(max_examples=200)
@given(data=st.data(), ended=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_calls_do_not_depend_on_how_the_text_was_cut_and_nothing_but_calls_is_lost(kind, data, ended):
    text = data.draw(texts(*marks(kind)))
    make = parser_factory(kind)
    whole = read(make(TOOLS), [text], ended=ended)
    assert read(make(TOOLS), cut(text, data), ended=ended) == whole
    if not any(isinstance(part, ToolCall) for part in whole):
        assert "".join(part for part in whole if isinstance(part, str)) == text
    for part in whole:
        if isinstance(part, ToolCall):
            assert isinstance(json.loads(part.arguments), dict)
            assert kind == "qwen_xml" or part.arguments == "{}" or part.arguments in text


@settings(max_examples=200)
@given(data=st.data(), opened=st.booleans())
@pytest.mark.parametrize("kind", ["none", *MARKS])
def test_reasoning_does_not_depend_on_how_the_text_was_cut(kind, data, opened):
    text = data.draw(texts(*MARKS.get(kind, ()), "\n", "hm"))

    def split(parts: Sequence[str]) -> tuple[str, str]:
        parser = reasoning_factory(kind)(opened)
        pieces = [*(piece for part in parts for piece in parser.feed(part)), *parser.finish()]
        thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        return thoughts, "".join(piece for piece in pieces if isinstance(piece, str))

    whole = split([text])
    assert split(cut(text, data)) == whole
    if kind == "none":
        assert whole == ("", text)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    return {name: Renderer(family.write(tmp_path_factory.mktemp("family"))) for name, family in FAMILIES.items()}


def answer(reading: Reading, ids: Sequence[int], edges: list[int], *, opened: bool = False) -> Message:
    """What ``ids``, cut at ``edges``, are to an agent."""
    detokenizer = Detokenizer(reading.decode)
    reasoning, parser = reading.reasoning(opened=opened), reading.calls(TOOLS)
    shown = [detokenizer.feed(ids[a:b]) for a, b in zip([0, *edges], [*edges, len(ids)], strict=True)]
    pieces = [piece for text in (*shown, detokenizer.flush()) for piece in reasoning.feed(text)] + reasoning.finish()
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    parts = read(parser, [piece for piece in pieces if isinstance(piece, str)], ended=True)
    text = "".join(part for part in parts if isinstance(part, str))
    return Message("assistant", text, thoughts, tuple(part for part in parts if isinstance(part, ToolCall)))


@settings(max_examples=100)
@given(data=st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_does_not_depend_on_how_its_tokens_came_and_shows_no_special_token(renderers, name, data):
    renderer, family = renderers[name], FAMILIES[name]
    reading = renderer.reading(family.tool_parser, family.reasoning_parser)
    known = (*marks(family.tool_parser), *MARKS.get(family.reasoning_parser, ()))
    ids = renderer.encode(data.draw(texts(*known))).tolist()
    edges = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    whole = answer(reading, ids, [])
    assert answer(reading, ids, edges) == whole
    assert not [mark for mark in family.special if mark in whole.content + whole.reasoning]


INTEGERS = st.integers(-(2**63), 2**63 - 1)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries({}, optional={"a": INTEGERS, "c": st.text(max_size=20), "other": JSON})
WITH_CALLS = [name for name, family in FAMILIES.items() if family.tool_parser != "none"]


@settings(max_examples=100)
@given(data=st.data(), content=st.sampled_from(["", "Let me see."]))
@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_that_a_template_writes_are_read_back_from_its_tokens(renderers, name, data, content):
    renderer, family = renderers[name], FAMILIES[name]
    marked = (*family.special, *family.added)
    arguments = ARGUMENTS.filter(
        lambda found: not any(mark in json.dumps(found, ensure_ascii=False) for mark in marked)
    )
    if family.tool_parser == "qwen_xml":  # its template writes a value of the unknown parameter as it likes
        arguments = arguments.filter(lambda found: "other" not in found and "</" not in found.get("c", ""))
    wanted = data.draw(st.lists(arguments, min_size=1, max_size=1 if name == "llama3" else 3))
    calls = tuple(ToolCall("add", json.dumps(found, ensure_ascii=False)) for found in wanted)
    alone = family.template in ("llama3", "mistral_nemo", "mistral_small")  # these leave out text beside calls
    message = Message("assistant", "" if alone else content, "", calls)
    before = renderer.text([USER], TOOLS, prompt=True).removesuffix("<think>\n")
    written = (
        renderer.text([USER, message], TOOLS, prompt=False).removeprefix(before).replace("<think>\n\n</think>\n\n", "")
    )
    if family.template == "deepseek_r1" and message.content:
        written = f"{content}{written.removesuffix(f'<｜Assistant｜>{content}{renderer.eos_text}')}"
    ids = [token for token in renderer.encode(written).tolist() if token not in renderer.eos_ids]
    edges = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    found = answer(renderer.reading(family.tool_parser, family.reasoning_parser), ids, edges)
    assert found.content.strip() == message.content
    assert found.digest_input() == Message("assistant", found.content, "", calls).digest_input()


@settings(max_examples=100)
@given(data=st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_encoding_by_segments_gives_the_ids_of_the_whole(renderers, name, data):
    renderer, family = renderers[name], FAMILIES[name]
    codec = renderer._codec
    assert codec.cuts
    between = st.one_of(st.text(max_size=6), st.sampled_from([" ", "\n", "  a", "a ", "user", "\u2581", "</", "<|"]))
    piece = st.one_of(st.sampled_from((*family.special, *family.added)), between)
    text = data.draw(st.lists(piece, max_size=10).map("".join))
    expected = codec.plain(text).tolist()
    assert codec.encode(text).tolist() == expected
    assert codec.encode(text).tolist() == expected
