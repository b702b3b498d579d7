"""A profile fitted to measurements predicts them, and others of the same device."""

from __future__ import annotations

import pytest

from workflows.scheduling.calibration import (
    DecodePoint,
    TrainPoint,
    decode_error,
    fit_decode,
    fit_train,
    train_error,
)
from workflows.scheduling.devices import DEVICES, DeviceProfile
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import decode_step_s, train_s

CONFIG = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
MODEL = ModelCost.from_config(CONFIG, "float32")
TRUE = DEVICES["CPU"].model_copy(
    update={
        "decode_efficiency": 0.31,
        "prefill_efficiency": 0.47,
        "train_efficiency": 0.21,
        "decode_step_s": 4e-3,
        "decode_sequence_s": 3e-4,
        "train_step_s": 0.2,
        "train_sequence_s": 0.05,
    }
)


def decoded(device: DeviceProfile, batch: int, context: int) -> DecodePoint:
    return DecodePoint(batch, batch * context, decode_step_s(device, MODEL, batch, batch * context))


def trained(device: DeviceProfile, sequences: int, context: int) -> TrainPoint:
    return TrainPoint(sequences * context, context, train_s(device, MODEL, sequences * context, context=context))


def test_decode_steps_that_were_not_fitted_are_predicted() -> None:
    points = [decoded(TRUE, *load) for load in ((1, 32), (1, 512), (4, 64), (16, 32), (16, 256), (32, 64))]
    fitted = fit_decode(DEVICES["CPU"], MODEL, points)
    for load in ((2, 128), (8, 64), (24, 128)):
        assert abs(decode_error(fitted, MODEL, decoded(TRUE, *load))) < 0.05


def test_updates_that_were_not_fitted_are_predicted() -> None:
    points = [trained(TRUE, *load) for load in ((1, 16), (8, 16), (1, 512), (4, 128))]
    fitted = fit_train(DEVICES["CPU"], MODEL, points)
    for load in ((2, 64), (4, 256)):
        assert abs(train_error(fitted, MODEL, trained(TRUE, *load))) < 0.05


def test_noise_does_not_make_overheads_negative() -> None:
    points = [DecodePoint(1, 32, 0.04), DecodePoint(8, 256, 0.03), DecodePoint(16, 512, 0.05)]
    fitted = fit_decode(DEVICES["CPU"], MODEL, points)
    assert fitted.decode_step_s >= 0
    assert fitted.decode_sequence_s >= 0


def test_an_error_above_zero_says_that_the_prediction_was_too_fast() -> None:
    point = TrainPoint(64, 64, 2 * train_s(TRUE, MODEL, 64, context=64))
    assert train_error(TRUE, MODEL, point) == pytest.approx(1.0)
