"""Every named algorithm learns a small task through the trainer's own path: shards, credit, losses, optimizer steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from table_backend import TableBackend, planner

from storage.manifests import Manifest
from storage.shards import Shard
from workers.trainer.batch import weigh
from workers.trainer.rows import group_rows
from workers.trainer.step import Work
from workflows.algorithm import AlgorithmSpec

LENGTH, SAMPLES, GROUPS, STEPS = 5, 8, 4, 15
WANTED = range(8)
"""The reward is the share of tokens that are one of these, of 64."""


def sample(make: Any, policy: torch.Tensor, ordinal: int, rng: np.random.Generator) -> Shard:
    """A group of single-turn sessions whose tokens the policy drew."""
    shard = make.ShardBuilder(ordinal)
    root = shard.prompt(-1, [1])
    everything = torch.log_softmax(policy.detach().double(), -1).numpy()
    for number in range(SAMPLES):
        ids = [1]
        for _ in range(LENGTH):
            odds = np.exp(everything[ids[-1]])
            ids.append(int(rng.choice(len(odds), p=odds / odds.sum())))
        logprobs = [float(everything[a, b]) for a, b in pairwise(ids)]
        name = f"s{ordinal}.{number}"
        leaf = shard.completion(root, ids[1:], session=name, logprobs=logprobs)
        shard.session(name, reward=sum(i in WANTED for i in ids[1:]) / LENGTH, leaves=[leaf])
    built: Shard = shard.build()
    return built


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo"},
        {"name": "grpo", "minibatches": 2, "epochs": 2},
        {"name": "grpo", "old_logprobs": "engine"},
        {"name": "grpo", "kl": "k3", "kl_coefficient": 0.01},
        {"name": "dr_grpo", "aggregation_length": LENGTH},
        {"name": "rloo", "entropy_coefficient": 0.01},
        {"name": "reinforce_pp"},
        {"name": "reinforce_pp_baseline", "kl": "k1", "kl_in": "reward", "kl_coefficient": 0.01},
        {"name": "gspo", "minibatches": 2, "clip_low": 0.1, "clip_high": 0.1},
        {"name": "cispo", "minibatches": 2},
        {"name": "ppo", "gae_lambda": 0.9, "discount_per": "token", "epochs": 2, "value_clip": 0.5, "critic_warmup": 2},
    ],
    ids=lambda algorithm: " ".join(str(value) for value in algorithm.values()),
)
def test_its_reward_more_than_doubles(make: Any, algorithm: dict[str, Any]) -> None:
    spec = AlgorithmSpec(group_size=SAMPLES, groups_per_step=GROUPS, **algorithm)
    backend, rng = TableBackend(rate=150.0), np.random.default_rng(0)
    rewards = []
    for step in range(STEPS):
        shards = [sample(make, backend.policy, GROUPS * step + n, rng) for n in range(GROUPS)]
        groups = [group_rows(shard, [row.id for row in shard.sessions]) for shard in shards]
        batch = weigh(groups, Manifest("demo", 0, step, (), temperature=1.0), spec)
        rewards.append(float(batch.evidence.reward_S.mean()))
        Work(batch, spec, backend, planner(row_tokens=1000)).run()
    assert rewards[0] < 0.3
    assert np.mean(rewards[-2:]) > 2 * rewards[0]
