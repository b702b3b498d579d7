"""The response object and the items of an answer, as the Responses API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import AnswerHead, ChoiceAnswer, TokenInfo, TurnRequest, call_id
from proxy.dialects.responses_items import custom_input, seal_reasoning
from proxy.trajectory.canonical import ToolCall
from storage.errors import PreviousResponseNotFound

Item = dict[str, Any]

_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What the core names as in the chat API."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest(TurnRequest):
    """What this dialect must remember of a request to write its answer."""

    echo: dict[str, Any] = field(default_factory=dict)
    """Parameters that the response object repeats: as they are in force, not always as they were asked for."""
    custom_tools: frozenset[str] = frozenset()
    seal_reasoning: bool = False
    """Reasoning items carry ``encrypted_content``."""


def request_of(head: AnswerHead) -> ResponsesRequest:
    """The request, which this dialect parsed."""
    if not isinstance(head.request, ResponsesRequest):
        raise TypeError(f"a Responses answer needs a Responses request, not {type(head.request).__name__}")
    return head.request


def response(
    head: AnswerHead,
    status: str,
    output: Sequence[Item] = (),
    answer: ChoiceAnswer | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The response object; without ``answer`` it is not over."""
    request = request_of(head)
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": head.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": f"resp_{request.previous}" if request.previous else None,
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": None,
        "service_tier": "default",
        "store": request.store,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs,
        "truncation": "disabled",
        "usage": _usage(head, answer) if answer else None,
        **request.echo,
    }


def status_of(answer: ChoiceAnswer) -> str:
    """``incomplete`` if the answer's token limit ended it."""
    return "incomplete" if answer.finish_reason == "length" else "completed"


def answer_items(head: AnswerHead, answer: ChoiceAnswer) -> list[Item]:
    """Items of a whole answer. One that was cut ends with an item that is ``incomplete``."""
    message = answer.message
    items: list[Item] = []
    if message.reasoning:
        items.append(reasoning_item(head, 0, message.reasoning))
    if message.content or not (message.reasoning or message.tool_calls):
        items.append(message_item(head, len(items), message.content, text_tokens(answer)))
    if not message.tool_calls:
        items[-1]["status"] = status_of(answer)
    for number, call in enumerate(message.tool_calls):
        items.append(call_item(head, len(items), number, call))
    return items


def reasoning_item(head: AnswerHead, index: int, text: str, status: str = "completed") -> Item:
    """The model's own words are ``content``; there is nobody to write a ``summary``."""
    item = {
        "id": call_id("rs_", head.id, index),
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [reasoning_part(text)],
    }
    return {**item, "encrypted_content": seal_reasoning(text)} if request_of(head).seal_reasoning else item


def message_item(
    head: AnswerHead, index: int, text: str, tokens: Sequence[TokenInfo], status: str = "completed"
) -> Item:
    """A message of one text part."""
    return {
        "id": call_id("msg_", head.id, index),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text_part(text, tokens)],
    }


def call_item(head: AnswerHead, index: int, number: int, call: ToolCall) -> Item:
    """The answer's ``number``-th call. One of a custom tool that has another form stays a function call."""
    identity = {"status": "completed", "call_id": call_id("call_", head.id, number), "name": call.name}
    text = custom_input(call.arguments) if call.name in request_of(head).custom_tools else None
    if text is None:
        item = {"id": call_id("fc_", head.id, index), "type": "function_call", **identity}
        return {**item, "arguments": call.arguments}
    return {"id": call_id("ctc_", head.id, index), "type": "custom_tool_call", **identity, "input": text}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries(tokens)}


def entries(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    """``logprobs`` of a text."""
    return [
        {**_entry(token.text, token.logprob), "top_logprobs": [_entry(text, value) for text, value in token.top]}
        for token in tokens
    ]


def text_tokens(answer: ChoiceAnswer) -> Sequence[TokenInfo]:
    """Tokens of the answer's text: in this API reasoning and calls have no log-probabilities.

    All behind the reasoning if the text cannot be found in theirs (a character spread over tokens, text between calls).
    """
    tokens, message = answer.tokens or (), answer.message
    if not message.reasoning and not message.tool_calls:
        return tokens
    tokens = tokens[answer.reasoning_tokens :]
    start = "".join(token.text for token in tokens).find(message.content)
    if start < 0:
        return tokens
    found, position, end = [], 0, start + len(message.content)
    for token in tokens:
        if position < end and position + len(token.text) > start:
            found.append(token)
        position += len(token.text)
    return found


def error_detail(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and the error object that all of OpenAI's APIs share."""
    status, kind, code = fields.classify(error)
    param = fields.error_param(error)
    if isinstance(error, PreviousResponseNotFound):
        param = "previous_response_id"
    param = _PARAMS.get(param or "", param)
    return status, {"message": str(error), "type": kind, "param": param, "code": code}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(head: AnswerHead, answer: ChoiceAnswer) -> dict[str, Any]:
    return {
        "input_tokens": head.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": head.prompt_tokens + answer.completion_tokens,
    }
