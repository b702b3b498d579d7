"""How an engine process is started: plain data between the kinds of engine and whoever starts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workflows.spec import NodeSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is to run."""

    node: NodeSpec
    host: str
    """Address to bind."""
    port: int
    token_log: Path


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: built by an :class:`EngineKind`, read by whoever starts it."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the starter's own."""


def on_cuda(device: str) -> bool:
    """Whether ``engine.device`` means a CUDA device on this machine."""
    return device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())
