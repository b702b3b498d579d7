"""A node agent whose trainer ranks are fakes, as a process: ``python agent_process.py STATE NODE TAG[,TAG]``."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from workers.cluster import StateFolder
from workers.node_agent.agent import NodeAgent, boot_id
from workflows.messages import NodeInfo


def rank_command(launch: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / "fake_rank.py"), str(launch)]


async def serve(agent: NodeAgent) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await agent.serve(stop)


def main() -> None:
    state, node, tags = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    info = NodeInfo.model_validate({"id": node, "tags": tags.split(","), "boot_id": boot_id()})
    agent = NodeAgent(StateFolder(Path(state)), info, rank_command=rank_command, look_every_s=0.2)
    asyncio.run(serve(agent))


if __name__ == "__main__":
    main()
