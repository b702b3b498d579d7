"""Where a run may place its reference: what the file must say, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cli.memory import BASE_BYTES, node_bytes
from workers.trainer.launch import Launch
from workflows.scheduling.pipeline import companion_nodes, rollout_nodes, trainer_ranks
from workflows.spec import RunSpec

KL = {"kl": "k3", "kl_coefficient": 0.1}
OWN = {**KL, "reference_on": "own"}
TRAINER = {"id": "a", "tags": ["rollout", "train"], "ranks": 2}
ROLLOUT = {"id": "b", "tags": ["rollout"]}
REFERENCE = {"id": "r", "tags": ["reference"]}


def spec(*nodes: dict[str, Any], algorithm: dict[str, Any] = OWN, **changes: Any) -> RunSpec:
    data = {"run": "r", "model": {"path": "/m"}, "data": {"path": "/d"}, "reward": {"target": "a:b"}}
    return RunSpec.model_validate({**data, "nodes": nodes, "algorithm": algorithm, **changes})


def models(run: RunSpec, role: Any) -> frozenset[str]:
    place = {"rank": 0, "world_size": 1, "control_port": 1, "master_port": 1, "epoch": 1, "token": "t" * 16}
    return Launch.model_validate({"spec": run, "role": role, "state": "/s", **place}).models


def test_a_reference_of_its_own_is_held_by_its_nodes_alone_which_do_not_roll_out() -> None:
    run = spec(TRAINER, ROLLOUT, {"id": "r", "tags": ["reference", "rollout"]})
    assert run.algorithm.companions_apart == ("reference",)
    assert companion_nodes(run) == ("r",)
    assert rollout_nodes(run) == ("a", "b")
    assert trainer_ranks(run) == 2
    assert models(run, "trainer") == {"policy"}
    assert models(run, "reference") == {"reference"}


def test_without_the_key_the_trainer_s_ranks_hold_everything() -> None:
    run = spec(TRAINER, algorithm={**KL, "name": "ppo"})
    assert run.algorithm.companions_apart == companion_nodes(run) == ()
    assert models(run, "trainer") == {"policy", "reference", "critic"}
    assert models(spec(TRAINER, algorithm={}), "trainer") == {"policy"}


def test_memory_is_counted_where_the_model_is() -> None:
    trains = {"id": "t", "tags": ["train"], "ranks": 2}
    own, shared = spec(trains, ROLLOUT, REFERENCE), spec(trains, ROLLOUT, algorithm=KL)
    million = 1_000_000
    on_trainer = node_bytes(shared, shared.nodes[0], million) - node_bytes(own, own.nodes[0], million)
    assert on_trainer == 2 * 4 * million, "each of two ranks holds the reference in float32"
    assert node_bytes(own, own.nodes[2], million) > 4 * million


def test_a_critic_of_its_own_needs_memory_for_its_optimizer_too() -> None:
    million, critic = 1_000_000, {"id": "c", "tags": ["critic"]}
    trains = {"id": "t", "tags": ["train"]}
    own = spec(trains, ROLLOUT, critic, algorithm={"name": "ppo", "critic_on": "own"})
    shared = spec(trains, ROLLOUT, algorithm={"name": "ppo"})
    assert models(own, "trainer") == {"policy"}
    assert models(own, "critic") == {"critic"}
    on_trainer = node_bytes(shared, shared.nodes[0], million) - node_bytes(own, own.nodes[0], million)
    assert on_trainer == node_bytes(own, own.nodes[2], million) - BASE_BYTES == 4 * 4 * million


@pytest.mark.parametrize(
    ("nodes", "algorithm", "message"),
    [
        ([TRAINER], OWN, r"algorithm.reference_on 'own': no node has the tag 'reference'"),
        ([{**TRAINER, "tags": ["rollout", "train", "reference"]}], OWN, r"'a' has the tags 'train' and 'reference'"),
        ([TRAINER, REFERENCE], KL, r"'r' has the tag 'reference' without 'train'.*or set algorithm.reference_on: own"),
        ([TRAINER, REFERENCE], {"reference_on": "own"}, r"reference_on does nothing here: set kl"),
        (
            [{"id": "a", "tags": ["train"]}, {"id": "r", "tags": ["reference", "rollout"]}],
            OWN,
            r"every node with the tag 'rollout' has the tag 'reference' too",
        ),
        ([TRAINER, {"id": "c", "tags": ["critic"]}], {"name": "ppo"}, r"'c' has the tag 'critic' without 'train'"),
        ([TRAINER], {"name": "ppo", "critic_on": "own"}, r"algorithm.critic_on 'own': no node has the tag 'critic'"),
        ([TRAINER, {"id": "c", "tags": ["critic"]}], {"critic_on": "own"}, r"critic_on does nothing here"),
        (
            [TRAINER, {"id": "c", "tags": ["critic", "reference"]}],
            {"name": "ppo", "critic_on": "own", **OWN},
            r"'c' has the tags 'reference' and 'critic', each of which keeps a node to itself",
        ),
    ],
    ids=["no node", "both", "not apart", "no kl", "nobody rolls out", "critic", "no critic", "no gae", "two models"],
)
def test_a_placement_that_cannot_be_is_refused_with_what_to_do(
    nodes: list[dict[str, Any]], algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(*nodes, algorithm=algorithm)
