"""The ledger: the one table of truth about where each sample of each run stands (I4).

A sample goes queued -> running(attempt) -> finished -> scored -> grouped ->
claimed(step, lineage) -> trained, or ends filtered(cause) or failed(cause)
before it is claimed; one that an update had to leave out ends filtered(cause)
with that step's checkpoint. Every method is one transaction; terminal states are
terminal; a caller with a stale attempt, lineage or epoch gets
:class:`~storage.errors.FencedError`; repeated commits change nothing. Methods
are synchronous and thread-safe: call them from a thread, not from an event loop.
Only proxy and control processes open it.
"""

from __future__ import annotations

from storage.books.balance import Balance
from storage.books.batches import Batches
from storage.books.database import Database
from storage.books.flow import Flows
from storage.books.groups import Groups
from storage.books.profiles import Profiles
from storage.books.records import (
    TRAIN,
    Admission,
    AuditEntry,
    BatchClaim,
    Books,
    Checkpoint,
    EvalResult,
    Failure,
    Flow,
    GroupRef,
    GroupRows,
    Interval,
    ManifestRef,
    ProxyRecord,
    ReleasedSample,
    RewoundStep,
    Route,
    RouteTable,
    RunInfo,
    SampleClaim,
    SampleKey,
    SampleRow,
    ScoreClaim,
    SessionRecord,
    State,
    StepRecord,
    WaitingGroup,
)
from storage.books.retention import Retention
from storage.books.routes import Routes
from storage.books.runs import Runs
from storage.books.samples import Samples
from storage.books.sessions import Sessions
from storage.databases import Durability

__all__ = [
    "TRAIN",
    "Admission",
    "AuditEntry",
    "BatchClaim",
    "Books",
    "Checkpoint",
    "EvalResult",
    "Failure",
    "Flow",
    "GroupRef",
    "GroupRows",
    "Interval",
    "Ledger",
    "ManifestRef",
    "ProxyRecord",
    "ReleasedSample",
    "RewoundStep",
    "Route",
    "RouteTable",
    "RunInfo",
    "SampleClaim",
    "SampleKey",
    "SampleRow",
    "ScoreClaim",
    "SessionRecord",
    "State",
    "StepRecord",
    "WaitingGroup",
]


def evaluated_version(stream: str) -> int | None:
    """The weight version that a stream evaluates; None for the training stream.

    >>> evaluated_version("eval/3")
    3
    """
    return None if stream == TRAIN else int(stream.removeprefix("eval/"))


class Ledger(Runs, Samples, Groups, Flows, Batches, Sessions, Routes, Profiles, Retention, Balance):
    """All parts of the ledger over one database.

    Args:
        url: e.g. ``sqlite:////var/lib/seamlessflow/ledger.db`` for the processes of one host, or
            ``postgresql://user:password@host/database`` for those of several.
        durability: what a commit survives, ``"process"`` (any crash of ours) or ``"power"`` (a power cut too). On
            PostgreSQL it is always the second.
    """

    def __init__(self, url: str, *, durability: Durability = "process") -> None:
        super().__init__(Database(url, durability=durability))

    def close(self) -> None:
        """Close the database."""
        self._db.close()
