"""What is measured: our proxy at both durability levels, its peers, and the engine without any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.proxy.client import post
from benchmarks.proxy.process import Process, python
from benchmarks.proxy.traffic import MODEL
from proxy.client import ControlClient
from storage.ports import free_port
from workers.cluster import ClusterConfig, Secrets, StateFolder

CONTEXT = 131_072
_PATH = "/v1/chat/completions"
PROBE = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
"""A request that every contestant answers once it is ready."""
_KEY = "control-key-of-the-benchmark"
_UNUSED = "unused"


class Contestant(Protocol):
    """Something an agent can send its requests to."""

    name: str
    records: bool
    """Later turns build on what it keeps of earlier ones, so those must be sent too."""
    direct: bool
    """Nothing stands between agent and engine."""
    url: str
    process: Process

    async def sessions(self, count: int) -> Sequence[Session]: ...

    async def finish(self, sessions: Sequence[Session]) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Session:
    """Where one session's requests go."""

    url: str
    path: str
    key: str = "none"
    id: str = ""

    def request(self, body: bytes) -> bytes:
        return post(self.url, self.path, body, self.key)


class Plain:
    """A server without sessions: the engine itself, or a router."""

    records = False

    def __init__(self, name: str, url: str, process: Process, *, direct: bool = False) -> None:
        self.name = name
        self.url = url
        self.process = process
        self.direct = direct

    async def started(self) -> None:
        """Wait until it answers. Raises RuntimeError if it does not."""
        await self.process.answers(self.url, _PATH, PROBE)

    async def sessions(self, count: int) -> Sequence[Session]:
        return [Session(self.url, _PATH)] * count

    async def finish(self, sessions: Sequence[Session]) -> None:
        pass

    async def close(self) -> None:
        self.process.stop()


class Gateway(Plain):
    """rllm-model-gateway: a session is a part of the path. Its traces lie in ``database``."""

    def __init__(self, name: str, url: str, process: Process, database: Path) -> None:
        super().__init__(name, url, process)
        self.database = database
        self._count = 0

    async def sessions(self, count: int) -> Sequence[Session]:
        first, self._count = self._count, self._count + count
        return [Session(self.url, f"/sessions/s{number}{_PATH}") for number in range(first, self._count)]


class Ours:
    """``python -m proxy`` as a cluster starts it, with one run and one route."""

    records = True
    direct = False

    def __init__(self, name: str, url: str, process: Process, folder: Path, engine: str) -> None:
        self.name = name
        self.url = url
        self.process = process
        self.journal = folder / "journal.db"
        self._engine = engine
        self.control = ControlClient(url, _KEY)

    @classmethod
    async def start(cls, name: str, folder: Path, engine: str, model: Path, durability: Any) -> Ours:
        folder.mkdir()  # noqa: ASYNC240  # once, before anything is measured
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        config = ClusterConfig(
            temporal="127.0.0.1:1",
            proxy=url,
            s3="127.0.0.1:1",  # asked for only when a group's shard is written; there are no groups here
            ledger_url=f"sqlite:///{folder / 'ledger.db'}",
            journal_url=f"sqlite:///{folder / 'journal.db'}",
            durability=durability,
        )
        StateFolder(folder).write(config, Secrets(control_key=_KEY, s3_access_key=_UNUSED, s3_secret_key=_UNUSED))
        command = python("proxy", "--port", str(port), "--state", str(folder))
        process = await Process(command, folder / "proxy.log").answers(url, "/healthz")
        ours = cls(name, url, process, folder, engine)
        await ours.control.create_run(MODEL, _run(model), "digest")
        await ours.route("open", 0)
        return ours

    async def route(self, state: Any, version: int) -> None:
        """Open, hold or close the only route."""
        await self.control.put_route(
            "lease",
            run=MODEL,
            node="node",
            url=self._engine,
            epoch=1,
            version=version,
            state=state,
            engine_kind="scripted",
        )

    async def sessions(self, count: int) -> Sequence[Session]:
        made = [await self.control.create_session(MODEL) for _ in range(count)]
        return [Session(self.url, _PATH, item["api_key"], item["session"]) for item in made]

    async def finish(self, sessions: Sequence[Session]) -> None:
        """Close them. Raises ValueError if a turn did not go on from the one before: then it was no later turn."""
        for session in sessions:
            turns = (await self.control.session(session.id))["turns"]
            strays = [turn for turn in turns[1:] if turn["outcome"] != "extend"]
            if strays:
                raise ValueError(
                    f"turn {strays[0]['turn']} of {session.id}: {strays[0]['outcome']} {strays[0]['reason']}"
                )
            await self.control.finish_session(session.id)

    async def close(self) -> None:
        await self.control.close()
        self.process.stop()


async def peers(environments: Path, folder: Path, engine: str) -> tuple[list[Plain], dict[str, str]]:
    """The peers that run here, and for each other one the reason why not."""
    running: list[Plain] = []
    missing: dict[str, str] = {}
    for name, command in _peer_commands(folder, engine).items():
        home = environments / name
        if not (home / "bin" / "python").exists():
            missing[name] = f"{home} does not exist: make bench-proxy-env"
            continue
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        process = Process([str(home / "bin" / "python"), *command, "--port", str(port)], folder / f"{name}.log")
        traces = folder / "traces.db"
        peer = Gateway(name, url, process, traces) if name == "rllm-model-gateway" else Plain(name, url, process)
        try:
            await peer.started()
        except RuntimeError as error:
            await peer.close()
            missing[name] = str(error)
            continue
        running.append(peer)
    return running, missing


def _peer_commands(folder: Path, engine: str) -> dict[str, list[str]]:
    """Defaults, but quiet, on loopback, and routers with the policy that costs least: there is one engine."""
    common = ["--host", "127.0.0.1"]
    router = ["--worker-urls", engine, "--policy", "round_robin", *common]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port"]
    traces = ["--worker", f"{engine}/v1", "--db-path", str(folder / "traces.db"), "--log-level", "warning"]
    return {
        "rllm-model-gateway": ["-m", "rllm_model_gateway", *traces, *common],
        "smg": ["-m", "smg.launch_router", *router, *metrics, str(free_port()), "--log-level", "error"],
        "sglang-router": [
            "-m",
            "sglang_router.launch_router",
            *router,
            *metrics,
            str(free_port()),
            "--log-level",
            "error",
        ],
        "vllm-router": ["-m", "vllm_router.launch_router", *router, *metrics, str(free_port()), "--log-level", "error"],
    }


def _run(model: Path) -> dict[str, Any]:
    return {
        "run": MODEL,
        "model": {"path": str(model), "max_context": CONTEXT, "tool_parser": "hermes"},
        "data": {"path": "unused.jsonl"},
        "agent": {"max_turns": 1000},
        "reward": {"target": "unused:unused"},
        "sampling": {"max_tokens": 4096},
        "nodes": [{"id": "node", "tags": ["rollout", "train"]}],
    }


@contextlib.asynccontextmanager
async def stopped_at_end(contestants: list[Any]) -> Any:
    """Stops them all, whatever happens."""
    try:
        yield
    finally:
        for contestant in contestants:
            await contestant.close()
