"""``PoolAudit`` frees what a terminated workflow left behind; ``PoolCommand`` notes what a person asked of the pool."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from workflows import calls
from workflows.messages import AuditEntry, AuditInput


@workflow.defn(name="PoolAudit", failure_exception_types=[Exception])
class PoolAudit:
    """Run by a schedule every minute: compares the pool's leases and requests with living workflows.

    Returns what it found, one line each.
    """

    @workflow.run
    async def run(self, task: AuditInput) -> list[str]:
        handle = calls.on_control(
            "audit_pool",
            task,
            list[str],
            limit=timedelta(minutes=2),
            summary=f"leases of {task.pool} against workflows",
        )
        return await handle


@workflow.defn(name="PoolCommand", failure_exception_types=[Exception])
class PoolCommand:
    """Writes one human command on the pool into the audit table; the pool itself runs no activities."""

    @workflow.run
    async def run(self, entry: AuditEntry) -> None:
        await calls.on_control("record_command", entry, type(None), summary=f"audit: {entry.what}")
