"""Presets: a workload with the model, nodes and batch it was published with, at any number of nodes."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from simulator.cluster import Cluster, Costs, NodeKind
from simulator.workload import Workload
from storage.errors import ConfigError
from workflows.scheduling.devices import DEVICES
from workflows.scheduling.model_cost import ModelCost


class DeviceShare(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    share: float = Field(gt=0, le=1)
    devices: int = 1


class Preset(BaseModel):
    """See ``presets.yaml``, which says for each value where it is from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    model: dict[str, Any]
    nodes: int
    devices: tuple[DeviceShare, ...]
    train_efficiency: float
    groups_per_step: int
    group_size: int
    costs: Costs
    workload: Workload

    @property
    def model_cost(self) -> ModelCost:
        return ModelCost.from_config(self.model)

    def groups(self, nodes: int) -> int:
        """Groups of a step on so many nodes: each node has as much to do as in the original."""
        return max(2, round(self.groups_per_step * nodes / self.nodes))

    def cluster(self, nodes: int) -> Cluster:
        """So many nodes, without tags that would say who trains: :mod:`simulator.splits` gives them."""
        counts = [max(1, round(nodes * part.share)) for part in self.devices]
        counts[-1] += nodes - sum(counts)
        kinds = []
        for part, count in zip(self.devices, counts, strict=True):
            device = DEVICES[part.device].model_copy(update={"train_efficiency": self.train_efficiency})
            kinds.append(NodeKind(count=count, device=device, devices=part.devices))
        return Cluster(name=f"{nodes} nodes", nodes=tuple(kinds), costs=self.costs)


@functools.cache
def presets() -> dict[str, Preset]:
    """By name."""
    text = resources.files("simulator").joinpath("presets.yaml").read_text()
    return {name: Preset.model_validate(value) for name, value in yaml.safe_load(text)["presets"].items()}


def preset(name: str) -> Preset:
    """Raises :class:`ConfigError` for an unknown name."""
    known = presets()
    if name not in known:
        raise ConfigError(f"workload {name!r} is no preset and no file; presets: {', '.join(known)}")
    return known[name]
