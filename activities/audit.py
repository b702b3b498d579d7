"""The pool's audit: leases without a living workflow or owner, data streams without a run."""

from __future__ import annotations

import asyncio

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.beat import beating
from workflows import calls
from workflows.messages import AuditInput, LeaseStatus, PoolStatus, ReleaseLease, Revoke, WithdrawRequest

CONFIRM_S = 3.0


class AuditActivities:
    """Acts on what it finds by signals only, so a repeated audit changes nothing."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name="audit_pool")
    async def audit_pool(self, task: AuditInput) -> list[str]:
        """Release leases whose workflow has ended, revoke those whose owner has; the same for requests and streams."""
        return await beating(self._audit(task.pool))

    async def _audit(self, pool: str) -> list[str]:
        suspects = await self._dead_leases(pool)
        if suspects:  # a lease that is just being granted or released looks the same for a moment
            await asyncio.sleep(CONFIRM_S)
            suspects = [lease for lease in await self._dead_leases(pool) if lease in suspects]
        found = []
        for lease in suspects:
            release = ReleaseLease(lease=lease.lease, epoch=lease.epoch)
            await self._client.get_workflow_handle(pool).signal("release", release)
            found.append(f"released {lease.lease}/{lease.epoch}: its workflow has ended")
        return found + await self._ownerless(pool) + await self._orphans(pool) + await self._streams_without_run()

    async def _leases(self, pool: str) -> tuple[LeaseStatus, ...]:
        status = await self._status(pool)
        return status.leases if status else ()

    async def _status(self, pool: str) -> PoolStatus | None:
        if not await self._runs(pool):
            return None
        status: PoolStatus = await self._client.get_workflow_handle(pool).query("status", result_type=PoolStatus)
        return status

    async def _orphans(self, pool: str) -> list[str]:
        """Requests that wait for a workflow which has ended: they would reserve nodes for nobody."""
        status = await self._status(pool)
        found = []
        for request in status.requests if status else ():
            if request.waiting_for and not await self._runs(request.owner):
                order = WithdrawRequest(request_id=request.request_id, reason=f"its owner {request.owner} has ended")
                await self._client.get_workflow_handle(pool).signal("withdraw", order)
                found.append(f"withdrew {request.request_id}: its owner has ended")
        return found

    async def _dead_leases(self, pool: str) -> list[LeaseStatus]:
        leases = await self._leases(pool)
        return [lease for lease in leases if not await self._runs(calls.lease_id(lease.lease, lease.epoch))]

    async def _ownerless(self, pool: str) -> list[str]:
        found = []
        for lease in await self._leases(pool):
            if lease.state == "held" and not await self._runs(lease.owner):
                handle = self._client.get_workflow_handle(calls.lease_id(lease.lease, lease.epoch))
                await handle.signal("revoke", Revoke(reason=f"its owner {lease.owner} has ended"))
                found.append(f"revoked {lease.lease}/{lease.epoch}: its owner has ended")
        return found

    async def _streams_without_run(self) -> list[str]:
        found = []
        query = "WorkflowType = 'DataStream' AND ExecutionStatus = 'Running'"
        async for stream in self._client.list_workflows(query):
            if not await self._runs(stream.id.removesuffix("/data")):
                await self._client.get_workflow_handle(stream.id).signal("stop")
                found.append(f"stopped {stream.id}: its run has ended")
        return found

    async def _runs(self, workflow_id: str) -> bool:
        try:
            description = await self._client.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise
        return description.status is WorkflowExecutionStatus.RUNNING
