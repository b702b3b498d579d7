"""Tool calls in text: exact arguments, nothing invented, the same result however the text is split."""

from __future__ import annotations

import json

import pytest

from proxy.trajectory.canonical import ToolCall
from proxy.trajectory.toolcalls import parser_factory
from proxy.trajectory.toolcalls_qwen import typed
from storage.errors import ConfigError


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


ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FAMILIES = ["hermes", "qwen_xml", "llama_json", "mistral", "deepseek"]


def xml(name, **values):
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
    return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])


def written(family, *calls):
    """Calls with JSON arguments as a model of the family writes them, in each of the family's forms."""
    pairs = [(call.name, call.arguments) for call in calls]
    if family == "hermes":
        return ["\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in pairs)]
    if family == "qwen_xml":
        return ["\n".join(xml(n, **json.loads(a)) for n, a in pairs)]
    if family == "llama_json":
        objects = [f'{{"name": "{n}", "parameters": {a}}}' for n, a in pairs]
        return [tag + gap.join(objects) for tag in ("", "<|python_tag|>") for gap in ("; ", "\n")]
    if family == "mistral":
        array = ", ".join(f'{{"name": "{n}", "arguments": {a}, "id": "a1b2c3d4e"}}' for n, a in pairs)
        named = "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in pairs)
        with_ids = "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{a}" for n, a in pairs)
        return [f"[TOOL_CALLS][{array}]", f"[TOOL_CALLS] [{array}]", named, with_ids]
    fenced = "\n".join(f"{ONE}function{SEP}{n}\n```json\n{a}\n```{ONE_END}" for n, a in pairs)
    bare = "".join(f"{ONE}{n}{SEP}{a}{ONE_END}" for n, a in pairs)
    return [f"{ALL}{fenced}{ALL_END}", f"{ALL}{bare}{ALL_END}"]


ODD = '{"cmd":"mkdir -p test/{test1,test2 \\"]</tool_call>; [ARGS]``` \\\\","dry": true,  "times": 1.50}'
"""Brackets that do not close, quotes, marks of calls and spaces that nobody else would write."""


@pytest.mark.parametrize("step", [None, 1, 3, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_22_arguments_are_the_exact_text_of_the_model_however_it_comes(family, step):
    call = ToolCall("run", ODD)
    if family == "qwen_xml":
        text = xml("run", cmd='mkdir -p test/{test1,test2 "</function>` \\', dry="True", times="1.50")
        call = ToolCall("run", '{"cmd": "mkdir -p test/{test1,test2 \\"</function>` \\\\", "dry": true, "times": 1.50}')
        assert read(parser_factory(family)(TOOLS), text, step=step) == [call]
        return
    for text in written(family, call):
        assert read(parser_factory(family)(TOOLS), text, step=step) == [call]


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_23_a_call_without_arguments_has_an_empty_object(family, step):
    for text in written(family, ToolCall("now", "{}")):
        assert read(parser_factory(family)(TOOLS), text, step=step) == [ToolCall("now", "{}")]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("qwen_xml", "<tool_call><function=now></function></tool_call>"),
        ("llama_json", '{"name": "now"}'),
        ("mistral", '[TOOL_CALLS][{"name": "now"}]'),
    ],
)
def test_23_a_call_that_leaves_its_arguments_out_has_an_empty_object(family, text):
    assert read(parser_factory(family)(TOOLS), text) == [ToolCall("now", "{}")]


@pytest.mark.parametrize("step", [None, 1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_25_calls_in_parallel_are_calls_of_their_own(family, step):
    calls = [ToolCall("add", '{"a": 1, "b": 2}'), ToolCall("now", "{}"), ToolCall("add", '{"a": 3, "b": 4}')]
    for text in written(family, *calls):
        assert read(parser_factory(family)(TOOLS), text, step=step) == calls


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama_json"])
def test_text_around_calls_is_kept_and_white_space_between_them_is_not(family, step):
    call = ToolCall("add", '{"a": 1, "b": 2}')
    for text in written(family, call):
        parts = read(parser_factory(family)(TOOLS), f"Let me\n see.\n\n{text}\n", step=step)
        assert parts == ["Let me\n see.", call]
        assert read(parser_factory(family)(TOOLS), f"{text} Done. ", step=step) == [call, " Done."]
        assert read(parser_factory(family)(TOOLS), f"{text}\n{text}", step=step) == [call, call]


def test_llama_reads_calls_behind_text_only_if_they_are_marked():
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert read(parser_factory("llama_json")(TOOLS), f"So: {call}") == [f"So: {call}"]
    marked = read(parser_factory("llama_json")(TOOLS), f"So: <|python_tag|>{call}")
    assert marked == ["So:", ToolCall("add", '{"a": 1}')]
    assert read(parser_factory("llama_json")(TOOLS), f"{call} and so on") == [ToolCall("add", '{"a": 1}'), " and so on"]


MALFORMED = {
    "hermes": [
        *("{", "[]", '{"arguments": {}}', '{"name": ["add"], "arguments": {}}', '{"name": "unknown", "arguments": {}}'),
        *('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": {"a": 1}} x', '{"name": "add"'),
        *('{"name": "add", "arguments": {"a": NaN}}', '{"name": "add", "arguments": {"a": 1}', '{"name": "add\n"}'),
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": {"a": 1}} <tool_call>',
    ],
    "qwen_xml": [
        *("<function=unknown></function>", "<function=add", "<function=add>x</function>", '{"name": "add"}'),
        *("<function=add><parameter=a>1</function>", "<function=add></function> x", "<function>add</function>"),
    ],
    "llama_json": [
        *('{"name": "unknown", "parameters": {}}', '{"name": "add", "parameters": [1]}', '{"name": "add"'),
        *('{"answer": 42}', "{", '{{"name": "add"}', '"name"', '[{"name": "add", "parameters": {}}]'),
        '{"name": "add", "parameters": {"a": 1}',
    ],
    "mistral": [
        *("[", "[]", "[1]", '[{"name": "unknown", "arguments": {}}]', '[{"name": "add", "arguments": {}}, {}]'),
        *('[{"name": "add", "arguments": {}}', "add", "add[ARGS]", "add[ARGS]{", "add[ARGS][]", "add[CALL_ID]ab{}"),
        *('unknown[ARGS]{"a": 1}', 'add[ARGS]{"a": 1', "add {}"),
    ],
    "deepseek": [
        *(f"{ONE}add{SEP}", f"{ONE}add{SEP}{{}}", f"{ONE}add{SEP}{{}} x{ONE_END}", f"{ONE}unknown{SEP}{{}}{ONE_END}"),
        *(f"{ONE}function{SEP}add\n```json\n{{}}\n{ONE_END}", f"{ONE}function{SEP}add {{}}{ONE_END}", f"x{ONE}"),
        *(f"{ONE}{SEP}{{}}{ONE_END}", f"{ONE}add{{}}{ONE_END}", f"{ONE}add{SEP}none{ONE_END}", f"{ALL_END}"),
    ],
}
AROUND = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>"),
    "llama_json": ("<|python_tag|>", ""),
    "mistral": ("[TOOL_CALLS]", ""),
    "deepseek": (ALL, ALL_END),
}


@pytest.mark.parametrize("step", [None, 1, 4])
@pytest.mark.parametrize(
    ("family", "inner"), [(family, inner) for family, texts in MALFORMED.items() for inner in texts]
)
def test_a_malformed_call_stays_the_model_s_text(family, inner, step):
    opening, closing = AROUND[family]
    for text in (f"{opening}{inner}{closing}", f"a  {opening} {inner} {closing} b", f"{opening}{inner}"):
        assert read(parser_factory(family)(TOOLS), text, step=step) == [text]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_behind_a_malformed_one_is_read(family):
    opening, closing = AROUND[family]
    call = ToolCall("add", '{"a": 1, "b": 2}')
    for text in written(family, call):
        text = text if family != "llama_json" or text.startswith(opening) else opening + text
        parts = read(parser_factory(family)(TOOLS), f"{opening}[{{x{closing}{text}", step=1)
        assert parts == [f"{opening}[{{x{closing}", call]


@pytest.mark.parametrize("step", [None, 1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_was_cut_by_its_limit_is_text_and_whole_ones_in_front_of_it_are_calls(family, step):
    call = ToolCall("add", '{"a": 1, "b": 2}')
    for text in written(family, call):
        cut = text[: text.index('"b"') if '"b"' in text else text.index("<parameter=b")]
        assert read(parser_factory(family)(TOOLS), cut, ended=False, step=step) == [cut]
        if family != "mistral" or "[ARGS]" in text:
            parts = read(parser_factory(family)(TOOLS), text + cut, ended=False, step=step)
            assert parts[0] == call
            assert all(isinstance(part, str) for part in parts[1:])


@pytest.mark.parametrize("name", ["add", None])
@pytest.mark.parametrize("kind", [*FAMILIES, "mistral [ARGS]", "deepseek ```", "positional"])
def test_a_forced_call_is_read_together_with_the_text_that_forces_it(kind, name):
    family, _, template = kind.partition(" ")
    make = parser_factory(family, "<call>", "</call>", template=template)
    prefix = make(TOOLS).forced_prefix(name)
    call = ToolCall("add", '{"a": 1, "b": 2}')
    texts = ["<call>add(1,2)</call>"] if family == "positional" else written(family, call)
    rests = [text.removeprefix(prefix) for text in texts if text.startswith(prefix)]
    assert rests
    for rest in rests:
        parser = make(TOOLS)
        parts = [*parser.feed(prefix), *parser.feed(rest), *parser.finish(ended=True)]
        assert [(part.name, json.loads(part.arguments)) for part in parts] == [("add", {"a": 1, "b": 2})]


def test_without_a_parser_no_call_can_be_forced():
    assert parser_factory("none")(TOOLS).forced_prefix("add") is None
    assert parser_factory("positional")(TOOLS).forced_prefix(None) is None


def test_a_parser_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="'hermit' does not exist: none, positional or hermes"):
        parser_factory("hermit")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_can_be_no_call_is_not_held_back_by_any_family(family):
    parser = parser_factory(family)(TOOLS)
    assert [parser.feed(text) for text in ("T", "he", " a", "nd")] == [["T"], ["he"], [" a"], ["nd"]]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "\n a \n", '"\\n a \\n"'),
        ({"type": "string"}, "", '""'),
        ({"type": "integer"}, " 12 ", "12"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "integer"}, "1.5", '"1.5"'),
        ({"type": "integer"}, "9" * 5000, f'"{"9" * 5000}"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "true", '"true"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "array"}, '["a",  1]', '["a",  1]'),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"type": ["integer", "null"]}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", '"3"'),
        ({}, "3", '"3"'),
        (None, "3", '"3"'),
    ],
)
def test_40_a_value_written_as_text_gets_the_type_of_its_schema(schema, text, value):
    assert typed(text, schema) == value


def test_a_string_parameter_keeps_every_character_between_its_tags():
    value = "\n  if a < b:\n\treturn '</parameter>' # <parameter=x>\n"
    (call,) = read(parser_factory("qwen_xml")(TOOLS), xml("say", text=value), step=1)
    assert json.loads(call.arguments) == {"text": value}
