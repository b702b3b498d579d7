"""The local cluster as the user sees it: start, stop and look at one state folder.

The work is done by one detached process, ``python -m cli.supervisor``; this
module prepares the folder for it, starts it, waits for it and ends it.

Files in the state folder that belong here: ``supervisor.lock`` (held while a
supervisor lives; the kernel frees it whatever kills the process),
``stack.json`` (what to run), ``services.json`` (what runs).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cli.addresses import check_database, check_ports, write_cluster
from cli.processes import records_in, signal_group, stop_processes, wait_gone, write_json
from cli.servers import base_environment
from storage.errors import ConfigError, DeadlineError, SeamlessFlowError
from workers.cluster import StateFolder
from workers.residency import ProcessRef
from workflows.spec import NodeSpec

LOCK = "supervisor.lock"
STACK = "stack.json"
STATUS = "services.json"
STOP_LIMIT_S = 120.0


class StackSpec(BaseModel):
    """What a local cluster runs, as kept in ``stack.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: tuple[NodeSpec, ...]
    proxies: int = 1


class ServiceStatus(BaseModel):
    """One row of `seamlessflow status`."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["waiting", "starting", "ready", "restarting", "failed", "stopped"] = "waiting"
    process: ProcessRef | None = None
    restarts: int = 0
    last_exit: str = ""
    """How its last process ended. *Example*: ``killed by SIGKILL``."""


class StackStatus(BaseModel):
    """What the supervisor writes to ``services.json`` at each change."""

    model_config = ConfigDict(extra="forbid")

    supervisor: ProcessRef
    phase: Literal["starting", "running", "stopping", "stopped", "failed"] = "starting"
    error: str = ""
    services: dict[str, ServiceStatus] = {}

    @classmethod
    def read(cls, state: StateFolder) -> StackStatus | None:
        """None if no supervisor ever wrote one."""
        try:
            return cls.model_validate_json((state.root / STATUS).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, state: StateFolder) -> None:
        write_json(state.root / STATUS, self.model_dump(mode="json"))


class StackFailed(SeamlessFlowError):
    """A service of the local cluster could not be started; everything was stopped again."""


def up(
    state: StateFolder,
    nodes: tuple[NodeSpec, ...] | None,
    *,
    ports: Mapping[str, int] | None = None,
    proxies: int | None = None,
    database: str | None = None,
    say: Callable[[str], None] = print,
    limit_s: float = 240.0,
) -> StackStatus:
    """Start the cluster, or find it running; returns when every service is ready.

    ``nodes``, ``proxies`` and ``database`` None are those of the last time. Raises :class:`ConfigError` if the folder
    runs with others or a given port is taken, :class:`StackFailed` if a service does not come up (nothing is left
    running), :class:`DeadlineError` after ``limit_s`` seconds.
    """
    spec = _stack_spec(state, nodes, proxies)
    check_database(state, spec.proxies, database)
    if not state.root.exists():  # a mistake leaves no folder behind
        check_ports(ports or {}, spec.proxies)
    state.root.mkdir(parents=True, exist_ok=True)
    state.logs.mkdir(exist_ok=True)
    try:
        with locked(state, "up.lock", wait_s=limit_s):
            supervisor = None
            _wait_for_the_dead(state)
            if running(state):
                require_nodes(state, nodes)
                require_proxies(state, proxies)
            else:
                supervisor = _start(state, spec, ports or {}, database)
            return _wait_ready(state, supervisor, say, limit_s)
    except BlockingIOError:
        raise DeadlineError(f"another `up` of {state.root} did not end within {limit_s:.0f} s") from None


def _start(state: StateFolder, spec: StackSpec, ports: Mapping[str, int], database: str | None) -> ProcessRef:
    """Prepare the folder and start its supervisor, which outlives this process."""
    stop_leftovers(state)
    write_cluster(state, ports, spec.proxies, database)
    write_json(state.root / STACK, spec.model_dump(mode="json"))
    (state.root / STATUS).unlink(missing_ok=True)
    with (state.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.supervisor", "--state", str(state.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=state.root,
            env={**os.environ, **base_environment(state)},
            start_new_session=True,
        )
    process.returncode = 0  # it is not waited for by this object
    return ProcessRef.of(process.pid)


def down(state: StateFolder) -> int:
    """Stop every process of the cluster, resident engines and ranks included; the number that still ran.

    The state stays on disk: `up` goes on from it. Raises :class:`DeadlineError` if the supervisor does not end.
    """
    status = StackStatus.read(state)
    count = 0
    if status and running(state):
        count = 1 + sum(1 for row in status.services.values() if row.process and row.process.alive())
        signal_group(status.supervisor, signal.SIGTERM)
        if not wait_gone([status.supervisor], STOP_LIMIT_S):
            raise DeadlineError(
                f"the supervisor (pid {status.supervisor.pid}) did not stop within {STOP_LIMIT_S:.0f} s: "
                f"see {state.logs / 'supervisor.log'}"
            )
    return count + stop_leftovers(state)


def running(state: StateFolder) -> bool:
    """Whether a supervisor holds the folder's lock."""
    if not state.root.is_dir():
        return False
    try:
        with locked(state, LOCK, shared=True):
            return False
    except BlockingIOError:
        return True


def _wait_for_the_dead(state: StateFolder) -> None:
    """A killed process keeps its locks until its last thread has ended, a moment after it counts as dead."""
    status = StackStatus.read(state)
    if status and not status.supervisor.alive():
        with suppress(BlockingIOError), locked(state, LOCK, shared=True, wait_s=10.0):
            pass


@contextmanager
def locked(state: StateFolder, name: str, *, shared: bool = False, wait_s: float = 0.0) -> Iterator[None]:
    """Hold one of the folder's locks. Raises :class:`BlockingIOError` if another process has it after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    with (state.root / name).open("a") as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield


def stop_leftovers(state: StateFolder) -> int:
    """End what a supervisor that died left running: its services, then engines and ranks; the number found."""
    status = StackStatus.read(state)
    found = 0
    for row in reversed(list(status.services.values()) if status else []):
        if row.process is not None:
            found += stop_processes([row.process], grace_s=10.0)
    return found + stop_residents(state)


def stop_residents(state: StateFolder, grace_s: float = 5.0) -> int:
    """End the resident engines and trainer ranks that the node agents noted down; the number that still ran."""
    return stop_processes(residents(state), grace_s)


def residents(state: StateFolder) -> set[ProcessRef]:
    """Engines and trainer ranks that the node agents noted down, dead ones included."""
    return {record for file in state.root.glob("nodes/*/*.json") for record in records_in(file)}


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _stack_spec(state: StateFolder, nodes: tuple[NodeSpec, ...] | None = None, proxies: int | None = None) -> StackSpec:
    try:
        old = StackSpec.model_validate_json((state.root / STACK).read_bytes())
    except FileNotFoundError:
        if nodes is None:
            raise ConfigError(
                f"{state.root} has no nodes yet: name a run file, as in `seamlessflow up run.yaml`"
            ) from None
        old = StackSpec(nodes=nodes)
    return StackSpec(nodes=nodes or old.nodes, proxies=proxies or old.proxies)


def nodes_of(state: StateFolder) -> tuple[NodeSpec, ...]:
    """Nodes that the cluster of this machine runs; none where it was only joined."""
    return _stack_spec(state, ()).nodes


def require_nodes(state: StateFolder, nodes: tuple[NodeSpec, ...] | None) -> None:
    """Raises :class:`ConfigError` if the cluster of this folder lacks one of ``nodes``, or has it otherwise."""
    have = {node.id: node for node in _stack_spec(state).nodes}
    other = [node.id for node in nodes or () if have.get(node.id) != node]
    if other:
        raise ConfigError(
            f"the cluster in {state.root} runs with other nodes ({', '.join(other)} differ): "
            "stop it with `seamlessflow down` first, or use another --state folder"
        )


def require_proxies(state: StateFolder, proxies: int | None) -> None:
    """Raises :class:`ConfigError` if the cluster of this folder has another number of proxies."""
    have = _stack_spec(state).proxies
    if proxies not in (None, have):
        raise ConfigError(
            f"the cluster in {state.root} runs with {have} proxies, not {proxies}: stop it first (`seamlessflow down`)"
        )


def _wait_ready(
    state: StateFolder, supervisor: ProcessRef | None, say: Callable[[str], None], limit_s: float
) -> StackStatus:
    """``supervisor``: the one just started, which may not hold the lock yet."""
    deadline = time.monotonic() + limit_s
    told: set[str] = set()
    while True:
        status = StackStatus.read(state)
        for name, row in (status.services if status else {}).items():
            if row.state == "ready" and name not in told:
                told.add(name)
                say(f"{name} is ready")
        if status and status.phase == "running" and status.supervisor.alive():
            return status
        gone = not (supervisor.alive() if supervisor else running(state))
        if gone or (status and status.phase in ("failed", "stopped")):
            wait_gone([record for record in (supervisor, status and status.supervisor) if record], STOP_LIMIT_S)
            reason = (status.error if status else "") or log_tail(state.logs / "supervisor.log")
            raise StackFailed(f"the cluster in {state.root} did not start: {reason}")
        if time.monotonic() > deadline:
            rows = status.services if status else {}
            waiting = ", ".join(name for name, row in rows.items() if row.state != "ready") or "supervisor"
            down(state)
            raise DeadlineError(f"not ready after {limit_s:.0f} s: {waiting}; logs in {state.logs}")
        time.sleep(0.1)
