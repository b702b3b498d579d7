"""``PoolAudit``: run by a schedule every minute; frees what a terminated workflow left behind."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from workflows import calls
from workflows.messages import AuditInput


@workflow.defn(name="PoolAudit", failure_exception_types=[Exception])
class PoolAudit:
    """Compares the pool's leases with living lease workflows and their owners. Returns what it found, one line each."""

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
