"""The conversations of a session: which recorded answer a request goes on from, by its canonical messages."""

from __future__ import annotations

from typing import NamedTuple

from proxy.dialects.base import TurnRequest
from proxy.trajectory.canonical import Message, extend_digest, tools_digest
from proxy.trajectory.turn import Choice, Turn

_RECENT = 4
"""Turns that are compared with a request word by word before it is looked up by digests, which cost more."""


class Followed(NamedTuple):
    """What a request goes on from: ``at`` is (turn, choice), ``messages`` counts the request's up to and with it."""

    at: tuple[int, int]
    messages: int
    answered: bool
    """The request has the answer as it was given; False: another one in its place."""


class Conversations:
    """An index over ``turns``, which it does not own.

    A conversation is found by a chain of digests over its tools and messages, in time linear in the request. Answers
    are known with and without their reasoning, which many clients do not send back. Digests are made when they are
    asked for, which is seldom.
    """

    def __init__(self, turns: list[Turn]) -> None:
        self._turns = turns
        self._digested = 0
        self._fresh: list[tuple[Turn, Choice]] = []
        self._answers: dict[bytes, tuple[int, int]] = {}
        self._prompts: dict[bytes, int] = {}

    def enter_answer(self, turn: Turn, choice: Choice) -> None:
        """A later request may go on from this answer; of equal ones from the latest turn's first, whenever ended."""
        self._fresh.append((turn, choice))

    def digest(self, turn: Turn) -> bytes:
        """Of the turn's whole request, tools and messages; empty for a raw prompt."""
        self._catch_up()
        return turn.digest

    def messages(self, turn: Turn) -> tuple[Message, ...]:
        """All messages of the turn's request."""
        parts = [turn.new_messages]
        while turn.parent is not None:
            index, number = turn.parent
            turn = self._turns[index]
            answer = turn.choices[number].answer
            parts += [(answer,) if answer else (), turn.new_messages]
        return tuple(message for part in reversed(parts) for message in part)

    def find(self, request: TurnRequest) -> Followed | None:
        """The latest choice that the request follows."""
        return self._find_recent(request) or self._find_by_digest(request)

    def _find_recent(self, request: TurnRequest) -> Followed | None:
        """The usual case: one of the last turns, its answer and new messages of others than the assistant."""
        last = next((n for n in range(len(request.messages) - 1, -1, -1) if request.messages[n].role == "assistant"), 0)
        if not last:
            return None
        answer, before = request.messages[last], request.messages[:last]
        for turn in self._turns[: -_RECENT - 1 : -1]:
            if turn.raw or turn.tools != request.tools or self.messages(turn) != before:
                continue
            for choice in turn.choices:
                told = choice.answer
                if told is not None and choice.recording.ids and answer in (told, told.without_reasoning()):
                    return Followed((turn.index, choice.index), last + 1, True)
        return None

    def _find_by_digest(self, request: TurnRequest) -> Followed | None:
        self._catch_up()
        digest = tools_digest(request.tools)
        found: Followed | None = None
        asked_last: int | None = None
        for position, message in enumerate(request.messages, 1):
            digest = extend_digest(digest, message)
            if message.role == "assistant":
                answered = self._answers.get(digest)
                if answered is not None:
                    found = Followed(answered, position, True)
                    digest = self._answer_digest(answered)  # as recorded, whatever the client left out
                elif asked_last is not None:
                    found = Followed((asked_last, 0), position, False)
            asked_last = self._prompts.get(digest)
        return found

    def _catch_up(self) -> None:
        turns, self._digested = self._turns[self._digested :], len(self._turns)
        for turn in turns:
            if turn.raw:
                continue
            turn.digest = tools_digest(turn.tools) if turn.parent is None else self._answer_digest(turn.parent)
            for message in turn.new_messages:
                turn.digest = extend_digest(turn.digest, message)
            self._prompts.setdefault(turn.digest, turn.index)
        fresh, self._fresh = self._fresh, []
        for turn, choice in fresh:
            at, answer = (turn.index, choice.index), choice.answer
            for told in {answer, answer.without_reasoning()} if answer else ():
                digest = extend_digest(turn.digest, told)
                self._answers[digest] = max(self._answers.get(digest, at), at, key=lambda place: (place[0], -place[1]))

    def _answer_digest(self, at: tuple[int, int]) -> bytes:
        turn = self._turns[at[0]]
        answer = turn.choices[at[1]].answer
        return extend_digest(turn.digest, answer) if answer else turn.digest
