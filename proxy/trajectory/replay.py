"""A session as journal entries, and back.

Entries are the only form in which a session outlives the process. Each holds
what is new: a turn that extends another stores only its new messages and the
ids behind its parent's answer, so a journal grows with the tokens, not with
their square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from proxy.trajectory.canonical import Message
from proxy.trajectory.policy import Used
from proxy.trajectory.recording import Marks, Segment
from proxy.trajectory.session import Session
from proxy.trajectory.tree import ROOT, Floats, Ids
from proxy.trajectory.turn import Choice, Outcome, Placement, Turn
from storage.errors import IntegrityError


class Entry(NamedTuple):
    """One journal record of a session; ``logprobs`` None: ``ids`` were not sampled."""

    kind: str
    data: dict[str, Any]
    ids: Ids | None = None
    logprobs: Floats | None = None


_TURN_FIELDS = (
    *("outcome", "reason", "parent", "tools", "parse_tools", "single_call", "raw", "thinking", "instructions"),
    *("stored", "prefix", "asked", "created", "body_digest", "idempotency_key"),
)
"""Fields of a turn that are journalled as they are."""


def turn_entry(session: Session, turn: Turn, placement: Placement) -> Entry:
    """A turn begins; of tools that are those of the turn before it there is nothing."""
    data = {
        "turn": turn.index,
        "generations": [choice.generation for choice in turn.choices],
        "messages": [message.to_json() for message in turn.new_messages],
        "used": turn.used.to_json(),
        **{name: getattr(turn, name) for name in _TURN_FIELDS},
    }
    if turn.parent is not None and turn.tools is session.turns[turn.parent[0]].tools:
        del data["tools"]
    return Entry("turn", data, placement.ids)


def segment_entry(turn: Turn, choice: Choice, segment: Segment) -> Entry:
    """An engine takes the generation on."""
    return Entry("segment", {**_at(turn, choice), **segment.to_json()})


def tokens_entry(
    turn: Turn,
    choice: Choice,
    ids: Sequence[int],
    logprobs: Sequence[float],
    marks: Marks,
    tops: list[list[list[float]]],
) -> Entry:
    """Sampled tokens, before anyone sees them."""
    data = {**_at(turn, choice), "versions": marks}
    if tops:
        data["tops"] = tops
    return Entry("tokens", data, np.asarray(ids, np.int32), np.asarray(logprobs, np.float32))


def spans_entry(turn: Turn, choice: Choice, spans: list[list[int | None]]) -> Entry:
    """The engine's word on the versions of the segment that just ended."""
    return Entry("spans", {**_at(turn, choice), "spans": spans})


def end_entry(turn: Turn, choice: Choice, *, ended: bool) -> Entry:
    """The generation ended by itself, or by its limit."""
    return Entry("end", {**_at(turn, choice), "ended": ended})


def fail_entry(turn: Turn, choice: Choice) -> Entry:
    """The generation cannot be finished."""
    return Entry("fail", {**_at(turn, choice), "fault": choice.fault, "infra": choice.infra})


def left_entry(turn: Turn) -> Entry:
    """The turn's client went away before it was told the answer, or was told it after all."""
    return Entry("left", {"turn": turn.index, "choice": 0, "left": turn.left})


def _at(turn: Turn, choice: Choice) -> dict[str, Any]:
    return {"turn": turn.index, "choice": choice.index}


def replay(session: Session, entries: list[Entry]) -> None:
    """Bring an empty ``session`` to the state its journal describes; open generations become ``aborted``.

    Raises IntegrityError for an entry that does not fit.
    """
    for entry in entries:
        if entry.kind == "turn":
            _replay_turn(session, entry)
        elif entry.kind == "closed":
            session.seal()
        else:
            _replay_generation(session, entry)
    for _, choice in session.generations():
        if choice.status == "open":
            choice.status = "aborted"


def _replay_turn(session: Session, entry: Entry) -> None:
    data = entry.data
    if data["turn"] != len(session.turns) or entry.ids is None:
        raise IntegrityError(f"journal of session {session.id}: turn {data['turn']} follows {len(session.turns)} turns")
    fields = {name: data[name] for name in _TURN_FIELDS if name in data}
    fields["outcome"] = outcome = Outcome(data["outcome"])
    fields["parent"] = parent = tuple(data["parent"]) if data["parent"] is not None else None
    fields["tools"] = tuple(data["tools"]) if "tools" in data or parent is None else session.turns[parent[0]].tools
    base = session.choice(parent).end if parent is not None else ROOT
    session.add_turn(
        Placement(outcome, data["reason"], parent, 0, base, entry.ids),
        Turn(
            index=data["turn"],
            choices=tuple(Choice(index, generation) for index, generation in enumerate(data["generations"])),
            new_messages=tuple(Message.from_json(message) for message in data["messages"]),
            used=Used.from_json(data["used"]),
            **fields,
        ),
    )


def _replay_generation(session: Session, entry: Entry) -> None:
    data = dict(entry.data)
    index, number = data.pop("turn"), data.pop("choice")
    if not (0 <= index < len(session.turns) and 0 <= number < len(session.turns[index].choices)):
        raise IntegrityError(
            f"journal of session {session.id}: {entry.kind} of turn {index}, choice {number}, which never began"
        )
    turn = session.turns[index]
    choice = turn.choices[number]
    recording = choice.recording
    if entry.kind == "segment":
        recording.begin(Segment(**data))
    elif entry.kind == "tokens" and entry.ids is not None and entry.logprobs is not None:
        recording.add(entry.ids.tolist(), entry.logprobs.tolist(), data["versions"], data.get("tops", ()))
    elif entry.kind == "spans":
        recording.amend(data["spans"])
    elif entry.kind == "end":
        builder = session.builder(turn)
        builder.feed(recording.ids)
        session.complete(turn, choice, builder, ended=data["ended"])
    elif entry.kind == "left":
        turn.left = data["left"]
    elif entry.kind == "fail":
        choice.status, choice.fault, choice.infra = "failed", data["fault"], data["infra"]
    else:
        raise IntegrityError(f"journal of session {session.id}: unknown entry {entry.kind!r}")
