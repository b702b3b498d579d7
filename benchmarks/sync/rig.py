"""One engine behind the real proxy, both as a node and a cluster run them, and new weights for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
from transformers.utils.logging import disable_progress_bar

from benchmarks.proxy.process import Process, python
from benchmarks.sync.measure import Answer, Update, by_request
from examples.models.tiny import new_model, save
from proxy.client import ControlClient, RouteState
from storage.journal import open_journal
from storage.ports import free_port
from storage.weights import WeightsStore, folder_digest
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.node_agent.engine import EngineHost
from workflows.messages import EngineTask, WeightsRef
from workflows.spec import RunSpec

RUN, NODE, LEASE = "bench", "node", "bench-engine-node"
CONTEXT = 1024
KEY = "control-key-of-the-benchmark"
LIMIT_S = 120.0
PLAYS = 500
"""More than there are answers."""


def write_model(folder: Path, seed: int) -> None:
    """The tiny model with random weights and room for long answers."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = new_model(seed)
    model.config.max_position_embeddings = 2 * CONTEXT
    save(model, folder)


class Rig:
    """See the module. Weights are numbered on over all cases of one engine."""

    def __init__(self, kind: str, state: StateFolder, url: str, proxy: Process) -> None:
        self.kind = kind
        self.url = url
        self.control = ControlClient(url, KEY)
        self._state = state
        self._proxy = proxy
        self._host = EngineHost(state, NODE)
        self._version = 0
        self._weights = WeightsStore(state.weights(RUN))

    def spec(self, transfer: str = "disk", mode: str = "in_place") -> RunSpec:
        """A run file that names this engine."""
        engine: dict[str, Any] = {"kind": self.kind, "sync_mode": mode, "transfer": transfer, "max_running": 16}
        engine |= {"log_tokens": True} if self.kind == "embedded" else {}
        engine |= {"device": "cpu"} if self.kind in ("sglang", "vllm") else {}
        return RunSpec.model_validate(
            {
                "run": RUN,
                "model": {"path": str(self._state.root / "model"), "max_context": CONTEXT},
                "data": {"path": "unused.jsonl"},
                "agent": {"max_turns": 1000},
                "reward": {"target": "unused:unused"},
                "nodes": [{"id": NODE, "tags": ["rollout", "train"]}],
                "engine": {"kv_tokens": 32768, **engine},
            }
        )

    async def start(self) -> None:
        model = self._state.root / "model"
        initial = WeightsRef(version=0, path=str(model), digest=folder_digest(model))
        await self.control.create_run(RUN, self.spec().model_dump(mode="json"), "digest")
        await self._host.ensure(self._task(self.spec(), initial))
        await self._route("open")

    async def stop(self) -> None:
        await self._host.end(RUN)
        await self._host.close()
        await self.control.close()
        self._proxy.stop()

    def publish(self) -> WeightsRef:
        """The next version, other weights than all before."""
        self._version += 1
        folder = self._weights.begin(self._version)
        write_model(folder, self._version)
        published = self._weights.commit(self._version, folder)
        return WeightsRef(version=published.version, path=published.path, digest=published.digest)

    async def update(self, weights: WeightsRef, transfer: str, mode: str) -> Update:
        """As a lease does it: hold the route, pause, load, confirm, go on, open the route."""
        held = time.perf_counter()
        await self._route("held", weights.version - 1)
        await self._host.load(self._task(self.spec(transfer, mode), weights))
        await self._route("open", weights.version)
        return Update(weights.version, held, time.perf_counter())

    async def complete(self, answers: dict[str, Answer]) -> None:
        """Add to each answer what the proxy recorded of it, and the engine."""
        logged = by_request(self._token_log()) if self.kind == "embedded" else None
        with self._journal() as journal:
            for name, answer in answers.items():
                turns = (await self.control.session(name))["turns"]
                answer.versions = [version for turn in turns for version, n in turn["versions"] for _ in range(n)]
                records = [r for r in journal.read(name) if r.logprobs is not None]
                answer.recorded = [float(value) for r in records for value in r.logprobs]
                if logged is not None:
                    segments = [segment for turn in turns for segment in turn["segments"]]
                    answer.logged = [v for s in segments for v in logged[s["rid"]][: s["end"] - s["start"]]]

    def made(self) -> int | None:
        """Tokens that the engine says it made since its start."""
        return sum(map(len, by_request(self._token_log()).values())) if self.kind == "embedded" else None

    @contextmanager
    def _journal(self) -> Iterator[Any]:
        journal = open_journal(f"sqlite:///{self._state.root / 'journal.db'}")
        try:
            yield journal
        finally:
            journal.close()

    def _token_log(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in (self._state.node(NODE) / "tokens.jsonl").read_bytes().splitlines()]

    def _task(self, spec: RunSpec, weights: WeightsRef) -> EngineTask:
        return EngineTask(run=RUN, lease=LEASE, epoch=1, node=NODE, spec=spec, weights=weights)

    async def _route(self, state: RouteState, version: int = 0) -> None:
        found = self._host.resident()
        if found is None:
            raise RuntimeError(f"the engine has died; see {self._state.logs}")
        await self.control.put_route(
            LEASE,
            run=RUN,
            node=NODE,
            url=found.url,
            epoch=1,
            version=version,
            state=state,
            engine_kind=self.kind,
        )


def write_script(file: Path) -> None:
    """Long answers, a token every few milliseconds."""
    play = {"ids": [5 + position % 50 for position in range(CONTEXT)]}
    file.write_text(orjson.dumps({"plays": [play] * PLAYS, "delay_s": 0.01}).decode())


@asynccontextmanager
async def rig(kind: str, folder: Path) -> AsyncIterator[Rig]:
    """The engine of a kind, started, with its proxy; both end with the block."""
    state = StateFolder(folder)
    await asyncio.to_thread(write_model, folder / "model", 0)
    if kind == "scripted":
        write_script(folder / "script.json")
        os.environ["SCRIPTED_ENGINE"] = str(folder / "script.json")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = ClusterConfig(
        temporal="127.0.0.1:1",
        proxy=url,
        s3="127.0.0.1:1",  # asked for only when a group's shard is written; there are no groups here
        ledger_url=f"sqlite:///{folder / 'ledger.db'}",
        journal_url=f"sqlite:///{folder / 'journal.db'}",
    )
    state.write(
        config,
        Secrets(control_key=KEY, s3_access_key="unused", s3_secret_key="unused"),  # noqa: S106 - of nothing
    )
    command = python("proxy", "--port", str(port), "--state", str(folder))
    made = Rig(kind, state, url, await Process(command, folder / "proxy.log").answers(url, "/healthz"))
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
