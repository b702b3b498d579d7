"""Command line: ``python -m workers.node_agent --state DIR --node n1 --tags rollout,train``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from workers.cluster import StateFolder
from workers.node_agent.agent import NodeAgent, boot_id
from workflows.messages import NodeInfo


def main() -> None:
    """Serve one node until SIGTERM or SIGINT; its engine and ranks live on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="state folder of the cluster")
    parser.add_argument("--node", required=True, help="id of this node")
    parser.add_argument("--tags", default="rollout", help="capability tags, separated by commas")
    parser.add_argument(
        "--train-priority", type=float, help="order in which nodes are taken for training; default: as measured"
    )
    parser.add_argument("--advertise", default="127.0.0.1", help="address under which nodes and proxy reach it")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    info = NodeInfo.model_validate(
        {
            "id": arguments.node,
            "tags": [tag for tag in arguments.tags.split(",") if tag],
            "train_priority": arguments.train_priority,
            "boot_id": boot_id(),
        }
    )
    asyncio.run(_serve(NodeAgent(StateFolder(arguments.state), info, host=arguments.advertise)))


async def _serve(agent: NodeAgent) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await agent.serve(stop)


if __name__ == "__main__":
    main()
