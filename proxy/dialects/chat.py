"""OpenAI's ``/v1/chat/completions``.

Parameters that have an effect we do not implement are refused by name; a value
that asks for nothing (``modalities=["text"]``) is accepted. Of ``max_tokens``
and ``max_completion_tokens`` the smaller one counts. Reasoning is shown as
``reasoning_content`` and read back under that name or ``reasoning``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.dialects import fields
from proxy.dialects.base import AnswerHead, ChoiceAnswer, ErrorReply, TokenInfo, ToolChoice, TurnRequest, call_id
from proxy.dialects.chat_messages import read_messages, read_tools
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import Message, ToolCall
from storage import errors

MAX_CHOICES = 128
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
_READ = frozenset(
    (
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "model", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "n"),
        *(
            "response_format",
            "chat_template_kwargs",
            "reasoning_effort",
            "stream",
            "stream_options",
            "logprobs",
            "top_logprobs",
        ),
    )
)


class ChatDialect:
    """See the module; implements :class:`~proxy.dialects.base.Dialect`."""

    keep_alive = b": keep-alive\n\n"

    def parse(self, body: bytes) -> TurnRequest:
        data = fields.read_object(body)
        labels = fields.check_parameters(data, read=_READ, labels=_LABELS, neutral=_NEUTRAL)
        tools = read_tools(data.get("tools"))
        limits = [fields.positive(data, name) for name in ("max_tokens", "max_completion_tokens")]
        stream = bool(fields.optional(data, "stream", bool))
        return TurnRequest(
            messages=read_messages(data.get("messages")),
            tools=tools,
            tool_choice=read_tool_choice(data.get("tool_choice"), tools),
            parallel_tool_calls=fields.optional(data, "parallel_tool_calls", bool) is not False,
            model=fields.optional(data, "model", str) or "",
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            temperature=fields.number(data, "temperature", 0.0, 2.0),
            top_p=fields.number(data, "top_p", 0.0, 1.0),
            top_k=fields.positive(data, "top_k"),
            presence_penalty=fields.number(data, "presence_penalty", -2.0, 2.0) or 0.0,
            frequency_penalty=fields.number(data, "frequency_penalty", -2.0, 2.0) or 0.0,
            logit_bias=logit_bias(data.get("logit_bias")),
            seed=fields.seed_of(data),
            stop=fields.stops(data.get("stop")),
            n=fields.positive(data, "n", most=MAX_CHOICES) or 1,
            json_schema=read_format(data.get("response_format"), "response_format"),
            thinking=_thinking(data),
            stream=stream,
            include_usage=include_usage(fields.optional(data, "stream_options", dict) or {}, stream=stream),
            labels=labels,
            **_logprobs(data),
        )

    def answer(self, head: AnswerHead, choices: Sequence[ChoiceAnswer]) -> bytes:
        return orjson.dumps(
            {
                "id": _id(head),
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "choices": [_choice(choice, head) for choice in choices],
                "usage": usage(head, choices),
            }
        )

    def stream(self, head: AnswerHead) -> ChatStream:
        return ChatStream(head)

    def error(self, error: Exception) -> ErrorReply:
        return ErrorReply(*fields.openai_error(error))


class ChatStream:
    """Server-sent events of one answer; ``finish_reason`` is null on every chunk of a choice but its last."""

    def __init__(self, head: AnswerHead) -> None:
        common = {"id": _id(head), "object": "chat.completion.chunk", "created": head.created, "model": head.model}
        self._common = orjson.dumps(common)[:-1]
        null_usage = b',"usage":null' if head.request.include_usage else b""
        self._head = head
        start = b"data: " + self._common + null_usage + b',"choices":[{"index":'
        self._before = [start + str(index).encode() + b',"delta":' for index in range(head.request.n)]
        self._calls = [0] * head.request.n
        self._done: list[ChoiceAnswer] = []

    def opening(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first) for index in range(self._head.request.n))

    def delta(self, choice: int, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes:
        if delta.call is not None:
            index = self._calls[choice]
            self._calls[choice] += 1
            call = {"index": index, **_call(delta.call, self._head.generation(choice), index)}
            return self._chunk(choice, {"tool_calls": [call]}, tokens)
        if delta.reasoning:
            return self._chunk(choice, {"reasoning_content": delta.reasoning}, tokens)
        return self._chunk(choice, {"content": delta.text}, tokens)

    def finish(self, answer: ChoiceAnswer) -> bytes:
        self._done.append(answer)
        return self._chunk(
            answer.index, {}, answer.tokens or (), finish=orjson.dumps(finish_reason(self._head, answer))
        )

    def closing(self) -> bytes:
        end = b"data: [DONE]\n\n"
        if not self._head.request.include_usage:
            return end
        total = orjson.dumps(usage(self._head, self._done))
        return b"".join((b"data: ", self._common, b',"choices":[],"usage":', total, b"}\n\n", end))

    def failure(self, error: Exception) -> bytes:
        return b"data: " + ChatDialect().error(error).body + b"\n\n"

    def _chunk(
        self, choice: int, delta: dict[str, Any], tokens: Sequence[TokenInfo] = (), finish: bytes = b"null"
    ) -> bytes:
        logprobs = orjson.dumps({"content": _entries(tokens), "refusal": None}) if tokens else b"null"
        before = self._before[choice]
        return b"".join(
            (before, orjson.dumps(delta), b',"logprobs":', logprobs, b',"finish_reason":', finish, b"}]}\n\n")
        )


def response_message(message: Message, generation: str) -> dict[str, Any]:
    """The assistant's message as an agent gets it."""
    data: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    data["refusal"] = None
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [_call(call, generation, index) for index, call in enumerate(message.tool_calls)]
    return data


def finish_reason(head: AnswerHead, answer: ChoiceAnswer) -> str:
    """A call that the request named is no decision of the model: the vendor says ``stop`` then."""
    if answer.finish_reason == "tool_calls" and head.request.tool_choice.kind == "named":
        return "stop"
    return answer.finish_reason


def usage(head: AnswerHead, choices: Sequence[ChoiceAnswer]) -> dict[str, int]:
    """Token counts of all choices together; the prompt counts once."""
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": head.prompt_tokens + completion,
    }


def read_tool_choice(value: Any, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """``tool_choice`` of chat: a word, or a tool that must be among ``tools``."""
    if value is None or value in ("auto", "none"):
        return ToolChoice(value or "auto")
    if value == "required":
        name = ""
    elif isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        name = value["function"].get("name")
    else:
        raise errors.InvalidRequest(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return forced_choice(name, tools)


def forced_choice(name: Any, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """The choice of tool ``name``, or of any tool for an empty name; raises InvalidRequest if it is not offered."""
    if not tools:
        raise errors.InvalidRequest("tool_choice asks for a call, but tools is empty", param="tool_choice")
    if name == "":
        return ToolChoice("required")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise errors.InvalidRequest(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")
    return ToolChoice("named", name)


def read_format(value: Any, where: str) -> dict[str, Any] | None:
    """``response_format``: None for text, else the JSON schema that the answer must follow."""
    if value is None or value == {"type": "text"}:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise errors.InvalidRequest(f"{where}.type must be text, json_object or json_schema", param=where)
    schema = value.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise errors.InvalidRequest(f"{where}.json_schema.schema must be an object", param=f"{where}.json_schema")
    return schema


def _choice(choice: ChoiceAnswer, head: AnswerHead) -> dict[str, Any]:
    tokens = choice.tokens
    return {
        "index": choice.index,
        "message": response_message(choice.message, choice.generation),
        "logprobs": None if tokens is None else {"content": _entries(tokens), "refusal": None},
        "finish_reason": finish_reason(head, choice),
    }


def _id(head: AnswerHead) -> str:
    return f"chatcmpl-{head.id}"


def _call(call: ToolCall, generation: str, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id("call_", generation, index), "type": "function", "function": function}


def _entries(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    return [
        {**_entry(token.text, token.logprob), "top_logprobs": [_entry(text, value) for text, value in token.top]}
        for token in tokens
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def logit_bias(value: Any) -> dict[int, float]:
    """``logit_bias``: token id -> what is added to its logit."""
    if value is None:
        return {}
    try:
        bias = {int(token): float(change) for token, change in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise errors.InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias") from None
    if any(token < 0 or not -100 <= change <= 100 for token, change in bias.items()):
        raise errors.InvalidRequest("logit_bias: ids are not negative, values are from -100 to 100", param="logit_bias")
    return bias


def _thinking(data: dict[str, Any]) -> bool | None:
    """``chat_template_kwargs.enable_thinking`` is the field's own switch; of ``reasoning_effort`` only "off" counts."""
    value, effort = data.get("chat_template_kwargs") or {}, fields.optional(data, "reasoning_effort", str)
    known = isinstance(value, dict) and set(value) <= {"enable_thinking"}
    if not known or not isinstance(value.get("enable_thinking"), bool | None):
        raise errors.UnsupportedParameter(
            "chat_template_kwargs: only enable_thinking (true or false) is supported", param="chat_template_kwargs"
        )
    thinking: bool | None = value.get("enable_thinking")
    return False if thinking is None and effort in ("none", "minimal") else thinking


def _logprobs(data: dict[str, Any]) -> dict[str, Any]:
    wanted = bool(fields.optional(data, "logprobs", bool))
    top = fields.optional(data, "top_logprobs", int) or 0
    if not 0 <= top <= 20 or (top and not wanted):
        raise errors.InvalidRequest("top_logprobs must be from 0 to 20, and needs logprobs: true", param="top_logprobs")
    return {"logprobs": wanted, "top_logprobs": top}


def include_usage(options: dict[str, Any], *, stream: bool) -> bool:
    """``stream_options.include_usage``; options that change the stream otherwise are refused."""
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise errors.UnsupportedParameter(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    if options and not stream:
        raise errors.InvalidRequest("stream_options needs stream: true", param="stream_options")
    return bool(options.get("include_usage"))
