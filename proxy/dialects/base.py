"""What a dialect is: one vendor's HTTP API, turned into canonical turns and back.

Dialects are pure: bytes in, records out; records in, bytes out. Adding one
means writing these methods and naming it in the route list of ``proxy.app``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from proxy.trajectory.answer import Delta, FinishReason
from proxy.trajectory.canonical import Message


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """An agent's request in canonical form. Built by a dialect, read by the session. None: the agent did not say."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    parse_tools: bool = False
    """Tools were offered and may be called."""
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    labels: dict[str, Any] = field(default_factory=dict)
    """Fields without effect on the answer (``user``, ``metadata``), recorded only."""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token for an agent that asked for log-probabilities."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known before the first token. ``id`` is stable over retries; ``created`` is in unix seconds."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class AnswerTail:
    """What is known after the last token."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class ErrorReply(NamedTuple):
    """An error in the dialect's shape."""

    status: int
    body: bytes


class StreamWriter(Protocol):
    """Writes one streamed answer; every method returns bytes of the event stream."""

    def opening(self) -> bytes: ...

    def delta(self, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes: ...

    def closing(self, tail: AnswerTail, tokens: Sequence[TokenInfo]) -> bytes: ...

    def failure(self, error: Exception) -> bytes:
        """An error after the stream has begun."""
        ...


class Dialect(Protocol):
    """One vendor's API."""

    keep_alive: bytes
    """Bytes that keep a waiting stream open and mean nothing."""

    def parse(self, body: bytes) -> TurnRequest:
        """Raises InvalidRequest or UnsupportedParameter, naming the parameter."""
        ...

    def answer(self, head: AnswerHead, tail: AnswerTail, message: Message, tokens: Sequence[TokenInfo] | None) -> bytes:
        """The body of a whole answer; ``tokens`` None: log-probabilities were not asked for."""
        ...

    def stream(self, head: AnswerHead, request: TurnRequest) -> StreamWriter: ...

    def error(self, error: Exception) -> ErrorReply: ...
