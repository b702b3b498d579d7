"""Nodes with the tags ``agent`` and ``reward``: a real node agent, its real workers, and a pool that people re-tag."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_world import FakeWorld, eventually
from temporalio.client import Client

from cli.why import why_node
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.node_agent.shared import SharedResidency
from workflows.messages import DrainNode, NodeStatus, SetTags

AGENT = Path(__file__).parents[2] / "support" / "agent_process.py"
NODE = "c"
pytestmark = pytest.mark.timeout(180)


class Node:
    """A node agent on a state folder of its own, beside a world that plays the control worker."""

    def __init__(self, world: FakeWorld, state: StateFolder) -> None:
        self.world, self.state = world, state
        self.start_agent()

    def start_agent(self) -> None:
        command = [sys.executable, str(AGENT), str(self.state.root), NODE, "agent,reward"]
        with (self.state.root / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(command, stdout=log, stderr=log)

    def worker(self, tag: str) -> int | None:
        """Pid of the worker for a tag's shared work, while it lives."""
        found = SharedResidency.read(self.state.node(NODE) / f"shared-{tag}.json")
        return found.process.pid if found is not None and found.process.alive() else None

    async def tag(self, *tags: str) -> None:
        order = SetTags.model_validate({"node": NODE, "tags": tags, "actor": "ann"})
        await self.world.pool().execute_update("set_tags", order)

    async def until(self, what: str, is_so: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Wait until the pool's status shows it."""
        status = None
        for _ in range(600):
            status = (await self.world.pool_status()).node(NODE)
            if status is not None and is_so(status):
                return status
            await asyncio.sleep(0.05)
        log = (self.state.root / "agent.log").read_text()
        raise AssertionError(f"the node is not shown {what}: {status}; its agent says:\n{log}")

    def end(self) -> None:
        self.agent.kill()
        self.agent.wait()
        for tag in ("agent", "reward"):
            if (pid := self.worker(tag)) is not None:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def node(client: Client, temporal_address: str, tmp_path: Path) -> AsyncIterator[Node]:
    world = FakeWorld(client)
    state = StateFolder(tmp_path)
    cluster = ClusterConfig(
        cluster=world.run, temporal=temporal_address, proxy="http://unused", s3="x", ledger_url="x", journal_url="x"
    )
    state.write(cluster, Secrets(control_key="k", s3_access_key="a", s3_secret_key="s"))
    async with world.running():
        node = Node(world, state)
        try:
            yield node
        finally:
            node.end()


async def test_a_node_does_the_shared_work_of_its_tags_and_is_listed_by_tag_and_by_what_it_does(node: Node) -> None:
    status = await node.until("to share both", lambda n: n.shares == ("agent", "reward"))
    assert (status.activity, status.lease, status.does) == ("free", None, "agent, reward")
    pool = await node.world.pool_status()
    assert [n.node for n in pool.tagged("reward")] == [NODE]
    assert [n.node for n in pool.tagged("reward", "reward")] == [NODE]
    assert [n.node for n in pool.tagged(activity="agent")] == [NODE]
    assert pool.tagged("reward", "rollout") == []
    assert await node.world.pool().query("tagged", "agent") == [NODE]
    assert "Beside that it runs agents for every run that needs it" in why_node(pool, status)


async def test_a_node_is_re_tagged_to_and_from_shared_work_while_it_lives(node: Node) -> None:
    await node.until("to share both", lambda n: n.shares == ("agent", "reward"))
    agent, reward = node.worker("agent"), node.worker("reward")

    await node.tag("agent", "rollout")
    await node.until("to share agents only", lambda n: n.shares == ("agent",) and n.tags == ("agent", "rollout"))
    assert (node.worker("agent"), node.worker("reward")) == (agent, None)

    await node.tag("rollout")
    await node.until("to share nothing", lambda n: n.shares == ())
    assert node.worker("agent") is None

    await node.tag("reward")
    await node.until("to share rewards again", lambda n: n.shares == ("reward",))
    assert node.worker("reward") not in (None, reward)


async def test_a_drained_node_shares_nothing_until_the_drain_is_undone(node: Node) -> None:
    await node.until("to share both", lambda n: n.shares == ("agent", "reward"))
    await node.world.pool().execute_update("drain", DrainNode(node=NODE))
    await node.until("to share nothing", lambda n: n.health == "draining" and n.shares == ())
    await node.world.pool().execute_update("drain", DrainNode(node=NODE, undo=True))
    await node.until("to share both again", lambda n: n.shares == ("agent", "reward"))


async def test_a_worker_that_is_killed_is_started_again_and_one_whose_agent_is_killed_is_found_again(
    node: Node,
) -> None:
    await node.until("to share both", lambda n: n.shares == ("agent", "reward"))
    agent, reward = node.worker("agent"), node.worker("reward")
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    await eventually(lambda: node.worker("agent") not in (None, agent), "another worker")

    node.agent.kill()
    node.agent.wait()
    again = node.worker("agent")
    node.start_agent()
    await eventually(lambda: (node.state.root / "agent.log").read_text().count("registered: ") == 2, "the new agent")
    await node.until("to share both", lambda n: n.shares == ("agent", "reward"))
    assert (node.worker("agent"), node.worker("reward")) == (again, reward)


async def test_an_agent_that_ends_in_order_ends_its_workers(node: Node) -> None:
    await node.until("to share both", lambda n: n.shares == ("agent", "reward"))
    node.agent.send_signal(signal.SIGTERM)
    assert node.agent.wait(timeout=60) == 0
    assert (node.worker("agent"), node.worker("reward")) == (None, None)
