"""The control worker: all workflows, and the activities on ledger, object store, routes and pool.

``python -m workers.control --state DIR``. Two of them may run for availability;
none of them holds state.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
)
from temporalio.service import RPCError
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.audit import AuditActivities
from activities.ledger import LedgerActivities
from activities.routes import RouteActivities
from proxy.client import ControlClient
from storage.ledger import Ledger
from storage.objects import ObjectStore
from workers.cluster import StateFolder
from workers.temporal import BEAT, GRACE, connect
from workers.tracking.follower import Follower
from workflows import calls
from workflows.data_stream import DataStream
from workflows.evaluation import Evaluation
from workflows.lease import Lease
from workflows.messages import AuditInput
from workflows.pool_audit import PoolAudit, PoolCommand
from workflows.profile_node import ProfileNode
from workflows.queues import CONTROL_QUEUE
from workflows.resource_pool import ResourcePool
from workflows.rl_step import RlStep
from workflows.training_run import TrainingRun

log = logging.getLogger(__name__)

WORKFLOWS = [TrainingRun, RlStep, Lease, ResourcePool, DataStream, Evaluation, PoolAudit, PoolCommand, ProfileNode]
AUDIT_EVERY = timedelta(seconds=60)
PROXY_LIMIT_S = 20.0


def workflow_runner() -> SandboxedWorkflowRunner:
    """What keeps workflows from the world: they may import no more than these."""
    restrictions = SandboxRestrictions.default.with_passthrough_modules(
        "workflows", "pydantic", "pydantic_core", "annotated_types", "storage.errors"
    )
    return SandboxedWorkflowRunner(restrictions=restrictions)


def control_worker(client: Client, activities: list[Callable[..., Any]]) -> Worker:
    """A worker for every workflow of ours and the given activities, on the control queue."""
    return Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=WORKFLOWS,
        activities=activities,
        workflow_runner=workflow_runner(),
        max_cached_workflows=2000,
        max_concurrent_activities=100,
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=2),
        max_heartbeat_throttle_interval=BEAT,
        default_heartbeat_throttle_interval=BEAT,
        graceful_shutdown_timeout=GRACE,
    )


def control_activities(
    client: Client, state: StateFolder, ledger: Ledger, store: ObjectStore, proxy: ControlClient
) -> list[Any]:
    """Every activity that the control worker runs."""
    books = LedgerActivities(state, ledger, store, proxy)
    routes, audit = RouteActivities(proxy), AuditActivities(client)
    return [
        books.prepare_run,
        books.rewind,
        books.finish_run,
        books.record_command,
        books.save_profile,
        books.pipeline_policy,
        books.admit_step,
        books.group_flow,
        books.pause_admission,
        books.set_rate,
        books.claim_batch,
        books.next_part,
        books.commit_step,
        books.latest_checkpoint,
        books.latest_weights,
        books.open_evaluation,
        books.wait_evaluation,
        routes.put_route,
        routes.close_route,
        audit.audit_pool,
    ]


async def schedule_audit(client: Client, cluster: str) -> None:
    """Have the pool audited every minute; one schedule, however many control workers start."""
    pool = calls.pool_id(cluster)
    action = ScheduleActionStartWorkflow(
        "PoolAudit", AuditInput(pool=pool), id=f"{pool}/audit", task_queue=CONTROL_QUEUE
    )
    schedule = Schedule(
        action=action,
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=AUDIT_EVERY)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=AUDIT_EVERY),
    )
    try:
        await client.create_schedule(f"audit/{cluster}", schedule)
    except ScheduleAlreadyRunningError:
        return
    except RPCError as error:  # the audit is a safety net: the next control worker tries again
        log.warning("the pool's audit could not be scheduled: %s", error)


async def serve(state: StateFolder, stop: asyncio.Event) -> None:
    """Serve the control queue until ``stop`` is set."""
    cluster = state.cluster()
    client = await connect(cluster)
    ledger = await asyncio.to_thread(Ledger, cluster.ledger_url)
    store = ObjectStore.from_state(state)
    try:
        await asyncio.to_thread(store.ensure_bucket)
        key = state.secrets().control_key
        async with (
            ControlClient(cluster.proxy_urls, key, deadline_s=PROXY_LIMIT_S) as proxy,
            control_worker(client, control_activities(client, state, ledger, store, proxy)),
        ):
            await schedule_audit(client, cluster.cluster)
            await Follower(ledger, state.tracking).follow(stop)
    finally:
        store.close()
        ledger.close()


async def _main(state: StateFolder) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(state, stop)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="state folder of the cluster")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_main(StateFolder(arguments.state)))


if __name__ == "__main__":
    main()
