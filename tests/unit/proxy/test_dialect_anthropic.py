"""Anthropic's Messages API, checked with the vendor's own client: its types, its reader of streams, its errors.

Numbers are rows of the case list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

import anthropic
import httpx2
import pytest
from anthropic.types import MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from proxy.dialects.anthropic import AnthropicDialect
from proxy.dialects.base import AnswerHead, ChoiceAnswer, ToolChoice, TurnRequest
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import Message, ToolCall, extend_digest
from storage import errors

DIALECT = AnthropicDialect()
EVENT = TypeAdapter(RawMessageStreamEvent)
HI = {"role": "user", "content": "hi"}
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CHAT_ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": ADD["input_schema"]},
}
CALL = ToolCall("add", '{"a": 7, "b": 41}')
GENERATION = "0123456789abcdef0123456789abcdef"


def parse(**more):
    return DIALECT.parse(json.dumps({"model": "any", "max_tokens": 9, "messages": [HI], **more}).encode())


def messages(*entries, **more):
    return parse(messages=list(entries), **more).messages


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(value, **more):
    return {"type": "text", "text": value, **more}


def called(identity, **arguments):
    return {"type": "tool_use", "id": identity, "name": "add", "input": arguments}


def result(identity, content="48", **more):
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def head(**request):
    return AnswerHead(GENERATION, 1700000000, "policy", 21, TurnRequest((Message("user", "hi"),), **request))


def answer_of(deltas, reason="stop", stop_string=None):
    """The finished choice that these deltas are steps of."""
    calls = tuple(delta.call for delta in deltas if delta.call)
    message = Message("assistant", "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls)
    reason = "tool_calls" if calls and reason == "stop" else reason
    return ChoiceAnswer(0, GENERATION, message, reason, stop_string, completion_tokens=6)


def written(deltas, request=None, **ending):
    """The bytes of one streamed answer."""
    writer = DIALECT.stream(head(**(request or {})))
    parts = [writer.opening(), *(writer.delta(0, delta, ()) for delta in deltas)]
    return b"".join([*parts, writer.finish(answer_of(deltas, **ending)), writer.closing()])


def events(data):
    """(event, data) of each server-sent event."""
    found = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, payload = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(payload.removeprefix("data: "))))
    return found


def brief(data):
    """The events behind ``message_start`` in short."""
    short = []
    for name, event in events(data)[1:]:
        assert name == event.pop("type")
        short.append((name.removeprefix("content_block_"), *event.values()))
    return short


def declared(model):
    """Whether every field is one that the vendor's types declare."""
    values = [getattr(model, name) for name in type(model).model_fields]
    nested = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return not model.model_extra and all(declared(v) for v in nested if isinstance(v, BaseModel))


def read_by_client(data):
    """The final message as the vendor's client makes it from a stream."""
    reply = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    )
    with (
        anthropic.Anthropic(api_key="k", max_retries=0, http_client=httpx2.Client(transport=reply)) as client,
        client.messages.stream(model="any", max_tokens=9, messages=[HI]) as stream,
    ):
        return stream.get_final_message()


# --- requests ---------------------------------------------------------------------------------------------------


def test_a_request_becomes_canonical():
    request = parse(
        system="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END", "STOP"],
        stream=True,
        tools=[ADD],
        metadata={"user_id": "me"},
    )
    assert request == TurnRequest(
        (Message("system", "Be brief."), Message("user", "hi")),
        tools=(CHAT_ADD,),
        model="any",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop=("END", "STOP"),
        stream=True,
        labels={"metadata": {"user_id": "me"}},
    )


@pytest.mark.parametrize(
    "system",
    [
        "Be brief. Be kind.",
        [text("Be brief. ", cache_control={"type": "ephemeral"}), text("Be kind.")],
        [
            text("x-anthropic-billing-header: cc_version=2.1.29.3a3; cc_entrypoint=cli; cch=71fea;"),
            text("Be brief. Be kind."),
        ],
        "x-anthropic-billing-header: cc_version=2.1.29.3a3; cch=71fea;\nBe brief. Be kind.",
        [text("Be brief. "), text("x-anthropic-billing-header: cch=0;"), text("Be kind.")],
    ],
)
def test_44_the_system_prompt_is_the_same_in_any_form_and_with_any_billing_header(system):
    expected = (Message("system", "Be brief. Be kind."), Message("user", "hi"))
    assert messages(HI, system=system) == expected
    assert messages({"role": "system", "content": system}, HI) == expected


@pytest.mark.parametrize("system", [None, "", [], [text("x-anthropic-billing-header: cch=0;")]])
def test_44_without_instructions_there_is_no_system_message(system):
    assert messages(HI, system=system) == (Message("user", "hi"),)


def test_44_what_looks_like_the_header_elsewhere_stays():
    line = "x-anthropic-billing-header: cch=1;"
    assert messages({"role": "user", "content": line}, system=f"Strip {line}") == (
        Message("system", f"Strip {line}"),
        Message("user", line),
    )


def test_system_messages_in_mid_list_stay_in_place_and_empty_ones_are_left_out():
    found = messages(
        HI,
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": []},
        HI,
        {"role": "system", "content": "Hurry."},
    )
    assert [(m.role, m.content) for m in found] == [
        ("user", "hi"),
        ("assistant", "yes"),
        ("user", "hi"),
        ("system", "Hurry."),
    ]


def test_77_text_blocks_and_strings_are_the_same():
    assert messages(user(text("h"), text("i"))) == messages(HI)
    one = messages(assistant(called("x")), user(result("x", "10525")))
    assert one == messages(assistant(called("x")), user(result("x", [text("105"), text("25")])))
    assert one[-1] == Message("tool", "10525")


def test_an_assistant_s_blocks_become_one_message():
    blocks = (
        {"type": "thinking", "thinking": "Sum", "signature": "whatever"},
        {"type": "redacted_thinking", "data": "opaque"},
        text("So"),
        called("x", a=7, b=41),
        called("y"),
    )
    found = messages(HI, assistant(*blocks), user(result("x")))
    assert found[1] == Message("assistant", "So", "Sum", (ToolCall("add", '{"a":7,"b":41}'), ToolCall("add", "{}")))


def test_results_become_tool_messages_in_the_order_of_the_calls_and_the_text_behind_them_a_user_message():
    found = messages(
        HI,
        assistant(called("x"), called("y"), called("z")),
        user(result("z", "3"), result("x", "1"), result("y", None), text("Go "), text("on.")),
    )
    assert found[2:] == (Message("tool", "1"), Message("tool"), Message("tool", "3"), Message("user", "Go on."))


def test_results_of_unknown_calls_keep_their_order():
    found = messages(HI, assistant(called("x")), user(result("p", "2"), result("x", "1"), result("q", "3")))
    assert [message.content for message in found[2:]] == ["1", "2", "3"]


def test_a_failed_result_says_so():
    found = messages(HI, assistant(called("x")), user(result("x", "no such file", is_error=True)))
    assert found[-1] == Message("tool", "Error: no such file")


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("image", [{"type": "image", "source": {}}]),
        ("document", [text("see"), {"type": "document", "source": {}}]),
        ("image", [result("x", [{"type": "image", "source": {}}])]),
        ("search_result", [{"type": "search_result"}]),
        ("container_upload", [{"type": "container_upload"}]),
        ("thinking", [{"type": "thinking", "thinking": "", "signature": ""}]),
    ],
)
def test_content_that_a_text_model_cannot_read_is_refused_by_name(name, blocks):
    with pytest.raises(errors.UnsupportedParameter, match=f"messages.0.content.*'{name}'"):
        messages(user(*blocks))


@pytest.mark.parametrize("kind", ["server_tool_use", "web_search_tool_result", "tool_result"])
def test_the_vendor_s_own_tools_in_history_are_refused_by_name(kind):
    with pytest.raises(errors.UnsupportedParameter, match=f"messages.1.content.0.*'{kind}'"):
        messages(HI, assistant({"type": kind}), HI)


@pytest.mark.parametrize(
    ("where", "entries"),
    [
        ("messages", []),
        ("messages", [{"role": "system", "content": ""}]),
        ("messages", [HI, {"role": "assistant", "content": "The answer is ("}]),
        ("messages.0.role", [{"role": "tool", "content": "x"}]),
        ("messages.0.role", ["hi"]),
        ("messages.0.content", [{"role": "user"}]),
        ("messages.0.content.0", [user("hi")]),
        ("messages.0.content.0.text", [user({"type": "text"})]),
        ("messages.0.content", [user(text("so"), result("x"))]),
        ("messages.0.content.0.tool_use_id", [user({"type": "tool_result", "content": ""})]),
        ("messages.0.content.0.input", [assistant({"type": "tool_use", "id": "x", "name": "f", "input": "{}"}), HI]),
        ("messages.0.content.0.id", [assistant({"type": "tool_use", "name": "f", "input": {}}), HI]),
    ],
)
def test_malformed_messages_are_refused_with_their_place(where, entries):
    with pytest.raises(errors.InvalidRequest) as failure:
        messages(*entries)
    assert failure.value.param == where


def test_the_vendor_s_own_tools_are_refused_by_name():
    with pytest.raises(errors.UnsupportedParameter, match="bash_20250124") as failure:
        parse(tools=[ADD, {"type": "bash_20250124", "name": "bash"}])
    assert failure.value.param == "tools.1"


def test_tools_may_carry_what_changes_nothing():
    tool = {**ADD, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": False, "defer_loading": None}
    assert parse(tools=[tool]).tools == (CHAT_ADD,)
    assert parse(tools=[{"name": "now", "input_schema": {"type": "object"}}]).tools[0]["function"] == {
        "name": "now",
        "parameters": {"type": "object"},
    }


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"strict": True}, "tools.0.strict"),
        ({"defer_loading": True}, "tools.0.defer_loading"),
        ({"input_examples": [{"a": 1}]}, "tools.0.input_examples"),
        ({"parameters": {}}, "tools.0.parameters"),
        ({"name": ""}, "tools.0.name"),
        ({"input_schema": None}, "tools.0.input_schema"),
        ({"description": 7}, "tools.0.description"),
    ],
)
def test_tools_that_ask_for_more_are_refused_by_name(change, where):
    with pytest.raises(errors.RequestError) as failure:
        parse(tools=[{**ADD, **change}])
    assert failure.value.param == where


@pytest.mark.parametrize(
    ("value", "choice", "parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "add"}, ToolChoice("named", "add"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
    ],
)
def test_tool_choice(value, choice, parallel):
    request = parse(tools=[ADD], tool_choice=value)
    assert (request.tool_choice, request.parallel_tool_calls) == (choice, parallel)


@pytest.mark.parametrize(
    "value", ["any", {"type": "tool"}, {"type": "tool", "name": ""}, {"type": "tool", "name": "sub"}]
)
def test_a_tool_choice_that_cannot_be_is_refused(value):
    with pytest.raises(errors.InvalidRequest) as failure:
        parse(tools=[ADD], tool_choice=value)
    assert failure.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("value", "switch"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_the_template_s_switch_and_what_was_asked_is_recorded(value, switch):
    request = parse(thinking=value)
    assert request.thinking is switch
    assert request.labels.get("thinking") == value


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("enabled", "thinking"),
        ({"type": "between_tools"}, "thinking.type"),
        ({"type": "enabled", "budget_tokens": 0}, "budget_tokens"),
        ({"type": "enabled", "display": "rot13"}, "thinking.display"),
        ({"type": "enabled", "depth": 3}, "thinking.depth"),
    ],
)
def test_thinking_that_no_template_can_do_is_refused_by_name(value, param):
    with pytest.raises(errors.RequestError) as failure:
        parse(thinking=value)
    assert failure.value.param == param


def test_a_schema_for_the_answer_is_passed_on_and_effort_is_recorded():
    schema = {"type": "object", "properties": {}}
    request = parse(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert request.json_schema == schema
    assert request.labels == {"output_config.effort": "low"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("container", "box"),
        ("context_management.edits", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("context_management.rules", {"rules": []}),
        ("output_config.task_budget", {"task_budget": {}}),
        ("mcp_servers", [{"url": "http://x"}]),
        ("service_tier", "priority"),
        ("speed", "fast"),
        ("n", 2),
        ("seed", 1),
        ("logit_bias", {}),
        ("anthropic_version", "bedrock-2023-05-31"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    with pytest.raises(errors.UnsupportedParameter, match=name) as failure:
        parse(**{name.split(".")[0]: value})
    assert failure.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", None),
        ("max_tokens", "9"),
        ("temperature", 1.5),
        ("top_p", -0.1),
        ("top_k", 0),
        ("stop_sequences", "END"),
        ("stop_sequences", [""]),
        ("stream", 1),
        ("tools", {}),
        ("output_config", []),
        ("output_config.format", {"format": {"type": "text"}}),
        ("context_management", []),
        ("tools.0", ["add"]),
    ],
)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(errors.InvalidRequest, match=name) as failure:
        parse(**{name.split(".")[0]: value})
    assert failure.value.param == name


def test_what_claude_code_sends_is_understood():
    request = parse(
        system=[
            text("x-anthropic-billing-header: cc_version=2.1.175.f2a; cc_entrypoint=cli; cch=36ee5;"),
            text("You are an agent.", cache_control={"type": "ephemeral", "ttl": "1h"}),
        ],
        messages=[user(text("<reminder>x</reminder>"), text("list files", cache_control={"type": "ephemeral"}))],
        tools=[{**ADD, "eager_input_streaming": True}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "user_1_session_2"},
        max_tokens=32000,
        temperature=1,
        tool_choice=None,
        mcp_servers=[],
        container=None,
        stream=True,
    )
    assert request.messages == (
        Message("system", "You are an agent."),
        Message("user", "<reminder>x</reminder>list files"),
    )
    assert request.tools == (CHAT_ADD,)
    assert (request.thinking, request.max_tokens, request.stream) == (True, 32000, True)


def test_76_a_count_needs_no_limit_and_reads_the_same_prompt():
    body = {"model": "any", "messages": [HI, {"role": "assistant", "content": "yes"}], "tools": [ADD], "system": "S"}
    counted = DIALECT.parse_count(json.dumps(body).encode())
    assert counted.messages == (Message("system", "S"), Message("user", "hi"), Message("assistant", "yes"))
    assert counted.tools == (CHAT_ADD,)
    assert MessageTokensCount.model_validate_json(DIALECT.count(21)).input_tokens == 21


KEYS = ["type", "text", "role", "content", "name", "input", "id", "input_schema", "edits", "format", "schema"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(0, 2)
    | st.sampled_from(["", "a", "user", "text", "any"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)

BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])},
    optional={name: JSON for name in ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error")},
)
ENTRIES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.lists(BLOCKS, max_size=3) | JSON}
)
FIELDS = [
    *("system", "tools", "tool_choice", "model", "max_tokens", "temperature", "top_k", "stop_sequences", "thinking"),
    *("output_config", "context_management", "stream", "metadata", "mcp_servers", "diagnostics", "speed", "unknown"),
]


@given(st.lists(ENTRIES, max_size=3) | JSON, st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_any_request_is_understood_or_refused(entries, more):
    body = json.dumps({"max_tokens": 9, "messages": entries, **more}).encode()
    for read in (DIALECT.parse, DIALECT.parse_count):
        with contextlib.suppress(errors.RequestError):
            assert read(body).messages


def test_arguments_nested_deeper_than_can_be_written_are_refused():
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {"a": deep}
    with pytest.raises(errors.InvalidRequest, match="nested too deeply"):
        messages(HI, assistant(called("x", **deep)), HI)


# --- answers ----------------------------------------------------------------------------------------------------


def test_a_whole_answer():
    deltas = [Delta(reasoning="Sum."), Delta("So"), Delta(call=CALL), Delta(call=ToolCall("add", ""))]
    body = json.loads(DIALECT.answer(head(), [answer_of(deltas)]))
    assert declared(anthropic.types.Message.model_validate(body))
    signature = body["content"][0].pop("signature")
    assert signature
    assert body == {
        "id": f"msg_{GENERATION}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Sum."},
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "toolu_0123456789abcdef01230000", "name": "add", "input": {"a": 7, "b": 41}},
            {"type": "tool_use", "id": "toolu_0123456789abcdef01230001", "name": "add", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 21,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
    }


def test_thinking_tokens_are_told_in_both_modes():
    answer = dataclasses.replace(answer_of([Delta(reasoning="Sum")]), reasoning_tokens=4)
    writer = DIALECT.stream(head())
    data = writer.opening() + writer.delta(0, Delta(reasoning="Sum"), ()) + writer.finish(answer) + writer.closing()
    whole = anthropic.types.Message.model_validate_json(DIALECT.answer(head(), [answer]))
    for message in (whole, read_by_client(data)):
        assert (message.usage.output_tokens, message.usage.output_tokens_details.thinking_tokens) == (6, 4)


def test_numbers_in_arguments_are_the_model_s_own_digits():
    call = ToolCall("add", '{"a": 12345678901234567890123, "b": 1.10}')
    assert b'"input":{"a": 12345678901234567890123, "b": 1.10}' in DIALECT.answer(
        head(), [answer_of([Delta(call=call)])]
    )


def test_a_stream_of_text():
    data = written([Delta("Hel"), Delta("lo")])
    name, start = events(data)[0]
    assert (name, start["type"]) == ("message_start", "message_start")
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 21
    assert brief(data) == [
        ("start", 0, {"type": "text", "text": ""}),
        ("delta", 0, {"type": "text_delta", "text": "Hel"}),
        ("delta", 0, {"type": "text_delta", "text": "lo"}),
        ("stop", 0),
        ("message_delta", {"stop_reason": "end_turn", "stop_sequence": None}, {"output_tokens": 6}),
        ("message_stop",),
    ]


def test_a_stream_of_thinking_text_and_parallel_calls():
    data = written([Delta(reasoning="S"), Delta(reasoning="um"), Delta("So"), Delta(call=CALL), Delta(call=CALL)])
    tool = {"type": "tool_use", "name": "add", "input": {}}
    arguments = {"type": "input_json_delta", "partial_json": '{"a": 7, "b": 41}'}
    signature = brief(data)[3][2]["signature"]
    assert signature
    assert brief(data) == [
        ("start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("delta", 0, {"type": "thinking_delta", "thinking": "S"}),
        ("delta", 0, {"type": "thinking_delta", "thinking": "um"}),
        ("delta", 0, {"type": "signature_delta", "signature": signature}),
        ("stop", 0),
        ("start", 1, {"type": "text", "text": ""}),
        ("delta", 1, {"type": "text_delta", "text": "So"}),
        ("stop", 1),
        ("start", 2, {**tool, "id": "toolu_0123456789abcdef01230000"}),
        ("delta", 2, arguments),
        ("stop", 2),
        ("start", 3, {**tool, "id": "toolu_0123456789abcdef01230001"}),
        ("delta", 3, arguments),
        ("stop", 3),
        ("message_delta", {"stop_reason": "tool_use", "stop_sequence": None}, {"output_tokens": 6}),
        ("message_stop",),
    ]


def test_17_18_a_call_alone_is_block_0_with_its_arguments_in_a_delta():
    assert brief(written([Delta(call=ToolCall("add", '{"a":1}'))]))[:4] == [
        ("start", 0, {"type": "tool_use", "id": "toolu_0123456789abcdef01230000", "name": "add", "input": {}}),
        ("delta", 0, {"type": "input_json_delta", "partial_json": '{"a":1}'}),
        ("stop", 0),
        ("message_delta", {"stop_reason": "tool_use", "stop_sequence": None}, {"output_tokens": 6}),
    ]


def test_18_nothing_generated_is_no_block():
    assert [event[0] for event in brief(written([]))] == ["message_delta", "message_stop"]
    assert json.loads(DIALECT.answer(head(), [answer_of([])]))["content"] == []


@pytest.mark.parametrize(
    ("deltas", "reason", "stop_string", "expected"),
    [
        ([Delta("Hi")], "stop", None, ("end_turn", None)),
        ([Delta("Hi")], "length", None, ("max_tokens", None)),
        ([Delta("Hi")], "stop", "END", ("stop_sequence", "END")),
        ([Delta(call=CALL)], "stop", None, ("tool_use", None)),
        ([Delta(call=CALL)], "length", None, ("max_tokens", None)),
    ],
)
def test_stop_reasons(deltas, reason, stop_string, expected):
    ending = {"reason": reason, "stop_string": stop_string}
    whole = json.loads(DIALECT.answer(head(), [answer_of(deltas, **ending)]))
    streamed = read_by_client(written(deltas, **ending))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert (streamed.stop_reason, streamed.stop_sequence) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thinking_is_an_empty_block_that_is_signed(stream):
    asked = {"labels": {"thinking": {"type": "adaptive", "display": "omitted"}}}
    deltas = [Delta(reasoning="Su"), Delta(reasoning="m"), Delta("So")]
    if stream:
        data = written(deltas, asked)
        assert b"thinking_delta" not in data
        content = [block.model_dump() for block in read_by_client(data).content]
    else:
        content = json.loads(DIALECT.answer(head(**asked), [answer_of(deltas)]))["content"]
    assert (content[0]["thinking"], content[1]["text"]) == ("", "So")
    assert content[0]["signature"]
    assert messages(HI, {"role": "assistant", "content": content}, HI)[1] == Message("assistant", "So")


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
CALLS = st.builds(ToolCall, st.just("add"), st.dictionaries(WORDS, st.integers() | WORDS, max_size=3).map(json.dumps))
PIECES = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning"]), WORDS) | st.tuples(st.just("call"), CALLS), max_size=5
)


@given(PIECES, st.integers(1, 12))
def test_any_chunking_gives_the_same_final_message_and_every_event_is_of_the_vendor_s_types(pieces, size):
    whole = [Delta(**{kind: value}) for kind, value in pieces]
    chunked = [
        Delta(**{kind: part})
        for kind, value in pieces
        for part in ([value] if kind == "call" else [value[i : i + size] for i in range(0, len(value), size)])
    ]
    for _, event in events(written(chunked)):
        assert declared(EVENT.validate_python(event))
        assert "" not in event.get("delta", {}).values()
    final = read_by_client(written(chunked))
    assert final == read_by_client(written(whole))
    assert "".join(block.text for block in final.content if block.type == "text") == "".join(d.text for d in whole)
    assert [block.input for block in final.content if block.type == "tool_use"] == [
        json.loads(delta.call.arguments) for delta in whole if delta.call
    ]


@given(PIECES)
def test_an_answer_sent_back_is_the_message_that_was_recorded(pieces):
    deltas = [Delta(**{kind: value}) for kind, value in pieces]
    recorded = answer_of(deltas).message
    streamed = [block.model_dump(mode="json") for block in read_by_client(written(deltas)).content]
    for content in (streamed, json.loads(DIALECT.answer(head(), [answer_of(deltas)]))["content"]):
        sent = messages(HI, {"role": "assistant", "content": content}, HI)[1]
        assert extend_digest(b"", sent) == extend_digest(b"", recorded)


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidRequest("x"), 400, "invalid_request_error"),
        (errors.UnsupportedParameter("x", param="n"), 400, "invalid_request_error"),
        (errors.LimitReached("x"), 400, "invalid_request_error"),
        (errors.EngineRejected("x"), 400, "invalid_request_error"),
        (errors.AuthenticationFailed("x"), 401, "authentication_error"),
        (errors.SessionClosed("x"), 403, "permission_error"),
        (errors.NotFoundError("x"), 404, "not_found_error"),
        (errors.DeadlineError("x"), 504, "timeout_error"),
        (errors.StorageError("x"), 500, "api_error"),
        (RuntimeError("x"), 500, "api_error"),
    ],
)
def test_errors_are_the_vendor_s(error, status, kind):
    reply = DIALECT.error(error)
    assert reply.status == status
    assert json.loads(reply.body) == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": None}
    assert declared(ErrorResponse.model_validate_json(reply.body))


def test_30_too_long_a_prompt_is_told_in_the_vendor_s_words():
    def told(error):
        reply = DIALECT.error(error)
        return reply.status, json.loads(reply.body)["error"]

    kind = "invalid_request_error"
    sizes = errors.ContextLengthExceeded("too many", tokens=61709, limit=32768)
    assert told(sizes) == (400, {"type": kind, "message": "prompt is too long: 61709 tokens > 32768 maximum"})
    unknown = errors.ContextLengthExceeded("the engine says no")
    assert told(unknown) == (400, {"type": kind, "message": "prompt is too long: the engine says no"})


def test_pings_are_skipped_and_a_failure_in_the_stream_is_raised_by_the_client():
    writer = DIALECT.stream(head())
    begun = DIALECT.keep_alive + writer.opening() + DIALECT.keep_alive + writer.delta(0, Delta("He"), ())
    assert events(begun)[0] == ("ping", {"type": "ping"})
    with pytest.raises(anthropic.APIStatusError, match="engine is gone") as failure:
        read_by_client(begun + writer.failure(errors.StorageError("engine is gone")))
    assert failure.value.body["error"]["type"] == "api_error"
    assert read_by_client(DIALECT.keep_alive + written([Delta("He")])).content[0].text == "He"
