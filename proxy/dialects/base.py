"""What a dialect is: one vendor's HTTP API, turned into canonical turns and back.

Dialects are pure: bytes in, records out; records in, bytes out. Adding one
means writing these methods and naming it in the endpoint table of ``proxy.app``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from proxy.trajectory.answer import Delta, FinishReason
from proxy.trajectory.canonical import Message


class ToolChoice(NamedTuple):
    """Whether the answer must be a call: of any tool (``required``) or of the tool ``name`` (``named``)."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """An agent's request in canonical form. Built by a dialect, read by the session. None: the agent did not say."""

    messages: tuple[Message, ...]
    """Empty only if ``prompt`` is given."""
    prompt: str | tuple[int, ...] | None = None
    """Completions only: text or ids that are the whole prompt as they are."""
    tools: tuple[dict[str, Any], ...] = ()
    """As in OpenAI's chat API: ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    """False: the answer ends with its first call."""
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    json_schema: dict[str, Any] | None = None
    """Schema that the answer must follow; ``{"type": "object"}`` is any JSON object."""
    thinking: bool | None = None
    """The template's ``enable_thinking``."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    previous: str = ""
    """Generation that the conversation goes on from (Responses); ``messages`` are then only what is new."""
    instructions: bool = False
    """The first message is of this request only: a request that goes on from it leaves it out."""
    store: bool = True
    """A later request may name it as ``previous``."""
    labels: dict[str, Any] = field(default_factory=dict)
    """Fields without effect on the answer (``user``, ``metadata``), recorded only."""

    @property
    def parse_tools(self) -> bool:
        """Tools were offered and may be called."""
        return bool(self.tools) and self.tool_choice.kind != "none"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token for an agent that asked for log-probabilities; ``top`` are the likeliest (text, log-prob) there."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known before the first token. ``id`` is stable over retries; ``created`` is in unix seconds."""

    id: str
    created: int
    model: str
    prompt_tokens: int
    request: TurnRequest
    generations: tuple[str, ...] = ()
    """Of all choices; ``id`` is the first one."""

    def generation(self, choice: int) -> str:
        """The generation that makes ``choice``."""
        return self.generations[choice] if self.generations else self.id


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One finished choice. ``finish_reason`` is ``tool_calls`` only if there are calls."""

    index: int
    generation: str
    message: Message
    finish_reason: FinishReason
    stop_string: str | None
    """The one that ended it, if one did."""
    completion_tokens: int
    tokens: tuple[TokenInfo, ...] | None = None
    """None: not asked for. In a stream: those not told yet."""
    reasoning_tokens: int = 0
    """Of ``completion_tokens``, those up to the end of the reasoning."""


class ErrorReply(NamedTuple):
    """An error in the dialect's shape."""

    status: int
    body: bytes


class StreamWriter(Protocol):
    """Writes one streamed answer; every method returns bytes of the event stream, possibly none."""

    def opening(self) -> bytes: ...

    def delta(self, choice: int, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes: ...

    def finish(self, answer: ChoiceAnswer) -> bytes:
        """That choice is over; all its deltas were written."""
        ...

    def closing(self) -> bytes:
        """All choices are over."""
        ...

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

    def answer(self, head: AnswerHead, choices: Sequence[ChoiceAnswer]) -> bytes:
        """The body of a whole answer."""
        ...

    def stream(self, head: AnswerHead) -> StreamWriter: ...

    def error(self, error: Exception) -> ErrorReply: ...


def call_id(prefix: str, generation: str, index: int) -> str:
    """Id of a tool call as agents see it: the same in every rendering of the same answer."""
    return f"{prefix}{generation[:20]}{index:04d}"
