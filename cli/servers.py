"""Command lines of the processes that `seamlessflow up` starts on one machine.

A :class:`Service` is plain data: what to run and how to know that it is ready.
Services of one stage start together once the stage before is ready; stages are stopped in reverse.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from storage.errors import ConfigError
from workers.cluster import STATE_VARIABLE, StateFolder
from workflows.queues import CONTROL_QUEUE, nodectl_queue, tag_queue
from workflows.spec import NodeSpec

TEMPORAL_RETENTION = "90d"
SEARCH_ATTRIBUTES = {
    "SfRun": "Keyword",
    "SfStep": "Int",
    "SfPhase": "Keyword",
    "SfTags": "KeywordList",
    "SfNode": "Keyword",
}
DYNAMIC_CONFIG = {
    # Cancellations are pushed to workers (p50 20 ms) and not told at the next heartbeat only.
    "frontend.WorkerCommandsEnabled": "true",
    "system.enableCancelActivityWorkerCommand": "true",
    # The defaults (20 a second on one history shard) cost 50 ms for each hop above that.
    "history.transferProcessorMaxPollRPS": "2000",
    "history.timerProcessorMaxPollRPS": "2000",
    "history.outboundProcessorMaxPollRPS": "2000",
    "history.visibilityProcessorMaxPollRPS": "200",
}


SHARED = {"agent": "agents", "reward": "rewards"}
"""By tag, the service that does its shared work."""


@dataclass(frozen=True)
class Probe:
    """How readiness is asked. ``http``: GET ``target`` answers 200; ``s3``: a put and a get; ``temporal``: the
    namespace answers; ``queue``: a worker polls the task queue ``target``."""

    kind: Literal["http", "s3", "temporal", "queue"]
    target: str
    limit_s: float = 120.0


@dataclass(frozen=True)
class Service:
    """One process under the supervisor."""

    name: str
    argv: tuple[str, ...]
    ready: Probe
    stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""
    grace_s: float = 20.0
    """Time between SIGTERM and SIGKILL."""


def services(state: StateFolder, nodes: tuple[NodeSpec, ...]) -> list[Service]:
    """Every process of a local cluster. Reads ``cluster.json`` and ``secrets.json``."""
    cluster = state.cluster()
    return [
        temporal_service(state),
        _python("s3", state, Probe("s3", cluster.s3), 0, "storage.seaweed"),
        *(proxy_service(state, number, url) for number, url in enumerate(cluster.proxy_urls, 1)),
        _python("control", state, Probe("queue", CONTROL_QUEUE), 2, "workers.control"),
        *(node_service(state, node) for node in nodes),
        *(shared_service(state, tag, name) for tag, name in SHARED.items() if not any(tag in n.tags for n in nodes)),
    ]


def shared_service(state: StateFolder, tag: str, name: str) -> Service:
    """The worker for a tag's shared work where no node has the tag."""
    return _python(name, state, Probe("queue", tag_queue(tag)), 2, "workers.agents", "--role", tag)


def proxy_service(state: StateFolder, number: int, url: str) -> Service:
    """The proxy at ``url``, the first or a further one of several."""
    arguments = ["--port", url.rpartition(":")[2].rstrip("/")] + (["--url", url] if number > 1 else [])
    name = "proxy" if number == 1 else f"proxy-{number}"
    return _python(name, state, Probe("http", f"{url.rstrip('/')}/healthz"), 1, "proxy", *arguments)


def temporal_service(state: StateFolder) -> Service:
    """The Temporal development server on a file, loopback only."""
    cluster = state.cluster()
    ui_port = (cluster.temporal_ui or "").rpartition(":")[2].rstrip("/")
    argv = temporal_command(state.root / "temporal.db", cluster.temporal, ui_port, cluster.namespace)
    return Service("temporal", tuple(argv), Probe("temporal", cluster.temporal))


def temporal_command(database: Path, address: str, ui_port: str, namespace: str) -> list[str]:
    """*Source*: measured flags; without the pragmas and limits a hop between task queues costs 170 ms instead of 17."""
    host, _, port = address.rpartition(":")
    argv = [program("temporal"), "server", "start-dev", "--db-filename", str(database), "--namespace", namespace]
    argv += ["--ip", host, "--port", port, "--ui-ip", host, "--ui-port", ui_port]
    argv += ["--ui-disable-news-fetch", "--log-format", "json", "--log-level", "warn"]
    for pragma in ("journal_mode=wal", "synchronous=2"):
        argv += ["--sqlite-pragma", pragma]
    for key, value in DYNAMIC_CONFIG.items():
        argv += ["--dynamic-config-value", f"{key}={value}"]
    for name, kind in SEARCH_ATTRIBUTES.items():
        argv += ["--search-attribute", f"{name}={kind}"]
    return argv


def temporal_retention_command(address: str, namespace: str) -> list[str]:
    """Closed workflows stay for months; the development server's default deletes them after a day."""
    argv = [program("temporal"), "operator", "namespace", "update", "--namespace", namespace]
    return [*argv, "--retention", TEMPORAL_RETENTION, "--address", address, "--command-timeout", "10s"]


def node_service(state: StateFolder, node: NodeSpec) -> Service:
    """The node agent of ``node``."""
    arguments = ["--node", node.id, "--tags", ",".join(sorted(node.tags))]
    if node.train_priority is not None:
        arguments += ["--train-priority", str(node.train_priority)]
    ready = Probe("queue", nodectl_queue(node.id))
    return _python(f"node-{node.id}", state, ready, 2, "workers.node_agent", *arguments)


def program(name: str) -> str:
    """Path of a server binary: beside this interpreter, else on PATH.

    Raises :class:`ConfigError` that says what to install.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise ConfigError(
            f"{name!r} is neither beside {sys.executable} nor on PATH: install `seamlessflow[local]`, "
            "or use docker-compose.yml"
        )
    return found


def base_environment(state: StateFolder) -> dict[str, str]:
    """Environment of every service. ``PYTHONSAFEPATH`` keeps the current directory off ``sys.path`` in all of them."""
    return {
        STATE_VARIABLE: str(state.root),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _python(name: str, state: StateFolder, ready: Probe, stage: int, module: str, *arguments: str) -> Service:
    return Service(name, (sys.executable, "-m", module, "--state", str(state.root), *arguments), ready, stage)
