"""Which nodes a run may use, and how one is set up that its file does not name."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import ConfigError
from workers.node_agent.engine import node_spec
from workflows.spec import NodeSpec, RunSpec


def spec(**changes: Any) -> RunSpec:
    named = {"id": "n0", "tags": ["rollout", "train"], "threads": 4}
    return RunSpec.model_validate(
        {"run": "r", "model": {"path": "/m"}, "data": {"path": "/d"}, "reward": {"target": "a:b"}, "nodes": [named]}
        | changes
    )


def test_a_node_that_the_run_file_does_not_name_is_refused_with_those_it_names() -> None:
    with pytest.raises(ConfigError, match="no node 'n7': its nodes are n0"):
        node_spec(spec(), "n7")


def test_a_run_that_takes_any_node_has_the_defaults_on_one_that_it_does_not_name() -> None:
    run = spec(pool={"nodes": "any"})
    assert node_spec(run, "n7") == NodeSpec(id="n7", tags=frozenset({"rollout"}))
    assert node_spec(run, "n0").threads == 4
