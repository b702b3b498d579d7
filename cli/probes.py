"""How the supervisor asks a service whether it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable

import aiohttp
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from cli.servers import Probe, temporal_retention_command
from storage.errors import DeadlineError, StorageError
from storage.objects import ObjectStore
from workers.cluster import StateFolder

PAUSE_S = 0.2
ASK_S = 1.0
"""How long the store is asked at a time: whoever gives up meanwhile waits for the thread that asks."""


async def wait_ready(probe: Probe, state: StateFolder, *, since: float) -> None:
    """Return when the service answers. ``since``: unix seconds; a task queue's pollers of before do not count.

    Raises :class:`DeadlineError` after ``probe.limit_s`` seconds.
    """
    ask: Callable[[], Awaitable[bool]] = {
        "http": functools.partial(_http, probe.target),
        "s3": functools.partial(_s3, state),
        "temporal": functools.partial(_temporal, state),
        "queue": functools.partial(_queue, probe.target, state, since),
    }[probe.kind]
    deadline = time.monotonic() + probe.limit_s
    while not await ask():
        if time.monotonic() > deadline:
            raise DeadlineError(f"not ready after {probe.limit_s:.0f} s ({probe.kind} {probe.target})")
        await asyncio.sleep(PAUSE_S)


async def _http(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _s3(state: StateFolder) -> bool:
    """A put and a get: after a restart the server lists buckets before it can serve an object."""

    def ask() -> None:
        with contextlib.closing(ObjectStore.from_state(state, deadline_s=ASK_S)) as store:
            store.ensure_bucket()

    try:
        await asyncio.to_thread(ask)
    except (StorageError, DeadlineError):
        return False
    return True


async def _temporal(state: StateFolder) -> bool:
    """Sets the retention of the namespace, which only works once the server serves it."""
    cluster = state.cluster()
    process = await asyncio.create_subprocess_exec(
        *temporal_retention_command(cluster.temporal, cluster.namespace),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _queue(queue: str, state: StateFolder, since: float) -> bool:
    """Whether a worker has polled ``queue`` for workflow or activity tasks after ``since``."""
    cluster = state.cluster()
    try:
        client = await Client.connect(cluster.temporal, namespace=cluster.namespace)
        for kind in (TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW):
            request = DescribeTaskQueueRequest(
                namespace=cluster.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
            )
            answer = await client.workflow_service.describe_task_queue(request)
            if any(poller.last_access_time.ToSeconds() >= int(since) for poller in answer.pollers):
                return True
    except (RPCError, RuntimeError):  # the SDK raises RuntimeError while there is no server to connect to
        return False
    return False
