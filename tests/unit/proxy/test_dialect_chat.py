"""OpenAI's chat API in canonical form and back; the clients' side is in tests/scenarios."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.base import AnswerHead, ChoiceAnswer, TokenInfo, ToolChoice, TurnRequest
from proxy.dialects.chat import ChatDialect
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import Message, ToolCall
from storage import errors

DIALECT = ChatDialect()
USER = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def parse(**data: Any) -> TurnRequest:
    return DIALECT.parse(json.dumps({"messages": [USER], **data}).encode())


def head(**asked: Any) -> AnswerHead:
    request = parse(**asked)
    return AnswerHead("g0", 7, "m", 5, request, tuple(f"g{index}" for index in range(request.n)))


def answer(
    index: int = 0, *calls: ToolCall, text: str = "", tokens: tuple[TokenInfo, ...] | None = None
) -> ChoiceAnswer:
    message = Message("assistant", text, tool_calls=calls)
    return ChoiceAnswer(index, f"g{index}", message, "tool_calls" if calls else "stop", None, 3, tokens)


def chunks(data: bytes) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def call(identity: str, name: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_results_of_parallel_calls_are_read_in_the_order_of_the_calls():
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "add"), call("c2", "mul")]},
        {"role": "tool", "tool_call_id": "c2", "content": "second"},
        {"role": "tool", "tool_call_id": "c1", "content": "first"},
        {"role": "user", "content": "go on"},
    ]
    assert [message.content for message in parse(messages=history).messages[2:]] == ["first", "second", "go on"]


def test_results_without_a_known_call_stay_where_they_are():
    history = [USER, {"role": "tool", "content": "b"}, {"role": "tool", "tool_call_id": "x", "content": "a"}]
    assert [message.content for message in parse(messages=history).messages[1:]] == ["b", "a"]


def test_case_44_the_changing_billing_line_of_claude_code_is_no_part_of_the_system_message():
    def system(nonce: str) -> tuple[Message, ...]:
        text = f"x-anthropic-billing-header: v=1; cch={nonce}\nBe brief."
        return parse(messages=[{"role": "system", "content": text}, USER]).messages

    assert system("aa1") == system("bb2")
    assert system("aa1")[0].content == "Be brief."


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "add"}}, ToolChoice("named", "add")),
    ],
)
def test_every_tool_choice_is_read(asked, choice):
    assert parse(tools=[ADD], tool_choice=asked).tool_choice == choice


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_a_wrong_value_is_refused_and_named(data, param):
    with pytest.raises(errors.RequestError) as refused:
        parse(**data)
    assert refused.value.param == param


def test_a_body_that_is_nested_too_deeply_to_be_kept_is_refused():
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(errors.InvalidRequest, match="nested too deeply"):
        parse(metadata={"a": deep})


@pytest.mark.parametrize(
    ("asked", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, None),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
    ],
)
def test_thinking_is_switched_by_the_template_s_own_variable_or_by_no_effort_at_all(asked, thinking):
    assert parse(**asked).thinking is thinking


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"type": "function", "function": {"name": "add"}}, "stop")],
)
def test_case_49_a_call_that_was_named_ends_with_stop_any_other_with_tool_calls(choice, reason, stream):
    top = head(tools=[ADD], tool_choice=choice, stream=stream)
    done = answer(0, ToolCall("add", "{}"))
    if stream:
        writer = DIALECT.stream(top)
        events = chunks(writer.opening() + writer.finish(done) + writer.closing())
        assert events[-1]["choices"][0]["finish_reason"] == reason
    else:
        assert json.loads(DIALECT.answer(top, [done]))["choices"][0]["finish_reason"] == reason


def test_choices_of_one_stream_keep_apart_and_their_usage_adds_up():
    top = head(n=2, stream=True, stream_options={"include_usage": True})
    writer = DIALECT.stream(top)
    data = writer.opening()
    data += writer.delta(1, Delta(text="b", tokens=1), ()) + writer.delta(0, Delta(call=ToolCall("add", "{}")), ())
    data += writer.finish(answer(1, text="b")) + writer.finish(answer(0, ToolCall("add", "{}"))) + writer.closing()
    events = chunks(data)
    assert [event["choices"][0]["index"] for event in events[:-1]] == [0, 1, 1, 0, 1, 0]
    assert events[3]["choices"][0]["delta"]["tool_calls"][0]["id"] == "call_g00000"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 4 + ["stop", "tool_calls"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


def test_likeliest_tokens_stand_beside_the_chosen_one():
    tokens = (TokenInfo("a", -0.5, (("a", -0.5), ("b", -1.0))),)
    body = json.loads(DIALECT.answer(head(logprobs=True, top_logprobs=2), [answer(text="a", tokens=tokens)]))
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("a", -0.5), ("b", -1.0)]


def test_reasoning_is_shown_under_its_own_name_and_read_back_under_either():
    shown = json.loads(
        DIALECT.answer(head(), [ChoiceAnswer(0, "g0", Message("assistant", "4", "2+2"), "stop", None, 3)])
    )
    message = shown["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("4", "2+2")
    for name in ("reasoning_content", "reasoning"):
        back = parse(messages=[USER, {"role": "assistant", "content": "4", name: "2+2"}]).messages[1]
        assert back == Message("assistant", "4", "2+2")
