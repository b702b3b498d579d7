"""A session as journal entries, and back.

Entries are the only form in which a session outlives the process. Each holds
what is new: a turn that extends another stores only its new messages and the
ids behind its parent's answer, so a journal grows with the tokens, not with
their square.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from proxy.trajectory.canonical import Message
from proxy.trajectory.policy import Used
from proxy.trajectory.recording import Marks, Segment
from proxy.trajectory.session import Outcome, Placement, Session, Turn
from proxy.trajectory.tree import ROOT, Floats, Ids
from storage.errors import IntegrityError


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One journal record of a session; ``logprobs`` None: ``ids`` were not sampled."""

    kind: str
    data: dict[str, Any]
    ids: Ids | None = None
    logprobs: Floats | None = None


def turn_entry(turn: Turn, placement: Placement) -> Entry:
    """A turn begins."""
    data = {
        "turn": turn.index,
        "g": turn.generation,
        "outcome": turn.outcome.value,
        "reason": turn.reason,
        "parent": turn.parent,
        "messages": [message.to_json() for message in turn.new_messages],
        "tools": list(turn.tools),
        "parse_tools": turn.parse_tools,
        "asked": turn.asked,
        "used": asdict(turn.used),
        "created": turn.created,
        "body": turn.body_digest,
        "key": turn.idempotency_key,
    }
    return Entry("turn", data, placement.ids)


def segment_entry(turn: Turn, segment: Segment) -> Entry:
    """An engine takes the generation on."""
    return Entry("segment", {"turn": turn.index, **segment.to_json()})


def tokens_entry(turn: Turn, ids: list[int], logprobs: list[float], marks: Marks) -> Entry:
    """Sampled tokens, before anyone sees them."""
    data = {"turn": turn.index, "versions": marks}
    return Entry("tokens", data, np.asarray(ids, np.int32), np.asarray(logprobs, np.float32))


def spans_entry(turn: Turn, spans: list[list[int | None]]) -> Entry:
    """The engine's word on the versions of the segment that just ended."""
    return Entry("spans", {"turn": turn.index, "spans": spans})


def end_entry(turn: Turn, *, ended: bool) -> Entry:
    """The generation ended by itself, or by its limit."""
    return Entry("end", {"turn": turn.index, "ended": ended})


def fail_entry(turn: Turn) -> Entry:
    """The generation cannot be finished."""
    return Entry("fail", {"turn": turn.index, "fault": turn.fault, "infra": turn.infra})


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
    for turn in session.turns:
        if turn.status == "open":
            turn.status = "aborted"


def _replay_turn(session: Session, entry: Entry) -> None:
    data = entry.data
    if data["turn"] != len(session.turns) or entry.ids is None:
        raise IntegrityError(f"journal of session {session.id}: turn {data['turn']} follows {len(session.turns)} turns")
    outcome = Outcome(data["outcome"])
    extends = outcome is Outcome.EXTEND
    base = session.turns[data["parent"]].end if extends else ROOT
    placement = Placement(outcome, data["reason"], data["parent"], 0, base, entry.ids)
    used = data["used"]
    session.add_turn(
        placement,
        Turn(
            index=data["turn"],
            generation=data["g"],
            outcome=outcome,
            reason=data["reason"],
            parent=data["parent"],
            new_messages=tuple(Message.from_json(message) for message in data["messages"]),
            tools=tuple(data["tools"]),
            parse_tools=data["parse_tools"],
            asked=data["asked"],
            used=Used(**{**used, "stop": tuple(used["stop"])}),
            created=data["created"],
            body_digest=data["body"],
            idempotency_key=data["key"],
            prompt_end=ROOT,
            prompt_tokens=0,
        ),
    )


def _replay_generation(session: Session, entry: Entry) -> None:
    data = dict(entry.data)
    index = data.pop("turn")
    if not 0 <= index < len(session.turns):
        raise IntegrityError(f"journal of session {session.id}: {entry.kind} of turn {index}, which never began")
    turn = session.turns[index]
    recording = turn.recording
    if entry.kind == "segment":
        recording.begin(Segment(**data))
    elif entry.kind == "tokens" and entry.ids is not None and entry.logprobs is not None:
        recording.add(entry.ids.tolist(), entry.logprobs.tolist(), data["versions"])
    elif entry.kind == "spans":
        recording.amend(data["spans"])
    elif entry.kind == "end":
        builder = session.builder(turn)
        builder.feed(recording.ids)
        session.complete(turn, builder, ended=data["ended"])
    elif entry.kind == "fail":
        turn.status, turn.fault, turn.infra = "failed", data["fault"], data["infra"]
    else:
        raise IntegrityError(f"journal of session {session.id}: unknown entry {entry.kind!r}")
