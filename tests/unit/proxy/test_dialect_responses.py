"""The Responses dialect: items in, items and events out; everything it writes fits the types of OpenAI's SDK."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from proxy.dialects.base import AnswerHead, ChoiceAnswer, TokenInfo, ToolChoice
from proxy.dialects.responses import ResponsesDialect
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import Message, ToolCall
from storage import errors

DIALECT = ResponsesDialect()
GENERATION = "0123456789abcdef0123456789abcdef"
EVENT = TypeAdapter(ResponseStreamEvent)
USER = Message("user", "hi")
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}


def parse(**data):
    return DIALECT.parse(json.dumps({"model": "m", "input": "hi", **data}).encode())


def read(*items):
    return parse(input=list(items)).messages


def answer_of(message, finish="stop", tokens=None, thought=0):
    return ChoiceAnswer(0, GENERATION, message, finish, None, 7, tokens, thought)


def head_of(request):
    return AnswerHead(GENERATION, 1700000000, "toy", 5, request)


def whole(answer, **asked):
    """The answer object."""
    data = json.loads(DIALECT.answer(head_of(parse(**asked)), [answer]))
    Response.model_validate(data)
    return data


def events_of(data):
    """Events of a stream; each fits the SDK's types, and their numbers count up from zero."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        kind, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def streamed(deltas, finish="stop", failure=None, tokens=(), rest=(), **asked):
    """Events of an answer made of `deltas`; `tokens` come with them one by one, `rest` at the end."""
    writer = DIALECT.stream(head_of(parse(**asked)))
    data = writer.opening()
    for index, delta in enumerate(deltas):
        data += writer.delta(0, delta, tokens[index : index + 1])
    if failure is not None:
        return events_of(data + writer.failure(failure))
    return events_of(data + writer.finish(answer_of(Message("assistant"), finish, tuple(rest))) + writer.closing())


def text(value):
    return Delta(text=value)


def thought(value):
    return Delta(reasoning=value)


def call(name, arguments):
    return Delta(call=ToolCall(name, arguments))


def short(events):
    return [event["type"].removeprefix("response.") for event in events]


# Requests


def test_a_string_is_the_user_s_message():
    assert parse().messages == (USER,)


def test_items_of_one_answer_are_one_message_again():
    messages = read(
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Adding.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'say "x"'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"role": "assistant", "content": "ok"},
    )
    calls = (ToolCall("add", '{"a":1}'), ToolCall("patch", r'{"input":"say \"x\""}'))
    assert messages == (
        Message("system", "Be brief."),
        USER,
        Message("assistant", "Adding.", "Hm.", calls),
        Message("tool", "1"),
        Message("tool", "done"),
        Message("assistant", "ok"),
    )


def test_results_that_come_in_another_order_are_put_in_the_order_of_our_calls():
    ids = [
        item["call_id"]
        for item in whole(answer_of(Message("assistant", tool_calls=(ToolCall("add", "{}"),) * 2)))["output"]
    ]
    results = [{"type": "function_call_output", "call_id": ids[at], "output": f"result {at}"} for at in (1, 0)]
    assert [message.content for message in read(*results)] == ["result 0", "result 1"]
    for result, foreign in zip(results, ("z", "a"), strict=True):
        result["call_id"] = foreign
    assert [message.content for message in read(*results)] == ["result 1", "result 0"]


def test_instructions_are_a_first_message_that_belongs_to_this_request_only():
    request = parse(instructions="Be brief.")
    assert request.messages == (Message("system", "Be brief."), USER)
    assert request.instructions
    assert not parse().instructions


def test_80_reasoning_is_read_from_what_we_sealed_or_from_its_text_or_from_a_summary():
    sealed = whole(answer_of(Message("assistant", "x", "Hm.")), include=["reasoning.encrypted_content"])["output"][0]
    assert sealed["encrypted_content"]
    forms = (
        {**sealed, "content": None},
        {**sealed, "encrypted_content": None},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    )
    for form in forms:
        assert read(form, {"role": "assistant", "content": "x"}) == (Message("assistant", "x", "Hm."),)
    assert read({"type": "reasoning", "summary": []}) == (Message("assistant"),)


@pytest.mark.parametrize(
    "value",
    ["gAAAAABo", "!", 7, "é", base64.b64encode(b"[1]").decode(), base64.b64encode(b'["other","text"]').decode(), "[]"],
)
def test_sealed_reasoning_of_another_server_is_refused(value):
    with pytest.raises(errors.InvalidRequest) as caught:
        read({"type": "reasoning", "summary": [], "encrypted_content": value})
    assert caught.value.param == "input[0].encrypted_content"


def test_function_tools_get_the_chat_form_and_custom_tools_are_functions_of_one_string():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = parse(tools=[ADD, PATCH, {"type": "custom", "name": "raw", "format": grammar}]).tools
    assert [tool["type"] for tool in tools] == ["function"] * 3
    add, patch, raw = (tool["function"] for tool in tools)
    assert add == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert patch == {"name": "patch", "description": "Edits.", "parameters": schema}
    assert raw["description"] == "The input must match this lark grammar:\nstart: /a/"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "add"}, ToolChoice("named", "add")),
        ({"type": "custom", "name": "patch"}, ToolChoice("named", "patch")),
    ],
)
def test_tool_choices(choice, expected):
    request = parse(tools=[ADD, PATCH], tool_choice=choice)
    assert request.tool_choice == expected
    assert json.loads(DIALECT.answer(head_of(request), [answer_of(USER)]))["tool_choice"] == (choice or "auto")


def test_parameters_reach_the_turn():
    request = parse(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        parallel_tool_calls=False,
        top_logprobs=3,
        stream=True,
        stream_options={"include_obfuscation": False},
        store=False,
        previous_response_id="resp_g1",
        metadata={"k": "v"},
        prompt_cache_key="p",
    )
    assert (request.max_tokens, request.temperature, request.top_p, request.parallel_tool_calls) == (9, 0.5, 0.9, False)
    assert (request.logprobs, request.top_logprobs, request.stream, request.store) == (True, 3, True, False)
    assert (request.previous, request.model) == ("g1", "m")
    assert request.labels == {"metadata": {"k": "v"}, "prompt_cache_key": "p"}
    assert parse().store
    assert parse(include=["message.output_text.logprobs"]).logprobs


@pytest.mark.parametrize(("effort", "thinking"), [(None, None), ("none", False), ("minimal", False), ("high", None)])
def test_of_the_reasoning_effort_only_off_counts(effort, thinking):
    assert parse(reasoning={"effort": effort, "summary": "auto"}).thinking is thinking


def test_text_formats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert parse(text={"format": {"type": "text"}, "verbosity": "medium"}).json_schema is None
    assert parse(text={"format": {"type": "json_object"}}).json_schema == {"type": "object"}
    form = {"type": "json_schema", "name": "out", "schema": schema, "strict": True}
    assert parse(text={"format": form}).json_schema == schema
    assert whole(answer_of(USER), text={"format": form})["text"]["format"] == form


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        *(({name: value}, name) for name, value in (("background", True), ("truncation", "auto"), ("seed", 1))),
        *(({name: value}, name) for name, value in (("conversation", "c"), ("prompt", {"id": "p"}), ("stop", "x"))),
        *(({name: value}, name) for name, value in (("max_tool_calls", 3), ("service_tier", "priority"))),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "sub"}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [ADD]}, "tool_choice"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**ADD, "parameters": []}]}, "tools[0].parameters"),
        *(
            ({"tools": [{"type": kind}]}, "tools[0]")
            for kind in ("web_search", "file_search", "code_interpreter", "computer_use_preview", "mcp", "local_shell")
        ),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked, param):
    with pytest.raises(errors.RequestError) as caught:
        parse(**asked)
    assert caught.value.param == param
    reply = DIALECT.error(caught.value)
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["param"] == param


def test_neutral_values_are_taken():
    parse(background=False, truncation="disabled", service_tier="auto", conversation=None, tools=[], include=[])


@pytest.mark.parametrize("value", ["g1", "resp_", ""])
def test_51_an_id_that_cannot_be_ours_is_not_found(value):
    with pytest.raises(errors.PreviousResponseNotFound):
        parse(previous_response_id=value)


# Errors


def test_51_an_unknown_previous_response_is_404_in_openai_s_shape():
    status, body = DIALECT.error(errors.PreviousResponseNotFound("there is no response 'resp_x'"))
    detail = json.loads(body)["error"]
    assert (status, detail["code"], detail["param"]) == (404, "previous_response_not_found", "previous_response_id")
    assert detail["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (errors.ContextLengthExceeded("too long"), "input"),
        (errors.UnsupportedParameter("no grammar", param="response_format"), "text.format"),
        (errors.InvalidRequest("no", param="max_tokens"), "max_output_tokens"),
    ],
)
def test_the_core_s_parameters_get_this_api_s_names(error, param):
    assert json.loads(DIALECT.error(error).body)["error"]["param"] == param


# Answers


def test_a_text_answer_and_its_parameters():
    asked = {"instructions": "Be brief.", "metadata": {"k": "v"}, "tools": [ADD], "previous_response_id": "resp_g0"}
    data = whole(answer_of(Message("assistant", "ok")), max_output_tokens=9, temperature=0.5, **asked)
    assert (data["id"], data["object"], data["created_at"]) == (f"resp_{GENERATION}", "response", 1700000000)
    assert (data["status"], data["incomplete_details"], data["error"], data["model"]) == (
        "completed",
        None,
        None,
        "toy",
    )
    assert data["output"] == [
        {
            "id": "msg_0123456789abcdef01230000",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}],
        }
    ]
    details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    details["output_tokens_details"] = {"reasoning_tokens": 0}
    assert data["usage"] == {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12, **details}
    assert data["tools"] == [{**ADD, "strict": False}]
    assert (data["instructions"], data["metadata"], data["previous_response_id"]) == (
        "Be brief.",
        {"k": "v"},
        "resp_g0",
    )
    assert (data["max_output_tokens"], data["temperature"], data["store"]) == (9, 0.5, True)


def test_an_answer_of_reasoning_text_and_calls_is_four_items():
    calls = (ToolCall("add", '{"a": 1}'), ToolCall("patch", '{"input": "x"}'))
    data = whole(answer_of(Message("assistant", "ok", "Hm.", calls), "tool_calls"), tools=[ADD, PATCH])
    assert [item["type"] for item in data["output"]] == ["reasoning", "message", "function_call", "custom_tool_call"]
    reasoning, _, add, patch = data["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert "encrypted_content" not in reasoning
    assert (add["call_id"], add["name"], add["arguments"]) == ("call_0123456789abcdef01230000", "add", '{"a": 1}')
    assert (patch["call_id"], patch["name"], patch["input"]) == ("call_0123456789abcdef01230001", "patch", "x")


@pytest.mark.parametrize("arguments", ['{"input": 1}', '{"input": "x", "y": 1}', "{}", "no json", "[]"])
def test_a_custom_call_of_another_form_stays_the_function_call_that_the_model_wrote(arguments):
    message = Message("assistant", tool_calls=(ToolCall("patch", arguments),))
    (item,) = whole(answer_of(message, "tool_calls"), tools=[PATCH])["output"]
    assert (item["type"], item["arguments"]) == ("function_call", arguments)
    assert read(item) == (message,)


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item():
    data = whole(answer_of(Message("assistant", "o", "Hm."), "length"))
    assert (data["status"], data["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in data["output"]] == ["completed", "incomplete"]
    calls = whole(answer_of(Message("assistant", "o", tool_calls=(ToolCall("add", "{}"),)), "length"))
    assert [item["status"] for item in calls["output"]] == ["completed", "completed"]


def test_an_empty_answer_is_an_empty_message():
    (item,) = whole(answer_of(Message("assistant")))["output"]
    assert item["content"][0]["text"] == ""


def test_log_probabilities_belong_to_the_text_only():
    written = ["<think>", "a", "b", "</think>", "a", "b", "<call>"]
    tokens = tuple(TokenInfo(each, -0.5, (("z", -1.0),)) for each in written)
    plain = whole(answer_of(Message("assistant", "ab"), tokens=tokens[4:6]), top_logprobs=1)
    message = Message("assistant", "ab", "ab", (ToolCall("add", "{}"),))
    mixed = whole(answer_of(message, tokens=tokens, thought=3), top_logprobs=1)
    assert mixed["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    expected = [
        {
            **{"token": each, "logprob": -0.5, "bytes": list(each.encode())},
            "top_logprobs": [{"token": "z", "logprob": -1.0, "bytes": [122]}],
        }
        for each in "ab"
    ]
    assert plain["output"][0]["content"][0]["logprobs"] == expected
    assert mixed["output"][1]["content"][0]["logprobs"] == expected


# Streams

ITEM = ["output_item.added", "content_part.added"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]


def test_the_events_of_a_text_answer():
    events = streamed([text("o"), text("k")])
    deltas = ["output_text.delta"] * 2
    assert short(events) == ["created", "in_progress", *ITEM, *deltas, *TEXT_END, "completed"]
    assert [event["delta"] for event in events if event["type"].endswith("delta")] == ["o", "k"]
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    assert (events[2]["item"]["status"], events[2]["item"]["content"]) == ("in_progress", [])
    assert events[3]["part"]["text"] == ""
    assert events[6]["text"] == events[7]["part"]["text"] == events[8]["item"]["content"][0]["text"] == "ok"
    assert events[-1]["response"] == whole(answer_of(Message("assistant", "ok")))


def test_the_events_of_reasoning_text_and_calls():
    deltas = [thought("H"), thought("m"), text("ok"), call("add", '{"a": 1}'), call("patch", '{"input": "x"}')]
    events = streamed(deltas, "tool_calls", tools=[ADD, PATCH], include=["reasoning.encrypted_content"])
    assert short(events) == [
        *("created", "in_progress", *ITEM, "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *(*ITEM, "output_text.delta", *TEXT_END),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    assert [e["output_index"] for e in events if e["type"].endswith("item.done")] == [0, 1, 2, 3]
    added = [e["item"] for e in events if e["type"].endswith("item.added")]
    assert (added[0]["encrypted_content"], added[2]["arguments"], added[3]["input"]) == (None, "", "")
    done = [e["item"] for e in events if e["type"].endswith("item.done")]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    message = Message("assistant", "ok", "Hm", (ToolCall("add", '{"a": 1}'), ToolCall("patch", '{"input": "x"}')))
    asked = {"tools": [ADD, PATCH], "include": ["reasoning.encrypted_content"]}
    assert events[-1]["response"] == whole(answer_of(message, "tool_calls"), **asked)
    assert done == events[-1]["response"]["output"]


def test_a_stream_that_was_cut_ends_with_incomplete():
    events = streamed([thought("Hm")], "length")
    assert short(events)[-2:] == ["output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"] == whole(answer_of(Message("assistant", "", "Hm"), "length"))


def test_a_stream_without_deltas_is_an_empty_message():
    events = streamed([])
    assert short(events) == ["created", "in_progress", *ITEM, *TEXT_END, "completed"]
    assert events[-1]["response"] == whole(answer_of(Message("assistant")))


def test_log_probabilities_come_with_the_text_and_again_at_its_end():
    tokens = [TokenInfo(each, -0.5) for each in ("t", "o", "k", "!")]
    events = streamed([thought("t"), text("o"), text("k")], tokens=tokens[:3], rest=tokens[3:], top_logprobs=1)
    told = [[entry["token"] for entry in event["logprobs"]] for event in events if "logprobs" in event]
    assert told == [["o"], ["k"], ["o", "k", "!"]]
    assert [entry["token"] for entry in events[-1]["response"]["output"][1]["content"][0]["logprobs"]] == [
        "o",
        "k",
        "!",
    ]


def test_a_failure_is_an_error_that_the_sdk_raises_and_a_failed_response():
    events = streamed([text("o"), call("add", "{}"), text("k")], failure=errors.DeadlineError("no engine"))
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "deadline", "no engine")
    assert error["error"]["type"] == "server_error"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "no engine"}
    assert [item["status"] for item in failed["response"]["output"]] == ["completed", "completed", "incomplete"]
    assert streamed([], failure=errors.SessionClosed("over"))[-1]["response"]["error"]["code"] == "invalid_prompt"


# Properties

PIECES = st.one_of(
    st.builds(text, st.text(min_size=1)),
    st.builds(thought, st.text(min_size=1)),
    st.builds(call, st.sampled_from(["add", "patch"]), st.sampled_from(['{"a": 1}', '{"input": "x"}', "no json"])),
)


def split(deltas, cuts):
    """The same answer in smaller deltas."""
    for delta, cut in zip(deltas, cuts, strict=True):
        for part in (delta.text[:cut], delta.text[cut:]):
            if part:
                yield text(part)
        for part in (delta.reasoning[:cut], delta.reasoning[cut:]):
            if part:
                yield thought(part)
        if delta.call:
            yield delta


def accumulated(events):
    """The output that a client puts together from deltas alone."""
    items = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[event["output_index"]] = {**event["item"], "written": ""}
        elif kind.endswith(".delta"):
            items[event["output_index"]]["written"] += event["delta"]
    return [(item["type"], item["id"], item["written"]) for _, item in sorted(items.items())]


def written(item):
    return (item.get("arguments") or item.get("input")) if "call_id" in item else item["content"][0]["text"]


@settings(max_examples=150)
@given(st.data(), st.lists(PIECES, max_size=8), st.booleans())
def test_any_chunking_gives_the_same_response_and_it_replays_to_the_answer(data, deltas, sealed):
    asked = {"tools": [ADD, PATCH], "include": ["reasoning.encrypted_content"] if sealed else []}
    cuts = data.draw(st.lists(st.integers(0, 5), min_size=len(deltas), max_size=len(deltas)))
    events = streamed(list(split(deltas, cuts)), **asked)
    final = events[-1]["response"]
    Response.model_validate(final)
    assert final == streamed(deltas, **asked)[-1]["response"]
    assert accumulated(events) == [(item["type"], item["id"], written(item)) for item in final["output"]]
    (replayed,) = read(*final["output"])
    assert replayed.digest_input() == joined(deltas).digest_input()
    (from_whole,) = read(*whole(answer_of(joined(deltas)), **asked)["output"])
    assert from_whole.digest_input() == replayed.digest_input()


def joined(deltas):
    """The canonical message that the core makes of `deltas`."""
    calls = tuple(delta.call for delta in deltas if delta.call)
    return Message("assistant", "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls)


WORDS = st.sampled_from(
    [
        *(
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "user",
            "assistant",
            "auto",
        ),
        *("required", "function", "custom", "json_schema", "input_text", "output_text", "reasoning_text", "name", "x"),
    ]
)
KEYS = st.sampled_from(
    [
        *("type", "role", "content", "name", "arguments", "input", "call_id", "output", "summary", "encrypted_content"),
        *("text", "format", "schema", "effort", "verbosity", "parameters", "description", "syntax", "definition", "x"),
    ]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), WORDS)
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5))
)
NAMES = st.sampled_from(
    [
        *(
            "input",
            "instructions",
            "tools",
            "tool_choice",
            "text",
            "reasoning",
            "include",
            "top_logprobs",
            "store",
            "model",
        ),
        *(
            "stream",
            "stream_options",
            "previous_response_id",
            "metadata",
            "temperature",
            "max_output_tokens",
            "background",
        ),
    ]
)


@settings(max_examples=400)
@given(st.dictionaries(NAMES, VALUES, max_size=4), st.lists(st.dictionaries(KEYS, VALUES, max_size=5), max_size=3))
def test_any_json_object_is_a_turn_or_a_refusal(data, items):
    body = json.dumps({"input": items or "hi", **data}).encode()
    try:
        request = DIALECT.parse(body)
    except errors.RequestError:
        return
    assert request.messages
    json.loads(DIALECT.answer(head_of(request), [answer_of(USER)]))
