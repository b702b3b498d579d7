"""One way to reach Temporal, and one set of worker options, for every process of ours."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Worker

from storage.errors import DeadlineError
from workers.cluster import ClusterConfig

log = logging.getLogger(__name__)

BEAT = timedelta(seconds=1)
"""Heartbeats reach the server this often: it decides how long an outage goes unnoticed and how fresh details are."""
GRACE = timedelta(seconds=5)


async def connect(cluster: ClusterConfig, *, deadline_s: float = 120.0) -> Client:
    """Connect, waiting for a server that is starting. Raises :class:`DeadlineError`."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return await Client.connect(
                cluster.temporal, namespace=cluster.namespace, data_converter=pydantic_data_converter
            )
        except RuntimeError as error:  # what the SDK raises for "cannot connect"
            if time.monotonic() > end:
                raise DeadlineError(
                    f"Temporal at {cluster.temporal} did not answer within {deadline_s:g} s: {error}"
                ) from error
            log.info("waiting for Temporal at %s: %s", cluster.temporal, error)
            await asyncio.sleep(0.5)


def activity_worker(
    client: Client, queue: str, activities: Sequence[Callable[..., Any]], *, slots: int = 16, grace: timedelta = GRACE
) -> Worker:
    """A worker that only runs activities. ``grace``: how long they may go on when it is shut down."""
    return Worker(
        client,
        task_queue=queue,
        activities=activities,
        max_concurrent_activities=slots,
        max_heartbeat_throttle_interval=BEAT,
        default_heartbeat_throttle_interval=BEAT,
        graceful_shutdown_timeout=grace,
    )
