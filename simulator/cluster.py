"""The cluster file: nodes, what changes of role cost, and what fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from storage.errors import ConfigError
from workflows.scheduling.devices import DEVICES, DeviceProfile
from workflows.spec import Tag


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NodeKind(_Part):
    """``count`` like nodes."""

    count: int = Field(ge=1)
    device: DeviceProfile
    """A device's name, as in ``H800``, or a profile measured by ``seamlessflow node profile``."""
    devices: int = Field(default=1, ge=1)
    """Devices of a node: one replica of the model in rollout, so many ranks in training."""
    tags: frozenset[Tag] = frozenset({"rollout", "train"})
    """Capability tags."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """Tokens its KV holds; None: what fits beside the weights."""
    mean_up_s: float | None = Field(default=None, gt=0)
    """Spot nodes: mean seconds until one is taken away; None: never."""
    mean_down_s: float = Field(default=600.0, gt=0)
    """Spot nodes: mean seconds until another one comes."""

    @field_validator("device", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in DEVICES:
                raise ValueError(f"device {value!r} is unknown; known: {', '.join(DEVICES)}; or give its profile")
            return DEVICES[value]
        return value


class Costs(_Part):
    """Seconds of what is neither rollout nor training. The defaults were published for Qwen3-8B."""

    rollout_to_train_s: float = Field(default=3.2, ge=0)
    """Pre-empt signal until the trainer has the device (PEARL, table 3)."""
    train_to_rollout_s: float = Field(default=6.3, ge=0)
    """End of an update until the engine serves the new weights (PEARL, table 3)."""
    sync_s: float = Field(default=5.5, ge=0)
    """Publication of weights until an engine serves them (RollArt, table 3; 400 Gb RDMA)."""
    stall_s: float | None = Field(default=None, ge=0)
    """The part of it in which the engine stands still; before, it decodes while they are brought. None: all of it."""
    commit_s: float = Field(default=0.0, ge=0)
    """End of an update until its weights are published."""
    claim_s: float = Field(default=0.0, ge=0)
    """A batch is complete until the pool is asked for its nodes."""
    start_s: float = Field(default=56.0, ge=0)
    """Start of an engine on a node that came back (PEARL, table 3)."""
    trainer_start_s: float = Field(default=0.0, ge=0)
    """Start of the run until the first gang can train: groups are stocked meanwhile."""
    logprob_passes: int = Field(default=1, ge=0)
    """Forward passes over the batch before the update: 1 for ``old_logprobs: recompute``, 1 more for a reference."""
    train_fixed_s: float = Field(default=0.0, ge=0)
    """Part of an update that does not depend on its tokens."""
    train_bytes_per_parameter: float = Field(default=16.0, ge=0)
    """Weights, gradients and optimizer states, which the gang shares (ZeRO 3): too few nodes cannot hold them."""

    @property
    def stall(self) -> float:
        """Seconds that an engine stands still for new weights."""
        return self.sync_s if self.stall_s is None else min(self.stall_s, self.sync_s)


class Failures(_Part):
    node_mtbf_h: float | None = Field(default=None, gt=0)
    """Mean hours between failures of one node; None: nothing fails."""
    recover_s: float = Field(default=252.0, gt=0)
    """Until the node is back (Laminar)."""
    trainer_restart_s: float = Field(default=300.0, ge=0)
    """A gang that lost a member starts again from the last checkpoint after this."""


class SimulatedNode(NamedTuple):
    id: str
    kind: NodeKind
    tags: frozenset[Tag]


class Cluster(_Part):
    name: str = "cluster"
    nodes: tuple[NodeKind, ...] = Field(min_length=1)
    costs: Costs = Costs()
    failures: Failures = Failures()
    max_running: int = Field(default=256, ge=1)
    """Sequences that an engine decodes together."""

    @property
    def size(self) -> int:
        return sum(kind.count for kind in self.nodes)

    def each(self) -> Iterator[SimulatedNode]:
        """All nodes; kinds in the order of the file, ``n00000`` first."""
        number = 0
        for kind in self.nodes:
            for _ in range(kind.count):
                yield SimulatedNode(f"n{number:05d}", kind, kind.tags)
                number += 1

    @classmethod
    def read(cls, path: Path) -> Cluster:
        """Raises :class:`ConfigError` with all that is wrong with the file."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()))
        except FileNotFoundError:
            raise ConfigError(f"cluster file {path} does not exist") from None
        except (yaml.YAMLError, ValidationError) as error:
            raise ConfigError(f"cluster file {path}: {error}") from None
