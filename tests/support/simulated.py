"""Small clusters and workloads that the tests of the simulator share."""

from __future__ import annotations

from typing import Any

from simulator.cluster import Cluster, Costs, NodeKind
from simulator.run import Scenario
from simulator.workload import Workload
from workflows.scheduling.devices import DEVICES
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.pipeline import policy
from workflows.spec import PipelineSpec

MODEL = ModelCost.from_config(
    {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
)
PIPELINES = ("colocated", "disaggregated", "micro_batch", "off_policy", "multiplexed")
SHORT = Workload.model_validate(
    {"prompt": 100, "answer": {"family": "lognormal", "median": 400, "sigma": 0.8, "cap": 4096}, "icc": 0.3}
)
AGENT = Workload.model_validate(
    {
        "prompt": 500,
        "turns": {"family": "lognormal", "median": 4, "sigma": 0.5, "cap": 9},
        "answer": {"family": "lognormal", "median": 120, "sigma": 0.7},
        "observation": 150,
        "tool_s": {"family": "lognormal", "median": 1, "sigma": 1, "cap": 30},
        "reset_s": 5,
        "reward_s": 2,
    }
)


def cluster(nodes: int = 4, trainers: int = 2, costs: Costs | None = None, **more: Any) -> Cluster:
    kinds = [NodeKind(count=trainers, device=DEVICES["H800"], tags=frozenset({"rollout", "train"}))]
    if nodes > trainers:
        kinds.append(NodeKind(count=nodes - trainers, device=DEVICES["H800"], tags=frozenset({"rollout"})))
    return Cluster(nodes=tuple(kinds), costs=costs or Costs(), **more)


def scenario(
    name: str = "multiplexed", workload: Workload = SHORT, *, nodes: int = 4, steps: int = 3, groups: int = 8,
    staleness: int | None = None, trainers: int | None = None, costs: Costs | None = None, **more: Any,
) -> Scenario:  # fmt: skip
    spec = PipelineSpec.model_validate(
        {"name": name, "steps": more.get("stop_after", 0) + steps, "max_staleness": staleness}
    )
    count = trainers or (nodes if name == "colocated" else nodes // 2)
    return Scenario(policy(spec, groups), cluster(nodes, count, costs), MODEL, workload, group_size=4, **more)
