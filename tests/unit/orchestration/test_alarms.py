"""What is said of a step whose figures are odd."""

from __future__ import annotations

import pytest

from workers.trainer.messages import UpdateMetrics
from workflows.alarms import LOWER, UPPER, alarms
from workflows.spec import AlarmSpec


def test_equal_rewards_are_odd_unless_the_run_file_says_otherwise() -> None:
    equal = {"reward_mean": 0.5, "reward_std": 0.0}
    assert "every sample of the last step had the same reward, 0.5" in alarms(equal, AlarmSpec())[0]
    assert alarms(equal, AlarmSpec(constant_reward=False)) == ()
    assert alarms({"reward_mean": 0.5, "reward_std": 0.01}, AlarmSpec()) == ()


def test_the_rewards_of_a_replayed_batch_were_judged_when_it_was_claimed() -> None:
    assert alarms({"replayed": 1.0}, AlarmSpec()) == ()


@pytest.mark.parametrize("name", UPPER)
def test_a_figure_above_its_threshold_is_named_with_both_numbers_and_advice(name: str) -> None:
    thresholds = AlarmSpec.model_validate({name: 0.5 if name == "clip_fraction" else 2.0})
    limit = getattr(thresholds, name)
    (said,) = alarms({name: limit * 1.5}, thresholds)
    assert said.startswith(f"{name} is {limit * 1.5:.4g}, above alarms.{name} {limit:g}: ")
    assert alarms({name: limit}, thresholds) == ()


@pytest.mark.parametrize("name", LOWER)
def test_a_figure_below_its_threshold_is_named(name: str) -> None:
    thresholds = AlarmSpec.model_validate({name: 0.5})
    assert alarms({name: 0.25}, thresholds)[0].startswith(f"{name} is 0.25, below alarms.{name} 0.5: ")
    assert alarms({name: 0.5}, thresholds) == ()


@pytest.mark.parametrize("name", [*UPPER, *LOWER])
def test_no_threshold_means_no_alarm(name: str) -> None:
    assert alarms({name: 1e9 if name in UPPER else 0.0}, AlarmSpec.model_validate({name: None})) == ()


def test_every_threshold_is_on_a_figure_that_the_trainer_reports() -> None:
    assert set(AlarmSpec.model_fields) - {"constant_reward"} == {*UPPER, *LOWER}
    assert {*UPPER, *LOWER} <= set(UpdateMetrics.model_fields)
