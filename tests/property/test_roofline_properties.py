"""More work never takes less time, and no prediction is beyond the device's peaks."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from workflows.scheduling.devices import DEVICES, DeviceProfile
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import Load, decode_step_s, kv_tokens, prefill_s, rates, train_s

devices = st.sampled_from(sorted(DEVICES)).map(lambda name: DEVICES[name])
counts = st.integers(1, 512)
tokens = st.integers(1, 200_000)
shares = st.sampled_from([1, 2, 4, 8])


@st.composite
def models(draw: st.DrawFn) -> ModelCost:
    heads = draw(st.sampled_from([4, 8, 32]))
    config = {
        "hidden_size": heads * 64,
        "num_hidden_layers": draw(st.integers(1, 64)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "intermediate_size": draw(st.integers(64, 8192)),
        "vocab_size": draw(st.integers(32, 150_000)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        experts = draw(st.integers(2, 128))
        config |= {"num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
    return ModelCost.from_config(config, draw(st.sampled_from(["float32", "bfloat16", "fp8"])))


def without_links(device: DeviceProfile) -> DeviceProfile:
    return device.model_copy(update={"link_bandwidth": 1e30})


@given(devices, models(), counts, counts, tokens, tokens, shares)
def test_a_decode_step_grows_with_its_batch_and_its_context(
    device: DeviceProfile, model: ModelCost, batch: int, more: int, context: int, longer: int, shared: int
) -> None:
    base = decode_step_s(device, model, batch, context, devices=shared)
    assert base <= decode_step_s(device, model, batch, context + longer, devices=shared)
    assert base <= decode_step_s(device, model, batch + more, context, devices=shared) * (1 + 1e-9)


@given(devices, models(), tokens, tokens, tokens, shares)
def test_reading_and_training_grow_with_tokens_and_context(
    device: DeviceProfile, model: ModelCost, count: int, more: int, context: int, shared: int
) -> None:
    read = prefill_s(device, model, count, context=context, devices=shared)
    assert read < prefill_s(device, model, count + more, context=context, devices=shared)
    assert read < prefill_s(device, model, count, context=context + more, devices=shared)
    trained = train_s(device, model, count, context=context, devices=shared)
    assert trained < train_s(device, model, count + more, context=context, devices=shared)
    assert trained < train_s(device, model, count, context=context + more, devices=shared)


@given(devices, models(), counts, tokens, shares)
def test_more_devices_never_slow_work_down_if_their_links_are_free(
    device: DeviceProfile, model: ModelCost, batch: int, context: int, shared: int
) -> None:
    free = without_links(device)
    for seconds in (
        lambda n: decode_step_s(free, model, batch, context, devices=n),
        lambda n: prefill_s(free, model, context, devices=n),
        lambda n: train_s(free, model, context, context=64, devices=n),
    ):
        assert seconds(2 * shared) < seconds(shared)
    assert kv_tokens(device, model, 2 * shared) >= kv_tokens(device, model, shared)


@given(devices, models(), counts, tokens)
def test_no_rate_is_beyond_the_peaks(device: DeviceProfile, model: ModelCost, batch: int, context: int) -> None:
    found = rates(device, model, Load(batch=batch, context=context))
    assert 0 < found.decode <= batch / (device.decode_step_s + device.decode_sequence_s * batch)
    assert found.train * 6 * model.active_parameters <= device.peak_flops
    assert found.prefill * 2 * model.active_parameters <= device.peak_flops


@given(devices, models(), counts, counts, tokens)
def test_a_step_costs_less_per_sequence_in_a_larger_batch(
    device: DeviceProfile, model: ModelCost, batch: int, more: int, context: int
) -> None:
    small = decode_step_s(device, model, batch, batch * context) / batch
    large = decode_step_s(device, model, batch + more, (batch + more) * context) / (batch + more)
    assert large <= small * (1 + 1e-9)
