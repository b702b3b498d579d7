"""A node compares what it does with what its profile predicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.engines.base import Stats
from workers.node_agent.meter import RateMeter
from workflows.messages import NodeProfiled, TrainOutcome
from workflows.scheduling.devices import DEVICES
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import decode_step_s, train_s

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "vocab_size": 64,
    "dtype": "float32",
}
MODEL = ModelCost.from_config(CONFIG)


@pytest.fixture
def meter(tmp_path: Path) -> RateMeter:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    meter = RateMeter(tmp_path / "node")
    profile = {
        "node": "n",
        "model": str(tmp_path / "model"),
        "device": DEVICES["CPU"],
        "train_priority": 1.0,
        "rates": (),
    }
    meter.learn(NodeProfiled.model_validate(profile))
    return meter


def load(generated: int, running: int = 4) -> Stats:
    return Stats(running=running, waiting=0, running_tokens=100, generated=generated)


def update(seconds: float) -> TrainOutcome:
    metrics = {"tokens_computed": 400.0, "tokens_in_rows": 400.0, "rows": 4.0, "seconds_training": seconds}
    return TrainOutcome(node="n", start=0, end=1, checkpoint=None, metrics=metrics)


def test_decoding_is_compared_with_the_step_of_the_load_it_had(meter: RateMeter) -> None:
    meter.saw(load(0), 10.0)
    meter.saw(load(300), 12.0)
    (rate,) = meter.rates()
    expected = 4 / decode_step_s(DEVICES["CPU"], MODEL, 4, 100)
    assert (rate.role, rate.measured, rate.predicted) == ("decode", 150.0, pytest.approx(expected))
    assert rate.error == pytest.approx(abs(expected / 150 - 1))


def test_idle_and_restarted_engines_and_those_that_tell_nothing_do_not_count(meter: RateMeter) -> None:
    meter.saw(load(0, running=0), 10.0)
    meter.saw(load(300), 12.0)
    meter.saw(None, 13.0)
    meter.saw(load(10), 14.0)
    meter.saw(load(5), 15.0)
    meter.saw(Stats(running=4, waiting=0), 16.0)
    meter.saw(Stats(running=4, waiting=0), 17.0)
    assert meter.rates() == ()


def test_an_update_tells_the_errors_in_its_metrics(meter: RateMeter) -> None:
    predicted = train_s(DEVICES["CPU"], MODEL, 400, context=100)
    noted = meter.noted(update(2 * predicted))
    assert noted.metrics["train_rate_error"] == pytest.approx(1.0)
    assert "decode_rate_error" not in noted.metrics
    assert [rate.role for rate in meter.rates()] == ["train"]


def test_a_node_without_a_profile_predicts_nothing(tmp_path: Path) -> None:
    meter = RateMeter(tmp_path)
    assert meter.noted(update(1.0)).metrics == update(1.0).metrics
    assert meter.rates() == ()


def test_a_profile_is_found_again_after_a_restart_and_a_new_one_forgets_old_measurements(
    meter: RateMeter, tmp_path: Path
) -> None:
    meter.noted(update(1.0))
    assert meter.profile is not None
    assert RateMeter(tmp_path / "node").profile == meter.profile
    meter.learn(meter.profile)
    assert meter.rates() == ()
