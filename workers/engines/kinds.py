"""The kinds of engine a run file can name: how each is started and spoken to. Imports no torch.

A real server runs in an environment of its own (``.engines/<kind>``), which ``make engine-<kind>`` builds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.errors import ConfigError
from workers.engines import sglang_launch, vllm_launch
from workers.engines.base import Engine
from workers.engines.launch import Launch, Place
from workers.engines.sglang import SglangEngine
from workers.engines.sglang_server import SglangServer
from workers.engines.vllm import VllmEngine
from workflows.spec import EngineSpec, RunSpec

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One value of ``engine.kind``."""

    name: str
    command: Callable[[RunSpec, Place, str], Launch]
    """Of its process; the last argument is the interpreter."""
    connect: Callable[..., Engine]
    """The adapter for an engine: base URL, and by name ``deadline_s``, ``load_deadline_s`` and ``stall_s``."""
    own_environment: bool = False
    """Whether it lives in an environment of its own."""
    examine: Callable[[EngineSpec, Path], str | None] = lambda engine, interpreter: None
    """Why it cannot do what the run file asks on this machine."""
    spins_paused: bool = False
    """Whether it keeps a core busy while it is paused, though not while it is idle."""

    def interpreter(self, engine: EngineSpec) -> str:
        """The Python that runs it."""
        if engine.python is not None:
            return engine.python
        return str(ROOT / ".engines" / self.name / "bin" / "python") if self.own_environment else sys.executable

    def problem(self, engine: EngineSpec) -> str | None:
        """Why the engine cannot be started here, and what to do; None if nothing is known against it."""
        path = self.interpreter(engine)
        if os.access(path, os.X_OK):
            return self.examine(engine, Path(path))
        if engine.python is not None or not self.own_environment:
            return f"{path} is no program that can be run"
        return f"the {self.name} environment is missing ({path}): run make engine-{self.name}"

    def launch(self, spec: RunSpec, place: Place) -> Launch:
        """The process of the run's engine on a node; raises :class:`ConfigError` if it cannot be started."""
        if (problem := self.problem(spec.engine)) is not None:
            raise ConfigError(f"engine {self.name} cannot be started: {problem}")
        return self.command(spec, place, self.interpreter(spec.engine))


def _ours(spec: RunSpec, place: Place, interpreter: str) -> Launch:
    """The command line that all engines of ours share."""
    engine = spec.engine
    flags: dict[str, object] = {
        "--model-path": spec.model.path,
        "--host": place.host,
        "--port": place.port,
        "--weight-version": 0,
        "--dtype": spec.model.dtype,
        "--max-running": engine.max_running,
        "--max-context": spec.model.max_context,
        "--kv-tokens": engine.kv_tokens,
        "--threads": place.node.threads,
        "--seed": spec.seed,
    }
    if engine.log_tokens:
        flags["--log-tokens"] = place.token_log
    command = [interpreter, "-m", f"workers.engines.{engine.kind}"]
    for name, value in flags.items():
        command += [name, str(value)]
    return Launch(tuple(command))


KINDS: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind("embedded", _ours, SglangEngine),
        EngineKind("scripted", _ours, SglangEngine),
        EngineKind("sglang", sglang_launch.launch, SglangServer, True, sglang_launch.problem, True),
        EngineKind("vllm", vllm_launch.launch, VllmEngine, True, vllm_launch.problem),
    )
}
"""By ``engine.kind``."""


def kind_of(engine: EngineSpec) -> EngineKind:
    """The kind of engine that a run file asks for."""
    if engine.kind not in KINDS:
        raise ConfigError(f"engine.kind {engine.kind!r} is not supported here, only {', '.join(sorted(KINDS))}")
    return KINDS[engine.kind]


def connect(kind: str, url: str) -> Engine:
    """The adapter for the engine of ``kind`` at ``url``; raises :class:`ConfigError` for an unknown kind."""
    if kind not in KINDS:
        raise ConfigError(f"engine kind {kind!r} is not known here, only {', '.join(sorted(KINDS))}")
    return KINDS[kind].connect(url)
