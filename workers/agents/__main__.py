"""The agent and reward worker: ``python -m workers.agents --state DIR --role agent|reward|both``.

Polls ``sf-tag-agent`` and ``sf-tag-reward``; user code runs in processes of its own. Ends on SIGTERM or SIGINT, which
gives back what was running.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from activities.streams import StreamActivities
from proxy.client import ControlClient
from storage.errors import SeamlessFlowError
from workers.cluster import StateFolder
from workers.temporal import activity_worker, connect
from workflows.queues import tag_queue

CONTROL_DEADLINE_S = 600.0


def queue_worker(client: Client, streams: StreamActivities, role: str) -> Worker:
    """The worker for one role, ``agent`` or ``reward``; its streams give back what they run as soon as it stops."""
    work = streams.stream_tasks if role == "agent" else streams.stream_rewards
    return activity_worker(client, tag_queue(role), [work], slots=32, grace=timedelta(0))


async def serve(state: StateFolder, roles: list[str], stop: asyncio.Event) -> None:
    """Serve the roles' queues until ``stop`` is set."""
    cluster = state.cluster()
    client = await connect(cluster)
    key = state.secrets().control_key
    async with (
        ControlClient(cluster.proxy_urls, key, deadline_s=CONTROL_DEADLINE_S) as control,
        contextlib.AsyncExitStack() as workers,
    ):
        streams = StreamActivities(control)
        for role in roles:
            await workers.enter_async_context(queue_worker(client, streams, role))
        await stop.wait()


async def run(state: StateFolder, roles: list[str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(state, roles, stop)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="state folder of the cluster")
    parser.add_argument("--role", choices=("agent", "reward", "both"), default="both")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    roles = ["agent", "reward"] if arguments.role == "both" else [arguments.role]
    try:
        asyncio.run(run(StateFolder(arguments.state), roles))
    except SeamlessFlowError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
