"""Tool calls in text: exact arguments, nothing invented, the same result however the text is split."""

from __future__ import annotations

import json

import pytest

from proxy.trajectory.canonical import ToolCall
from proxy.trajectory.toolcalls import parser_factory


def tool(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("add", a="integer", b="integer"),
    tool("say", text="string"),
    tool("run", cmd="string", dry="boolean", times="number"),
    tool("now"),
]


def read(parser, text, *, ended=True, step=None):
    parts = []
    for start in range(0, len(text), step or len(text) or 1):
        parts += parser.feed(text[start : start + (step or len(text))])
    parts += parser.finish(ended=ended)
    joined = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


POSITIONAL = [
    ("<call>", "</call>", "<call>add(7,41)</call>", [ToolCall("add", '{"a":7,"b":41}')]),
    ("<call>", "</call>", "<call>add(-7, 41)</call>", [ToolCall("add", '{"a":-7,"b":41}')]),
    ("", "", "add(3,4)", [ToolCall("add", '{"a":3,"b":4}')]),
    ("", "", "now()", [ToolCall("now", "{}")]),
    ("", "", "add(1,2)add(3,4)", [ToolCall("add", '{"a":1,"b":2}'), ToolCall("add", '{"a":3,"b":4}')]),
    ("", "", 'say("a, (b) \\"c\\"")', [ToolCall("say", '{"text":"a, (b) \\"c\\""}')]),
    ("", "", "say(hello)", [ToolCall("say", '{"text":"hello"}')]),
    ("", "", "say(12)", [ToolCall("say", '{"text":"12"}')]),
    ("", "", "run(ls,true,1.50)", [ToolCall("run", '{"cmd":"ls","dry":true,"times":1.50}')]),
]
TEXT = [
    ("<call>", "</call>", "The answer is 48."),
    ("<call>", "</call>", "<call>add(7,41)</call> done"),
    ("<call>", "</call>", " <call>add(7,41)</call>"),
    ("<call>", "</call>", "<call>add(7,41)"),
    ("<call>", "</call>", "<call>mul(7,41)</call>"),
    ("", "", "add(3,4,5)"),
    ("", "", "add(3,x)"),
    ("", "", "add(3,true)"),
    ("", "", "add(007,4)"),
    ("", "", "add(3.5,4)"),
    ("", "", "add(NaN,4)"),
    ("", "", "add 3 4"),
    ("", "", "07"),
    ("", "", "__import__('os').system('true')"),
    ("", "", ""),
]


@pytest.mark.parametrize("step", [None, 1, 3])
@pytest.mark.parametrize(("opening", "closing", "text", "calls"), POSITIONAL)
def test_an_answer_that_is_nothing_but_positional_calls_is_calls(opening, closing, text, calls, step):
    assert read(parser_factory("positional", opening, closing)(TOOLS), text, step=step) == calls


@pytest.mark.parametrize("step", [None, 1, 3])
@pytest.mark.parametrize(("opening", "closing", "text"), TEXT)
def test_anything_else_stays_the_model_s_text(opening, closing, text, step):
    assert "".join(read(parser_factory("positional", opening, closing)(TOOLS), text, step=step)) == text


def test_a_positional_call_that_was_cut_by_its_limit_is_text():
    assert read(parser_factory("positional")(TOOLS), "add(3,4)", ended=False) == ["add(3,4)"]


def test_text_that_can_be_no_call_is_not_held_back():
    parser = parser_factory("positional", "<call>", "</call>")(TOOLS)
    assert parser.feed("T") == ["T"]
    assert parser.feed("he") == ["he"]


@pytest.mark.parametrize("step", [None, 1, 7])
def test_22_hermes_arguments_are_the_exact_text_of_the_model(step):
    arguments = '{"cmd":"mkdir -p test/{test1,test2", "dry": true,  "times": 1.50}'
    text = f'Let me see.\n<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>\n'
    assert read(parser_factory("hermes")(TOOLS), text, step=step) == ["Let me see.", ToolCall("run", arguments)]


@pytest.mark.parametrize(
    "inner",
    [
        "{",
        "[]",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"arguments": {}}',
        '{"name": "add", "arguments": {"a": 1}} x',
        '{"name": ["add"], "arguments": {}}',
    ],
)
def test_a_malformed_hermes_call_stays_text(inner):
    text = f"<tool_call>{inner}</tool_call>"
    assert read(parser_factory("hermes")(TOOLS), text) == [text]


def test_23_a_hermes_call_without_arguments_has_an_empty_object():
    (call,) = read(parser_factory("hermes")(TOOLS), '<tool_call>{"name": "now"}</tool_call>')
    assert json.loads(call.arguments) == {}
