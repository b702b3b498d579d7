"""``ProfileNode``: measure a node, keep its device profile, and tell the pool how well it trains."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from workflows import calls
from workflows.messages import NodeProfiled, ProfileTask
from workflows.queues import nodectl_queue

LIMIT_S = 1200.0


class ProfileInput(ProfileTask):
    """``pool``: workflow id of the pool that the node belongs to."""

    pool: str


@workflow.defn(name="ProfileNode", failure_exception_types=[Exception])
class ProfileNode:
    """Id ``node/<node>/profile``. Runs beside whatever the node does, and slows it meanwhile."""

    @workflow.run
    async def run(self, task: ProfileInput) -> NodeProfiled:
        handle = calls.on_node(
            "profile_node",
            ProfileTask(**task.model_dump(exclude={"pool"})),
            NodeProfiled,
            queue=nodectl_queue(task.node),
            limit_s=LIMIT_S,
            attempts=2,
            summary=f"measure {task.node} with {task.model}",
        )
        found = await handle
        await calls.on_control(
            "save_profile", found, type(None), summary=f"profile of {task.node}", limit=timedelta(minutes=2)
        )
        await calls.tell(task.pool, "profiled", found)
        return found
