"""The records of a session: one turn for each request, one choice for each generation that answers it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from proxy.trajectory.answer import FinishReason
from proxy.trajectory.canonical import Message
from proxy.trajectory.policy import Used
from proxy.trajectory.recording import Recording
from proxy.trajectory.tree import ROOT, Ids

Status = Literal["open", "finished", "aborted", "failed"]
"""``aborted``: the client went away or the proxy died; a retry of the same request continues it."""


class Outcome(enum.StrEnum):
    """Where a turn's prompt came from."""

    ROOT = "root"
    """A conversation of its own: rendered in full."""
    EXTEND = "extend"
    """Recorded ids of an earlier turn and its answer, plus the ids of the new messages."""
    FORK = "fork"
    """Follows an earlier turn, but had to be rendered in full; the reason says why."""


class Placement(NamedTuple):
    """The decision about one request, before it becomes a turn.

    ``ids`` are the prompt tokens behind ``base`` (a span index, ROOT for a full
    prompt); ``parent`` is the (turn, choice) whose messages and answer come first
    and ``new_from`` the number of its messages plus one. ``prefix`` is the start
    of a forced call at the end of ``ids``.
    """

    outcome: Outcome
    reason: str
    parent: tuple[int, int] | None
    new_from: int
    base: int
    ids: Ids
    prefix: str = ""


@dataclass(slots=True)
class Choice:
    """One generation of a turn. ``end`` is the span its tokens end with, the prompt's if it has none."""

    index: int
    generation: str
    recording: Recording = field(default_factory=Recording)
    status: Status = "open"
    finish_reason: FinishReason | None = None
    ended: bool = False
    """The tokens end with the end-of-turn token."""
    stop_string: str | None = None
    """It was cut off: the agent's text is not the text of the ids."""
    answer: Message | None = None
    end: int = ROOT
    fault: str = ""
    """Why it failed."""
    infra: bool = False
    """It failed by no doing of the agent or the model."""
    continued: bool = False
    """A later turn goes on from it."""


@dataclass(slots=True)
class Turn:
    """One request and its answers, one for each choice."""

    index: int
    choices: tuple[Choice, ...]
    outcome: Outcome
    reason: str
    parent: tuple[int, int] | None
    new_messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    parse_tools: bool
    single_call: bool
    raw: bool
    """A prompt without messages (completions)."""
    thinking: bool | None
    instructions: bool
    stored: bool
    prefix: str
    asked: dict[str, Any]
    used: Used
    created: int
    body_digest: str
    idempotency_key: str
    prompt_end: int = ROOT
    prompt_tokens: int = 0
    digest: bytes = b""
    """See :meth:`proxy.trajectory.conversations.Conversations.digest`."""
    left: bool = False
    """Its client went away before the answer was told; a retry may yet come for it."""

    @property
    def generation(self) -> str:
        """Of the first choice: the answer's id."""
        return self.choices[0].generation

    @property
    def finished(self) -> bool:
        """Every choice ended by itself."""
        return all(choice.status == "finished" for choice in self.choices)
