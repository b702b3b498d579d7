"""The node agent's life: find old work, serve the node's queues, register, keep saying that it is alive, reap."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from activities.node import NodeActivities
from workers.cluster import StateFolder
from workers.node_agent.engine import EngineHost
from workers.node_agent.meter import RateMeter
from workers.node_agent.shared import SharedWork
from workers.node_agent.tokens import TaskTokens
from workers.node_agent.trainer import TrainerHost, rank_command
from workers.residency import EpochMemory
from workers.temporal import activity_worker, connect
from workflows import calls
from workflows.messages import GangRole, NodeInfo, NodeSeen, NodeStatus
from workflows.queues import CONTROL_QUEUE, node_queue, nodectl_queue
from workflows.resource_pool import PoolState
from workflows.scheduling.pool import Pool

log = logging.getLogger(__name__)

GANG_ROLES: tuple[GangRole, ...] = ("trainer", "reference", "critic")
SEEN_EVERY_S = 10.0
REAP_EVERY_S = 30.0
LOOK_EVERY_S = 5.0
"""Between two looks at the node's tags, for its shared work."""
RETRY_S = 0.5


class NodeAgent:
    """One node. ``info`` is what it registers; epoch and boot id are added here."""

    def __init__(
        self,
        state: StateFolder,
        info: NodeInfo,
        *,
        host: str = "127.0.0.1",
        rank_command: Callable[[Path], list[str]] = rank_command,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._state = state
        folder = state.node(info.id)
        self._epochs = EpochMemory(folder / "epoch")
        self._tokens = TaskTokens(folder / "tasks")
        self._engine = EngineHost(state, info.id, host=host)
        self._gangs = {
            role: TrainerHost(state, info.id, role=role, host=host, command=rank_command) for role in GANG_ROLES
        }
        self._meter = RateMeter(folder)
        self._shared = SharedWork(state, info.id)
        self._look_every_s = look_every_s
        self._info = info
        self._suspects: set[str] = set()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set; engine and ranks of the node live on, its shared work is given back."""
        client = await connect(self._state.cluster())
        await self._tokens.fail_old(client)
        node = self._info.id
        activities = NodeActivities(client, node, self._engine, self._gangs, self._epochs, self._tokens, self._meter)
        work: list[Callable[..., Any]] = [
            activities.engine_supervise,
            activities.trainer_supervise,
            activities.train_step,
            activities.accumulate,
            activities.compute_columns,
        ]
        control: list[Callable[..., Any]] = [
            activities.engine_load,
            activities.engine_hold,
            activities.gang_probe,
            activities.warm_ranks,
            activities.end_residency,
            activities.profile_node,
        ]
        async with (
            activity_worker(client, node_queue(node), work, slots=8),
            activity_worker(client, nodectl_queue(node), control, slots=8),
        ):
            await self._register(client)
            loops = [
                asyncio.create_task(self._keep_seen(client)),
                asyncio.create_task(self._reap(client)),
                asyncio.create_task(self._share(client)),
                asyncio.create_task(self._meter.watch(self._engine.load_now)),
            ]
            await stop.wait()
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        await self._shared.keep(())
        await self._engine.close()

    async def _register(self, client: Client) -> None:
        """Update-with-start: the pool exists afterwards, and knows the node."""
        info = self._info.model_copy(update={"epoch": self._epochs.epoch})
        cluster = self._state.cluster().cluster
        while True:
            start: WithStartWorkflowOperation[Any, None] = WithStartWorkflowOperation(
                "ResourcePool",
                PoolState(pool=Pool(cluster=cluster)),
                id=calls.pool_id(cluster),
                task_queue=CONTROL_QUEUE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                static_summary=f"nodes of cluster {cluster}",
            )
            try:
                status = await client.execute_update_with_start_workflow(
                    "add_node", info, start_workflow_operation=start, result_type=NodeStatus
                )
                log.info("registered: %s", status)
                if self._meter.profile is not None:
                    pool = client.get_workflow_handle(calls.pool_id(cluster))
                    await pool.signal("profiled", self._meter.profile.model_copy(update={"node": info.id}))
                return
            except (RPCError, WorkflowUpdateFailedError) as error:
                log.warning("registering node %s failed, trying again: %s", info.id, error)
                await asyncio.sleep(RETRY_S)

    async def _keep_seen(self, client: Client) -> None:
        pool = calls.pool_id(self._state.cluster().cluster)
        while True:
            await asyncio.sleep(SEEN_EVERY_S)
            try:
                await client.get_workflow_handle(pool).signal("node_seen", self._seen())
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:  # the pool was terminated: start it again
                    await self._register(client)
                else:
                    log.warning("the pool was not told that %s is alive: %s", self._info.id, error)

    def _seen(self) -> NodeSeen:
        shares = sorted(self._shared.serving())
        seen = {"node": self._info.id, "boot_id": self._info.boot_id, "rates": self._meter.rates(), "shares": shares}
        return NodeSeen.model_validate(seen)

    async def _share(self, client: Client) -> None:
        """Do the shared work of the node's tags as the pool knows them: people change them there."""
        pool = client.get_workflow_handle(calls.pool_id(self._state.cluster().cluster))
        told: frozenset[str] = frozenset()
        while True:
            try:
                await self._shared.keep(await pool.query("shared_work", self._info.id, result_type=list[str]))
                if self._shared.serving() != told:
                    told = self._shared.serving()
                    await pool.signal("node_seen", self._seen())
            except (RPCError, WorkflowQueryFailedError) as error:  # what runs goes on; it is looked at again
                log.warning("the pool did not say which work node %s shares: %s", self._info.id, error)
            await asyncio.sleep(self._look_every_s)

    async def _reap(self, client: Client) -> None:
        """End processes whose run has ended; never a parked process of a living run."""
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            with contextlib.suppress(RPCError):
                await self.reap_once(client)

    async def reap_once(self, client: Client) -> None:
        """One look; a run has to be found ended twice in a row before its processes are."""
        gangs = [gang.resident() for gang in self._gangs.values()]
        runs = {found.run for found in (self._engine.resident(), *gangs) if found is not None}
        ended = {run for run in runs if await _has_ended(client, calls.run_id(run))}
        for run in sorted(ended & self._suspects):
            log.info("run %s has ended: its processes on %s are ended too", run, self._info.id)
            await self._engine.end(run)
            for gang in self._gangs.values():
                await gang.end(run)
        self._suspects = ended


def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def _has_ended(client: Client, workflow_id: str) -> bool:
    try:
        description = await client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return True
        raise
    return description.status is not WorkflowExecutionStatus.RUNNING
