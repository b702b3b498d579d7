"""Messages of a lease: its members, its end, and what it shows."""

from __future__ import annotations

from typing import Literal

from workflows.messages.base import Message, Role
from workflows.spec import RunSpec


class LeaseInput(Message):
    """Input of the ``Lease`` workflow."""

    lease: str
    epoch: int
    run: str
    role: Role
    members: tuple[str, ...]
    owner: str
    pool: str
    spec: RunSpec


class Revoke(Message):
    """Signal ``revoke``: park and end."""

    reason: str


class MemberLost(Message):
    """Signal ``member_lost``: the node is known to be dead; it is fenced, not waited for."""

    node: str
    reason: str


class HoldLease(Message):
    """Signal ``hold``: close an engine's route and pause it (True), or let it serve again (False)."""

    hold: bool


class MemberReport(Message):
    """Signal ``member_report``: a supervisor says how its member is.

    ``version`` and ``url`` are an engine's; ``gang`` is a trainer's. ``seq``
    grows per process start, so that a late report changes nothing.
    """

    node: str
    state: Literal["ready", "down"]
    seq: float
    version: int | None = None
    url: str | None = None
    gang: str | None = None
    detail: str = ""


class LeaseEvent(Message):
    """Signals ``granted``, ``lease_report``, ``revoked`` and ``lease_lost`` to a lease's owner."""

    lease: str
    epoch: int
    role: Role
    members: tuple[str, ...]
    state: Literal["granted", "ready", "down", "revoked", "lost"]
    version: int | None = None
    gang: str | None = None
    reason: str = ""


class LeaseView(Message):
    """Answer of a lease's query ``status``."""

    lease: str
    epoch: int
    phase: str
    version: int | None
    route: str
    waiting_for: str
    last_failure: str
