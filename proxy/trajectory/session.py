"""One session: its turns, the tree of their tokens, and where the next request belongs.

Pure state. The proxy's I/O side calls :meth:`Session.place` for a request,
:meth:`Session.begin` to make it a turn, feeds the turn's recording, and calls
:meth:`Session.finish`. The journal holds enough to do all of it again
(:mod:`proxy.trajectory.replay`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from proxy.dialects.base import TurnRequest
from proxy.trajectory.answer import AnswerBuilder, Delta, FinishReason
from proxy.trajectory.canonical import Message, extend_digest, tools_digest
from proxy.trajectory.policy import Policy, Used, asked, decide
from proxy.trajectory.recording import Recording
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.toolcalls import NoParser, parser_factory
from proxy.trajectory.tree import ROOT, Ids, Tree
from storage.errors import InvalidRequest, SessionClosed

TurnStatus = Literal["open", "finished", "aborted", "failed"]
"""``aborted``: the client went away or the proxy died; a retry of the same request continues it."""


class Outcome(enum.StrEnum):
    """Where a turn's prompt came from."""

    ROOT = "root"
    """A conversation of its own: rendered in full."""
    EXTEND = "extend"
    """Recorded ids of an earlier turn and its answer, plus the ids of the new messages."""
    FORK = "fork"
    """Follows an earlier turn, but had to be rendered in full; the reason says why."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision about one request, before it becomes a turn.

    ``ids`` are the prompt tokens behind ``base`` (a span index, ROOT for a full
    prompt); ``parent`` is the turn whose messages and answer come first and
    ``new_from`` the number of its messages plus one.
    """

    outcome: Outcome
    reason: str
    parent: int | None
    new_from: int
    base: int
    ids: Ids


@dataclass(slots=True)
class Turn:
    """One request and its answer. ``prompt_end`` and ``end`` are span indices, the same one if there are no tokens."""

    index: int
    generation: str
    outcome: Outcome
    reason: str
    parent: int | None
    new_messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    parse_tools: bool
    asked: dict[str, Any]
    used: Used
    created: int
    body_digest: str
    idempotency_key: str
    prompt_end: int
    prompt_tokens: int
    recording: Recording = field(default_factory=Recording)
    status: TurnStatus = "open"
    finish_reason: FinishReason | None = None
    ended: bool = False
    """The tokens end with the end-of-turn token."""
    trimmed: bool = False
    """A stop string was cut off: the agent's text is not the text of the ids."""
    answer: Message | None = None
    end: int = ROOT
    digest: bytes = b""
    """Of the whole request: tools and messages."""
    fault: str = ""
    """Why it failed."""
    infra: bool = False
    """It failed by no doing of the agent or the model."""


@dataclass(slots=True)
class Session:
    """See the module. ``sealed``: no more turns."""

    id: str
    run: str
    policy: Policy
    renderer: Renderer
    tree: Tree = field(default_factory=Tree)
    turns: list[Turn] = field(default_factory=list)
    sealed: bool = False
    affinity: str | None = None
    """Lease of the engine that last worked for it and has its prefix cached."""
    _answers: dict[bytes, int] = field(default_factory=dict)
    _prompts: dict[bytes, int] = field(default_factory=dict)

    def place(self, request: TurnRequest) -> Placement:
        """Decide where ``request`` belongs and build its prompt; changes nothing.

        Raises SessionClosed, InvalidRequest (turn limit, template), ContextLengthExceeded.
        """
        if self.sealed:
            raise SessionClosed(f"session {self.id} has ended: its attempt was finished or given up")
        if self.policy.max_turns is not None and len(self.turns) >= self.policy.max_turns:
            raise InvalidRequest(f"the session has used its {self.policy.max_turns} turns (agent.max_turns)")
        parent, position, answered = self._find(request)
        if parent is None:
            return self._full(request, Outcome.ROOT, "")
        refusal = self._continuation_refusal(parent, answered)
        if refusal:
            return self._full(request, Outcome.FORK, refusal)
        new = request.messages[position:]
        try:
            ids = self.renderer.continuation(request.messages[position - 1], new, request.tools, ended=parent.ended)
        except InvalidRequest as error:
            return self._full(request, Outcome.FORK, f"template: {error}")
        return Placement(Outcome.EXTEND, "", parent.index, position, parent.end, ids)

    def decide(self, placement: Placement, request: TurnRequest) -> Used:
        """Sampling in force for the turn that ``placement`` would become."""
        tokens = self.tree.depth(placement.base) + len(placement.ids)
        return decide(self.policy, request, len(self.turns), tokens)

    def begin(
        self,
        placement: Placement,
        request: TurnRequest,
        used: Used,
        *,
        generation: str,
        created: int,
        body_digest: str = "",
        idempotency_key: str = "",
    ) -> Turn:
        """Make the request a turn."""
        return self.add_turn(
            placement,
            Turn(
                index=len(self.turns),
                generation=generation,
                outcome=placement.outcome,
                reason=placement.reason,
                parent=placement.parent,
                new_messages=request.messages[placement.new_from :],
                tools=request.tools,
                parse_tools=request.parse_tools,
                asked=asked(request),
                used=used,
                created=created,
                body_digest=body_digest,
                idempotency_key=idempotency_key,
                prompt_end=ROOT,
                prompt_tokens=0,
            ),
        )

    def add_turn(self, placement: Placement, turn: Turn) -> Turn:
        """Enter ``turn`` with the prompt of ``placement``; used by :meth:`begin` and by replay."""
        turn.prompt_end, _ = self.tree.insert_prompt(placement.ids, placement.base)
        turn.prompt_tokens = self.tree.depth(turn.prompt_end)
        turn.end = turn.prompt_end
        turn.digest = self._digest(turn)
        self.turns.append(turn)
        self._prompts.setdefault(turn.digest, turn.index)
        return turn

    def builder(self, turn: Turn) -> AnswerBuilder:
        """A fresh builder of the turn's answer."""
        factory = parser_factory(self.policy.tool_parser, self.policy.tool_open, self.policy.tool_close)
        parser = factory(turn.tools) if turn.parse_tools else NoParser()
        return AnswerBuilder(self.renderer.decode, parser, stops=turn.used.stop, silent=self.renderer.eos_ids)

    def prompt_ids(self, turn: Turn) -> Ids:
        """The prompt as the engine reads it."""
        return self.tree.path_ids(turn.prompt_end)

    def complete(self, turn: Turn, builder: AnswerBuilder, *, ended: bool) -> list[Delta]:
        """Close the answer and :meth:`finish` the turn; returns the last deltas. ``ended``: not cut by its limit."""
        deltas = builder.finish(ended=ended)
        trimmed = builder.stop_string is not None
        self.finish(turn, builder.finish_reason(ended=ended), builder.message(), trimmed=trimmed)
        return deltas

    def finish(self, turn: Turn, reason: FinishReason, answer: Message, *, trimmed: bool) -> None:
        """The generation ended by itself: its tokens enter the tree and later requests may build on it."""
        recording = turn.recording
        turn.status, turn.finish_reason, turn.answer, turn.trimmed = "finished", reason, answer, trimmed
        turn.ended = bool(recording.ids) and recording.ids[-1] in self.renderer.eos_ids
        self._enter(turn, passable=True)
        if recording.ids:
            self._answers[extend_digest(turn.digest, answer)] = turn.index

    def seal(self) -> None:
        """No more turns; tokens of generations that never finished stay in the tree as nobody's prefix."""
        if self.sealed:
            return
        self.sealed = True
        for turn in self.turns:
            if turn.status == "open":
                turn.status = "aborted"
            if turn.status != "finished":
                self._enter(turn, passable=False)

    def find_retry(self, body_digest: str, idempotency_key: str, *, retried: bool) -> Turn | None:
        """The turn that a repeated request belongs to: same key, or same body and the client says that it retries."""
        for turn in reversed(self.turns):
            if turn.status == "failed":
                continue
            if idempotency_key and turn.idempotency_key == idempotency_key and turn.body_digest == body_digest:
                return turn
            if retried and not idempotency_key and turn.body_digest == body_digest:
                return turn
        return None

    def messages(self, turn: Turn) -> tuple[Message, ...]:
        """All messages of the turn's request."""
        parts = [turn.new_messages]
        while turn.parent is not None:
            turn = self.turns[turn.parent]
            parts += [(turn.answer,) if turn.answer else (), turn.new_messages]
        return tuple(message for part in reversed(parts) for message in part)

    def versions(self) -> Iterator[int]:
        """Known weight versions of all sampled tokens, runs collapsed."""
        for turn in self.turns:
            for version, _ in turn.recording.version_runs():
                if version >= 0:
                    yield version

    def forks(self) -> int:
        """Turns that had to be rendered in full though they followed another."""
        return sum(turn.outcome is Outcome.FORK for turn in self.turns)

    def _enter(self, turn: Turn, *, passable: bool) -> None:
        recording = turn.recording
        turn.end = self.tree.append_completion(
            turn.prompt_end,
            turn.generation,
            np.asarray(recording.ids, np.int32),
            np.asarray(recording.logprobs, np.float32),
            np.asarray(recording.versions, np.int32),
            passable=passable,
        )

    def _full(self, request: TurnRequest, outcome: Outcome, reason: str) -> Placement:
        return Placement(outcome, reason, None, 0, ROOT, self.renderer.prompt(request.messages, request.tools))

    def _find(self, request: TurnRequest) -> tuple[Turn | None, int, bool]:
        """The latest turn that the request follows: (turn, messages up to and with its answer, answer is equal)."""
        digest = tools_digest(request.tools)
        found: tuple[Turn | None, int, bool] = (None, 0, False)
        asked_last: int | None = None
        for position, message in enumerate(request.messages, 1):
            digest = extend_digest(digest, message)
            if message.role == "assistant":
                answered = self._answers.get(digest)
                if answered is not None:
                    found = (self.turns[answered], position, True)
                elif asked_last is not None:
                    found = (self.turns[asked_last], position, False)
            asked_last = self._prompts.get(digest)
        return found

    def _continuation_refusal(self, parent: Turn, answered: bool) -> str:
        if not answered:
            return f"answer_differs: the assistant message is not the answer to turn {parent.index}"
        if parent.trimmed:
            return f"answer_trimmed: a stop string was cut from the answer to turn {parent.index}"
        if self.renderer.continuation_refusal:
            return f"template: {self.renderer.continuation_refusal}"
        return ""

    def _digest(self, turn: Turn) -> bytes:
        """Digest of the turn's whole request, from its parent's: O(new messages)."""
        if turn.parent is None:
            digest = tools_digest(turn.tools)
        else:
            parent = self.turns[turn.parent]
            digest = extend_digest(parent.digest, parent.answer) if parent.answer else parent.digest
        for message in turn.new_messages:
            digest = extend_digest(digest, message)
        return digest
