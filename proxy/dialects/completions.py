"""OpenAI's legacy ``/v1/completions``: the prompt is taken as it is, the answer is shown as it is generated.

One prompt a request, as text or as token ids; no template, no tools, no
reasoning. ``text_offset`` of log-probabilities counts from the start of the
answer, since a prompt of ids has no length in characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.dialects import fields
from proxy.dialects.base import AnswerHead, ChoiceAnswer, ErrorReply, TokenInfo, TurnRequest
from proxy.dialects.chat import MAX_CHOICES, include_usage, logit_bias, usage
from proxy.trajectory.answer import Delta
from storage.errors import InvalidRequest, UnsupportedParameter

_DEFAULT_MAX_TOKENS = 16  # the vendor's
_MAX_LOGPROBS = 5
_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",)}
_READ = frozenset(
    (
        *("prompt", "model", "max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "seed", "stop", "n", "best_of", "stream", "stream_options", "logprobs"),
    )
)


class CompletionsDialect:
    """See the module; implements :class:`~proxy.dialects.base.Dialect`."""

    keep_alive = b": keep-alive\n\n"

    def parse(self, body: bytes) -> TurnRequest:
        data = fields.read_object(body)
        labels = fields.check_parameters(data, read=_READ, labels=("user",), neutral=_NEUTRAL)
        top = fields.optional(data, "logprobs", int)
        if top is not None and not 0 <= top <= _MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be from 0 to {_MAX_LOGPROBS}", param="logprobs")
        stream = bool(fields.optional(data, "stream", bool))
        return TurnRequest(
            messages=(),
            prompt=_prompt(data.get("prompt")),
            model=fields.optional(data, "model", str) or "",
            max_tokens=fields.positive(data, "max_tokens") or _DEFAULT_MAX_TOKENS,
            temperature=fields.number(data, "temperature", 0.0, 2.0),
            top_p=fields.number(data, "top_p", 0.0, 1.0),
            top_k=fields.positive(data, "top_k"),
            presence_penalty=fields.number(data, "presence_penalty", -2.0, 2.0) or 0.0,
            frequency_penalty=fields.number(data, "frequency_penalty", -2.0, 2.0) or 0.0,
            logit_bias=logit_bias(data.get("logit_bias")),
            seed=fields.seed_of(data),
            stop=fields.stops(data.get("stop")),
            n=_choices(data),
            stream=stream,
            include_usage=include_usage(fields.optional(data, "stream_options", dict) or {}, stream=stream),
            logprobs=top is not None,
            top_logprobs=top or 0,
            labels=labels,
        )

    def answer(self, head: AnswerHead, choices: Sequence[ChoiceAnswer]) -> bytes:
        written = [
            _choice(
                choice.index,
                choice.message.content,
                None if choice.tokens is None else _logprobs(head, choice.tokens, 0),
                choice.finish_reason,
            )
            for choice in choices
        ]
        return orjson.dumps({**_common(head), "choices": written, "usage": usage(head, choices)})

    def stream(self, head: AnswerHead) -> CompletionsStream:
        return CompletionsStream(head)

    def error(self, error: Exception) -> ErrorReply:
        return ErrorReply(*fields.openai_error(error))


class CompletionsStream:
    """Server-sent events of one answer; ``finish_reason`` is null on every chunk of a choice but its last."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._common = _common(head)
        self._offsets = [0] * head.request.n
        self._done: list[ChoiceAnswer] = []

    def opening(self) -> bytes:
        return b""

    def delta(self, choice: int, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes:
        return self._chunk(choice, delta.text, tokens, None)

    def finish(self, answer: ChoiceAnswer) -> bytes:
        self._done.append(answer)
        return self._chunk(answer.index, "", answer.tokens or (), answer.finish_reason)

    def closing(self) -> bytes:
        end = b"data: [DONE]\n\n"
        if not self._head.request.include_usage:
            return end
        return _event({**self._common, "choices": [], "usage": usage(self._head, self._done)}) + end

    def failure(self, error: Exception) -> bytes:
        return b"data: " + CompletionsDialect().error(error).body + b"\n\n"

    def _chunk(self, choice: int, text: str, tokens: Sequence[TokenInfo], reason: str | None) -> bytes:
        logprobs = _logprobs(self._head, tokens, self._offsets[choice]) if tokens else None
        self._offsets[choice] += sum(len(token.text) for token in tokens)
        data = {**self._common, "choices": [_choice(choice, text, logprobs, reason)]}
        return _event({**data, "usage": None} if self._head.request.include_usage else data)


def _prompt(value: Any) -> str | tuple[int, ...]:
    """The one prompt; a list of one is that one."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise UnsupportedParameter(
                f"prompt is a list of {len(value)}: this server answers one prompt a request", param="prompt"
            )
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise InvalidRequest("prompt must be a string or a list of token ids, and not empty", param="prompt")


def _choices(data: dict[str, Any]) -> int:
    n = fields.positive(data, "n", most=MAX_CHOICES) or 1
    best_of = fields.positive(data, "best_of")
    if best_of not in (None, n):
        raise UnsupportedParameter(
            f"best_of={best_of} is not supported by this server, only {n} as in n", param="best_of"
        )
    return n


def _common(head: AnswerHead) -> dict[str, Any]:
    return {"id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": head.model}


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(head: AnswerHead, tokens: Sequence[TokenInfo], offset: int) -> dict[str, Any]:
    """The likeliest tokens include the one that was drawn, so there may be one more than asked for."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    top = [dict(reversed([*token.top, (token.text, token.logprob)])) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": top if head.request.top_logprobs else None,
        "text_offset": offsets,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
