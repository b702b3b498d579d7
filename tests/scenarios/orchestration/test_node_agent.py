"""Real node agents with real engine processes (scripted) and ranks (fakes): what survives which kill."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_rank import BUSY, MOVES, SLOW, publish
from fake_world import NODES, FakeWorld, eventually
from temporalio.client import Client

from storage.weights import WeightsStore
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.residency import EngineResidency, GangResidency
from workflows.messages import CheckpointRef, WeightsRef
from workflows.spec import RunSpec

AGENT = Path(__file__).parents[2] / "support" / "agent_process.py"


class Nodes:
    """Two node agents on a state folder of their own, beside a world that plays the rest."""

    def __init__(self, world: FakeWorld, state: StateFolder) -> None:
        self.world = world
        self.state = state
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def script(self, node: str, script: str) -> None:
        """What goes wrong with the engines that start on a node from now on."""
        (self.state.root / f"script-{node}.json").write_text(script)

    def start_agent(self, node: str) -> None:
        command = [sys.executable, str(AGENT), str(self.state.root), node, ",".join(sorted(NODES[node]))]
        environment = {**os.environ, "SCRIPTED_ENGINE": str(self.state.root / f"script-{node}.json")}
        with (self.state.root / f"agent-{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill_agent(self, node: str) -> None:
        self.agents[node].kill()
        self.agents[node].wait()

    def registered(self, node: str) -> int:
        """How often the node's agents have registered."""
        return (self.state.root / f"agent-{node}.log").read_text().count("registered: ")

    def engine(self, node: str) -> EngineResidency | None:
        found = EngineResidency.read(self.state.node(node) / "engine.json")
        return found if found is not None and found.process.alive() else None

    def pid(self, node: str) -> int:
        found = self.engine(node)
        assert found is not None, f"no engine on {node}"
        return found.pid

    def gang(self) -> GangResidency | None:
        return GangResidency.read(self.state.node("a") / "gang.json")

    def serving(self, node: str, version: int) -> bool:
        found = self.engine(node)
        return found is not None and found.serving is not None and found.serving.version == version

    def moves(self) -> list[str]:
        """What the ranks did, in order."""
        path = self.state.root / MOVES
        return path.read_text().split() if path.exists() else []

    def version(self) -> int:
        return self.world.checkpoint.version

    def spec(self, steps: int) -> RunSpec:
        return self.world.spec(
            model={"path": str(self.state.root / "model")},
            data={"path": "/tasks.jsonl"},
            engine={"kind": "scripted"},
            pipeline={"steps": steps},
        )

    def end(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        for node in NODES:
            found = self.engine(node)
            pids = [found.pid] if found else []
            gang = GangResidency.read(self.state.node(node) / "gang.json")
            pids += [process.pid for process in gang.processes if process.alive()] if gang else []
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def nodes(client: Client, temporal_address: str, tmp_path: Path) -> AsyncIterator[Nodes]:
    world = FakeWorld(client, plays_nodes=False)
    state = StateFolder(tmp_path)
    cluster = ClusterConfig(
        cluster=world.run, temporal=temporal_address, proxy="http://unused", s3="x", ledger_url="x", journal_url="x"
    )
    state.write(cluster, Secrets(control_key="k", s3_access_key="a", s3_secret_key="s"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 128}')
    path, digest = publish(tmp_path / "initial", 0, "initial")
    world.checkpoint = CheckpointRef(
        lineage=0, step=-1, version=0, path=None, digest="", weights=WeightsRef(version=0, path=path, digest=digest)
    )
    nodes = Nodes(world, state)
    async with world.running():
        try:
            for node in NODES:
                nodes.script(node, "{}")
                nodes.start_agent(node)
            yield nodes
        finally:
            nodes.end()


async def test_engines_and_ranks_outlive_steps_and_kills_of_others_and_end_with_the_run(nodes: Nodes) -> None:
    world = nodes.world
    run = await world.start(nodes.spec(steps=3))
    await eventually(lambda: nodes.serving("b", 1), "version 1")
    world.claims_open.clear()
    other, gang, victim = nodes.pid("a"), nodes.gang(), nodes.pid("b")
    assert gang is not None

    # An engine that is killed comes back on the version it served last; nobody else is touched.
    os.kill(victim, signal.SIGKILL)
    await world.until("route b closed")
    await eventually(lambda: nodes.serving("b", nodes.version()), "a new engine")
    assert nodes.pid("b") != victim
    assert nodes.pid("a") == other
    assert nodes.gang() == gang
    world.claims_open.set()

    assert (await run.result()).version == 3
    assert (nodes.engine("a"), nodes.engine("b"), nodes.gang()) == (None, None, None)


async def test_an_agent_that_is_killed_finds_its_engine_and_its_running_update_again(nodes: Nodes) -> None:
    world = nodes.world
    nodes.state.root.joinpath(SLOW).touch()
    run = await world.start(nodes.spec(steps=1))
    await eventually((nodes.state.root / BUSY).exists, "an update in work")
    await eventually(lambda: all(nodes.engine(node) is not None for node in NODES), "both engines")
    engines, gang = [nodes.pid("a"), nodes.pid("b")], nodes.gang()
    for node in NODES:
        nodes.kill_agent(node)
        nodes.start_agent(node)
    await eventually(lambda: all(nodes.registered(node) == 2 for node in NODES), "both agents")
    assert [nodes.pid("a"), nodes.pid("b")] == engines
    assert nodes.gang() == gang
    nodes.state.root.joinpath(SLOW).unlink()

    assert (await run.result()).version == 1
    assert "rewind to lineage 1" not in world.log


async def test_a_step_whose_rank_is_killed_gives_the_same_weights_when_it_is_replayed(nodes: Nodes) -> None:
    world = nodes.world
    slow = nodes.state.root / SLOW
    slow.touch()
    run = await world.start(nodes.spec(steps=2))
    await eventually((nodes.state.root / BUSY).exists, "an update in work")
    gang = nodes.gang()
    assert gang is not None
    os.kill(gang.processes[0].pid, signal.SIGKILL)
    await world.until("rewind to lineage 1")
    slow.unlink()

    assert (await run.result()).version == 2
    published = WeightsStore(nodes.state.weights(world.run)).latest()
    assert published is not None
    assert published.digest == expected_digest(nodes, steps=2)


async def test_an_engine_that_new_weights_kill_restarts_on_the_old_ones_and_takes_the_next(nodes: Nodes) -> None:
    nodes.script("b", '{"loads": {"1": "death"}}')
    world = nodes.world
    run = await world.start(nodes.spec(steps=3))
    await eventually(lambda: nodes.serving("b", 0), "the initial weights on b")
    first = nodes.pid("b")
    await world.until("claim 0.1")
    world.claims_open.clear()
    await world.until("route b open 2")
    world.claims_open.set()

    assert (await run.result()).version == 3
    assert "route b open 1" not in world.log
    assert world.position("route b held 0") < world.position("route b closed") < world.position("route b open 2")
    assert f"pid {first}) has died" in (nodes.state.root / "agent-b.log").read_text()


async def test_ranks_are_parked_whenever_their_node_rolls_out_and_unparked_before_each_update(nodes: Nodes) -> None:
    world = nodes.world
    run = await world.start(nodes.spec(steps=3))
    assert (await run.result()).version == 3
    moves = nodes.moves()
    assert moves.count("update") == 3
    places = [move for move in moves if move != "update"]
    assert places == ["park", "unpark"] * (len(places) // 2) + ["park"] * (len(places) % 2), "each once, in turn"


async def test_ranks_that_a_killed_agent_left_parked_are_unparked_once_by_the_next(nodes: Nodes) -> None:
    world = nodes.world
    world.claims_open.clear()
    run = await world.start(nodes.spec(steps=1))
    await eventually(lambda: nodes.moves() == ["park"], "ranks that have started and are parked")
    nodes.kill_agent("a")
    nodes.start_agent("a")
    await eventually(lambda: nodes.registered("a") == 2, "the new agent")
    world.claims_open.set()

    assert (await run.result()).version == 1
    assert nodes.moves()[:3] == ["park", "unpark", "update"]
    assert "rewind to lineage 1" not in world.log


def expected_digest(nodes: Nodes, steps: int) -> str:
    """The weights of an undisturbed run."""
    content = "initial"
    for step in range(steps):
        content = hashlib.sha256((content + f"{step:064d}").encode()).hexdigest()
    _, digest = publish(nodes.state.root / "expected", steps, content)
    return digest
