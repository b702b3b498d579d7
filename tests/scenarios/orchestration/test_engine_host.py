"""A node's engine whose load goes wrong ends on weights that are known: those it had, or the last good ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fake_rank import publish

from storage.errors import EngineError, EngineRejected, EngineUnavailable, IntegrityError
from storage.weights import WeightsStore
from workers.cluster import StateFolder
from workers.engines.stream import parse_version
from workers.node_agent.engine import EngineHost
from workers.residency import EngineResidency
from workflows.messages import EngineTask, WeightsRef
from workflows.spec import RunSpec

NODE = "a"


class Node:
    """One node's engine, a scripted one in a process of its own, and the weights it may be told to load."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = StateFolder(root)
        self.script = root / "script.json"
        monkeypatch.setenv("SCRIPTED_ENGINE", str(self.script))
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 128}')
        self.limit_s = 30.0
        self.host = EngineHost(self.state, NODE)

    def plan(self, **loads: str) -> None:
        """What goes wrong, as ``v2="death"``; known to engines that start later."""
        self.script.write_text(json.dumps({"loads": {name[1:]: fault for name, fault in loads.items()}}))

    def spec(self) -> RunSpec:
        return RunSpec.model_validate(
            {
                "run": "r",
                "model": {"path": str(self.state.root / "model")},
                "data": {"path": "tasks.jsonl"},
                "reward": {"target": "reward:score"},
                "nodes": [{"id": NODE, "tags": ["rollout", "train"]}],
                "engine": {"kind": "scripted", "load_limit_s": self.limit_s},
            }
        )

    def task(self, version: int) -> EngineTask:
        path, digest = publish(self.state.weights("r"), version, f"weights {version}")
        weights = WeightsRef(version=version, path=path, digest=digest)
        return EngineTask(run="r", lease="r-engine-a", epoch=1, node=NODE, spec=self.spec(), weights=weights)

    def found(self) -> EngineResidency:
        found = self.host.resident()
        assert found is not None, "no engine runs"
        return found

    def known(self) -> int | None:
        """The version that the node takes its engine to serve."""
        serving = self.found().serving
        return serving.version if serving else None

    async def serves(self) -> tuple[int | None, bool]:
        """The version that the engine says it serves, and whether it makes tokens."""
        url = self.found().url
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{url}/model_info") as info,
            http.get(f"{url}/ready") as ready,
        ):
            return parse_version((await info.json())["weight_version"]), ready.status == 200

    async def until_loading(self) -> None:
        while self.known() is not None:  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    node = Node(tmp_path, monkeypatch)
    node.plan()
    yield node
    await node.host.end("r")
    await node.host.close()


async def test_a_load_that_is_refused_leaves_the_engine_at_work_with_what_it_had(node: Node) -> None:
    node.plan(v2="refuse")
    before = await node.host.ensure(node.task(1))
    with pytest.raises(EngineRejected, match="refuses version 2"):
        await node.host.load(node.task(2))
    assert node.found().pid == before.pid
    assert (node.known(), await node.serves()) == (1, (1, True))


async def test_a_file_that_was_damaged_after_its_publication_is_not_served(node: Node) -> None:
    await node.host.ensure(node.task(1))
    task = node.task(2)
    (Path(task.weights.path) / "model.safetensors").write_text("weights @")
    with pytest.raises(EngineRejected, match="its manifest says"):
        await node.host.load(task)
    assert (node.known(), await node.serves()) == (1, (1, True))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("wrong_checksum", IntegrityError, "was published with"),
        ("death", EngineUnavailable, "update_weights_from_disk"),
        ("hang", EngineUnavailable, "engine.load_limit_s"),
    ],
)
async def test_an_engine_whose_weights_are_in_doubt_is_ended_and_restarts_on_the_last_good_ones(
    node: Node, fault: str, error: type[Exception], message: str
) -> None:
    node.plan(v2=fault)
    node.limit_s = 1.0 if fault == "hang" else 30.0
    before = await node.host.ensure(node.task(1))
    with pytest.raises(error, match=message):
        await node.host.load(node.task(2))
    assert not before.process.alive()

    after = await node.host.ensure(node.task(2))  # which still cannot be loaded
    assert after.pid != before.pid
    assert (node.known(), await node.serves()) == (1, (1, True))


async def test_an_engine_that_is_killed_while_it_loads_restarts_on_the_last_good_weights(node: Node) -> None:
    node.plan(v2="hang")
    before = await node.host.ensure(node.task(1))
    loading = asyncio.create_task(node.host.load(node.task(2)))
    await node.until_loading()
    os.kill(before.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        await loading
    node.plan()
    await node.host.ensure(node.task(1))
    assert (node.known(), await node.serves()) == (1, (1, True))


async def test_a_load_that_is_cut_off_leaves_the_engine_paused_until_its_weights_are_confirmed(node: Node) -> None:
    node.plan(v2="hang")
    await node.host.ensure(node.task(1))
    loading = asyncio.create_task(node.host.load(node.task(2)))
    await node.until_loading()
    loading.cancel()
    await asyncio.wait({loading})
    assert (node.known(), (await node.serves())[1]) == (None, False)
    with pytest.raises(EngineUnavailable, match="stays paused until its weights are confirmed"):
        await node.host.hold(False)

    assert await node.host.load(node.task(3)) == 3
    assert (node.known(), await node.serves()) == (3, (3, True))


async def test_a_node_agent_that_is_killed_while_its_engine_loads_confirms_the_weights_anew(node: Node) -> None:
    node.plan(v2="hang")
    task = node.task(1)
    before = await node.host.ensure(task)
    loading = asyncio.create_task(node.host.load(node.task(2)))
    await node.until_loading()

    node.host, old = EngineHost(node.state, NODE), node.host
    after = await node.host.ensure(task)
    loading.cancel()
    await asyncio.wait({loading})
    await old.close()
    assert after.pid == before.pid
    assert (node.known(), await node.serves()) == (1, (1, True))


async def test_a_version_that_an_engine_may_fall_back_to_outlives_newer_ones(node: Node) -> None:
    node.plan(**{f"v{version}": "wrong_checksum" for version in range(2, 6)})
    await node.host.ensure(node.task(1))
    tasks = [node.task(version) for version in range(2, 6)]
    store = WeightsStore(node.state.weights("r"))
    assert [ref.version for ref in store.collect(1)] == [2, 3, 4]
    with pytest.raises(IntegrityError):
        await node.host.load(tasks[-1])
    store.collect(1)
    await node.host.ensure(tasks[-1])
    assert (node.known(), await node.serves()) == (1, (1, True))

    node.task(6)
    await node.host.load(node.task(6))
    assert [ref.version for ref in store.collect(1)] == [1, 5]
