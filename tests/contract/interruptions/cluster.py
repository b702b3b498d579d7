"""A proxy process and two nodes whose engines are kept by the node agent's own :class:`EngineHost`.

What a lease does with engine and route, and in which order, is done here by :class:`Node`, without a workflow engine:
the proxy, the engines and everything between them are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import psutil

from proxy.client import ControlClient, RouteState
from storage.errors import DeadlineError, EngineError
from storage.ports import free_port
from storage.weights import WeightsStore
from tests.contract.interruptions.model import CONTEXT
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.engines.base import PauseMode
from workers.node_agent.engine import EngineHost
from workers.node_agent.spawn import tail
from workflows.messages import EngineTask, WeightsRef
from workflows.spec import RunSpec

RUN = "proof"
NODES = ("node-a", "node-b")
PROXY_START_S = 60.0
LOAD_TRIES = 3
"""As a lease tells a node to load."""


def run_spec(kind: str, model: Path) -> RunSpec:
    """The run file: two nodes with an engine of this kind."""
    engine: dict[str, Any] = {"kind": kind, "max_running": 32, "kv_tokens": 32768}
    engine |= {"log_tokens": True} if kind == "embedded" else {"device": "cpu"}
    return RunSpec.model_validate(
        {
            "run": RUN,
            "model": {"path": str(model), "max_context": CONTEXT, "tool_parser": "none", "reasoning_parser": "none"},
            "data": {"path": "tasks.jsonl"},
            "reward": {"target": "reward:score"},
            "sampling": {"max_tokens": CONTEXT},
            "nodes": [{"id": node, "tags": ["rollout", "train"]} for node in NODES],
            "engine": engine,
        }
    )


class Cluster:
    """Everything behind the agents; use as ``async with``. ``models``: the weights of even and of odd versions."""

    def __init__(self, folder: Path, kind: str, models: tuple[Path, Path]) -> None:
        self.state = StateFolder(folder)
        self.spec = run_spec(kind, models[0])
        self.models = models
        self.modes: dict[int, PauseMode] = {}
        """How the engines were paused when they took a version."""
        self.ended: dict[tuple[str, int], Literal["preemption", "kill"]] = {}
        """Why an epoch of a node is over."""
        self.store = WeightsStore(self.state.weights(RUN))
        self.newest = self._publish(0)
        self.control: ControlClient
        self.nodes: dict[str, Node] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        """With both engines up; ends every process of it."""
        key, port = secrets.token_hex(16), free_port()
        url = f"http://127.0.0.1:{port}"
        self._write(url, key)
        proxy = await asyncio.to_thread(self._start_proxy, port)
        try:
            async with ControlClient(url, key) as self.control:
                await self._until_healthy(proxy)
                await self.control.create_run(RUN, self.spec.model_dump(mode="json"), "digest")
                self.nodes = {name: Node(self, name) for name in NODES}
                try:
                    await asyncio.gather(*(node.start() for node in self.nodes.values()))
                    yield self
                finally:
                    await asyncio.gather(*(node.close() for node in self.nodes.values()))
        finally:
            proxy.terminate()
            await asyncio.to_thread(proxy.wait)

    async def update(self, mode: PauseMode) -> None:
        """Publish the next version; returns when every node that serves has it."""
        self.modes[self.newest.version + 1] = mode
        self.newest = await asyncio.to_thread(self._publish, self.newest.version + 1)
        await asyncio.gather(*(node.update(mode) for node in self.nodes.values()))

    def _publish(self, version: int) -> WeightsRef:
        folder = self.store.begin(version)
        shutil.copytree(self.models[version % 2], folder, dirs_exist_ok=True)
        published = self.store.commit(version, folder)
        return WeightsRef(version=version, path=published.path, digest=published.digest)

    def _write(self, url: str, key: str) -> None:
        nowhere = "127.0.0.1:9"  # nothing here needs Temporal, and no group becomes a shard
        config = ClusterConfig(
            temporal=nowhere,
            proxy=url,
            s3=nowhere,
            ledger_url=f"sqlite:///{self.state.root / 'ledger.db'}",
            journal_url=f"sqlite:///{self.state.root / 'journal.db'}",
        )
        self.state.write(config, Secrets(control_key=key, s3_access_key="none", s3_secret_key="none"))

    def _start_proxy(self, port: int) -> subprocess.Popen[bytes]:
        self.state.logs.mkdir(parents=True, exist_ok=True)
        with (self.state.logs / "proxy.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "proxy", "--port", str(port), "--state", str(self.state.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def _until_healthy(self, proxy: subprocess.Popen[bytes]) -> None:
        try:
            async with asyncio.timeout(PROXY_START_S):
                while not await self.control.healthy():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            proxy.kill()
            log = tail(self.state.logs / "proxy.log")
            raise DeadlineError(f"the proxy did not start within {PROXY_START_S:g} s:\n{log}") from None


class Node:
    """One node under a lease: its route says at any time what its engine confirmed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.up = False
        """Whether its route is open, or held for an update."""
        self.epoch = 1
        self._cluster = cluster
        self._host = EngineHost(cluster.state, name)
        self._sequence = asyncio.Lock()
        self._version = 0
        self._url = ""
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        async with self._sequence:
            await self._serve()
        self._watch = asyncio.create_task(self._restarting(), name=f"watch {self.name}")

    async def close(self) -> None:
        """End the engine."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._host.end(RUN)
        await self._host.close()

    def check(self) -> None:
        """Raise what ended the watch over the engine."""
        if self._watch is not None and self._watch.done():
            self._watch.result()

    async def update(self, mode: PauseMode) -> None:
        """The weight sync of a node that serves; one that does not will have the newest weights when it does again."""
        if not self.up:
            return
        async with self._sequence:
            if not self.up:
                return
            await self._route("held")
            for left in reversed(range(LOAD_TRIES)):
                try:
                    await self._load(mode)
                    break
                except EngineError:
                    if self._host.resident() is None:  # it died under the update: the watch starts it again
                        self.up = False
                        return
                    if not left:
                        raise
            await self._route("open")

    async def preempt(self) -> None:
        """Training wants the node: what runs on it goes on elsewhere."""
        async with self._sequence:
            self.up = False
            self._cluster.ended[self.name, self.epoch] = "preemption"
            await self._route("closed")
            await self._host.park()

    async def give_back(self) -> None:
        """A new lease, hence a new epoch."""
        async with self._sequence:
            self.epoch += 1
            await self._serve()

    def kill(self, whom: str) -> int:
        """SIGKILL of ``all`` processes of the engine, of the first (``server``), or of the largest ``worker``."""
        resident = self._host.resident()
        assert resident is not None, f"no engine runs on {self.name}"
        self.up = False
        server = psutil.Process(resident.pid)
        workers = sorted(server.children(recursive=True), key=lambda child: child.memory_info().rss)
        victims = {"all": [server, *workers], "server": [server], "worker": workers[-1:] or [server]}[whom]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
        return len(victims)

    def token_log(self) -> Path:
        return self._cluster.state.node(self.name) / "tokens.jsonl"

    async def _restarting(self) -> None:
        while True:
            resident = self._host.resident()
            if resident is not None:
                await self._host.until_dead(resident)
            async with self._sequence:
                self.up = False
                self._cluster.ended[self.name, self.epoch] = "kill"
                await self._route("closed")
                self.epoch += 1  # a lease would keep it; here it tells which segments the kill has cut
                await self._serve()

    async def _serve(self) -> None:
        """Returns with the route open on the newest weights."""
        found = await self._host.ensure(self._task("in_place"))
        self._url, self._version = found.url, found.serving.version if found.serving else 0
        while self._version < self._cluster.newest.version:  # it was published while the engine started
            await self._load("in_place")
        await self._route("open")
        self.up = True

    async def _load(self, mode: PauseMode) -> None:
        self._version = await self._host.load(self._task(mode))

    async def _route(self, state: RouteState) -> None:
        await self._cluster.control.put_route(
            self.name,
            run=RUN,
            node=self.name,
            url=self._url,
            epoch=self.epoch,
            version=self._version,
            state=state,
            engine_kind=self._cluster.spec.engine.kind,
        )

    def _task(self, mode: PauseMode) -> EngineTask:
        spec = self._cluster.spec
        spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"sync_mode": mode})})
        return EngineTask(
            run=RUN, lease=self.name, epoch=self.epoch, node=self.name, spec=spec, weights=self._cluster.newest
        )
