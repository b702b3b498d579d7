"""The layers of a run that users replace by dotted path: the shipped examples do what they say, mistakes are told."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from activities.layers import policy_for, policy_view, selection_for
from examples.layers.tasks import sums
from storage.errors import ConfigError, NotFoundError
from storage.ledger import TRAIN, Ledger, WaitingGroup
from workers.agents.data import data_end, source_for
from workflows.scheduling.triggers import RolloutFacts
from workflows.spec import RunSpec

LAYERS = "examples.layers"


def spec(pipeline: dict[str, Any] | None = None, **data: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "r",
            "model": {"path": "/m"},
            "data": {"path": "3", **data},
            "reward": {"target": "a:b"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
            "algorithm": {"groups_per_step": 4, "group_size": 2},
            "pipeline": {"steps": 10, **(pipeline or {})},
        }
    )


def test_a_policy_of_ones_own_answers_in_place_of_the_named_one() -> None:
    run = spec({"policy": f"{LAYERS}.pipeline:patient"})
    rule = policy_for(run)
    assert [rule.admit_until(step) for step in (0, 4, 5, 9)] == [8, 24, 24, 40]
    assert rule.interrupt(RolloutFacts(ready=3, wanted=4, waited_s=10)) is None
    decision = rule.interrupt(RolloutFacts(ready=3, wanted=4, waited_s=31))
    assert decision is not None
    assert decision.why == "three quarters of the batch are complete after 30 s"
    assert policy_view(run).trainers == "preempt", "workflows see its fields"


def test_a_policy_that_lacks_an_answer_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "half_policy.py").write_text("def made(spec, groups):\n    return object()\n")
    run = spec({"policy": "half_policy:made"}).model_copy(update={"code": str(tmp_path)})
    with pytest.raises(ConfigError, match="which has no 'name'"):
        policy_for(run)


def test_a_selection_of_ones_own_chooses_the_batch(tmp_path: Path) -> None:
    select = selection_for(spec({"selection": f"{LAYERS}.selection:widest_rewards"}))
    groups = [WaitingGroup(n, 0, rewards, 0.0, 1) for n, rewards in enumerate([(0.0, 0.0), (0.0, 1.0), (0.0, 0.5)])]
    assert list(select(groups, 2)) == [1, 2]


def test_completion_order_takes_what_was_complete_first() -> None:
    select = selection_for(spec({"selection": "completion"}))
    assert list(select([WaitingGroup(0, 0, (), 9.0, 1), WaitingGroup(1, 0, (), 3.0, 1)], 1)) == [1]


def test_a_selection_that_chooses_what_is_not_there_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.create_run("r", {}, "digest")
    ledger.set_admission("r", TRAIN, admit_until=1, target_in_flight=2, samples_per_task=2)
    for claim in ledger.claim_samples("r", TRAIN, "w", 2):
        counts = {"prompt_tokens": 1, "completion_tokens": 1, "turns": 1, "min_version": 0, "max_version": 0}
        ledger.finish_sample(claim.key, 1, session=f"s{claim.key.sample}", output=None, **counts)
        ledger.score_sample(claim.key, 1, float(claim.key.sample))
    ledger.commit_group("r", TRAIN, 0, "k", "0" * 64, {"s0": 1, "s1": 1})
    rule: dict[str, Any] = {"drop_zero_variance": True, "min_version": 0, "take_partial": False}
    with pytest.raises(ConfigError, match=r"pipeline.selection chose \[7\] of the complete groups \[0\]"):
        ledger.claim_batch("r", 0, 0, 1, **rule, select=lambda waiting, wanted: [7])
    assert ledger.claim_batch("r", 0, 0, 1, **rule) is not None
    ledger.close()


def test_an_iterable_is_read_by_position_in_any_order_a_loader_may_ask() -> None:
    source = source_for(spec(source=f"{LAYERS}.tasks:sums", shuffle=False), "train")
    wanted = list(islice(sums("3"), 6))
    assert [source.task(ordinal) for ordinal in (0, 5, 3, 3, 1)] == [wanted[n] for n in (0, 5, 3, 3, 1)]
    assert data_end(spec(source=f"{LAYERS}.tasks:sums", shuffle=False)) is None


def test_a_sequence_is_shuffled_and_repeated_as_a_file_is() -> None:
    run = spec(source=f"{LAYERS}.tasks:Squares", path="5", epochs=2)
    source = source_for(run, "train")
    first, second = ([source.task(5 * epoch + n)["prompt"] for n in range(5)] for epoch in range(2))
    assert sorted(first) == sorted(second)
    assert data_end(run) == 10
    with pytest.raises(NotFoundError, match="the data ends at 10"):
        source.task(10)


def test_an_iterable_that_ends_says_where_and_one_is_not_shuffled(tmp_path: Path) -> None:
    (tmp_path / "three_tasks.py").write_text("def tasks(path):\n    return ({'n': n} for n in range(3))\n")
    run = spec(source="three_tasks:tasks", shuffle=False).model_copy(update={"code": str(tmp_path)})
    with pytest.raises(NotFoundError, match="the data ends at task 3"):
        source_for(run, "train").task(3)
    with pytest.raises(ConfigError, match=r"set data.shuffle: false"):
        source_for(spec(source=f"{LAYERS}.tasks:sums"), "train")
