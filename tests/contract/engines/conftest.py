"""The engines under test: each kind in turn, one real process a session, put back to version 0 after every test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from storage.errors import EngineError
from tests.contract.engines.driver import Bench, Checkpoints
from tests.contract.engines.models import write_model
from tests.contract.engines.rigs.base import Process, Rig
from tests.contract.engines.rigs.every import KINDS, rig_of


@pytest.fixture(scope="session", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Rig:
    """Each kind of engine whose environment is built."""
    found = rig_of(request.param)
    if (reason := found.missing()) is not None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def make_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoints]:
    """Checkpoints of a family, made once."""
    made: dict[str, Checkpoints] = {}

    def make(family: str) -> Checkpoints:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = Checkpoints(*(write_model(folder / f"seed-{seed}", family, seed) for seed in range(2)))
        return made[family]

    return make


@pytest.fixture(scope="session")
def checkpoints(make_checkpoints: Callable[[str], Checkpoints]) -> Checkpoints:
    """What the servers serve unless a test starts its own."""
    return make_checkpoints("qwen3")


@dataclass
class _Servers:
    """Running servers by kind; one that a test has killed is started anew for the next."""

    folder: Callable[[str], Path]
    running: dict[str, tuple[contextlib.ExitStack, Process]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    """Release of each engine that was started."""

    def get(self, rig: Rig, model: Path) -> Process:
        if rig.kind not in self.running:
            stack = contextlib.ExitStack()
            self.running[rig.kind] = stack, stack.enter_context(rig.start(model, self.folder(rig.kind)))
        return self.running[rig.kind][1]

    def drop(self, rig: Rig) -> None:
        if rig.kind in self.running:
            self.running.pop(rig.kind)[0].close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Servers]:
    servers = _Servers(tmp_path_factory.mktemp)
    yield servers
    for stack, _ in servers.running.values():
        stack.close()


@pytest.fixture
def process(
    rig: Rig, servers: _Servers, checkpoints: Checkpoints, record_property: Callable[[str, object], None]
) -> Process:
    """The running server."""
    record_property("engine", rig.kind)
    return servers.get(rig, checkpoints.first)


@pytest.fixture
async def bench(
    rig: Rig,
    process: Process,
    servers: _Servers,
    checkpoints: Checkpoints,
    record_property: Callable[[str, object], None],
) -> AsyncIterator[Bench]:
    """The engine behind its adapter; a server that cannot be put back is ended, and the next test gets a new one."""
    bench = Bench(rig, process, checkpoints, rig.connect(process.url))
    if rig.kind not in servers.versions:
        servers.versions[rig.kind] = await rig.version(bench.engine)
    record_property("version", servers.versions[rig.kind])
    yield bench
    try:
        await bench.restore()
    except (EngineError, TimeoutError):
        alive = process.alive()
        servers.drop(rig)
        if alive:  # no test has killed it, and yet it does not serve as before
            raise
    finally:
        await bench.engine.close()
