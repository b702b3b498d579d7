"""Seconds and tokens/s of prefill, decode and training on a device: the roofline model (Williams et al. 2009).

A decode step reads the weights and the KV cache of its batch from memory and
computes on them at the same time, so the slower of the two counts; a fixed
part and a part per sequence come on top:

    max(bytes / (decode_efficiency * bandwidth), FLOPs / (prefill_efficiency * peak)) + step + sequence * batch

With the constants of :mod:`workflows.scheduling.devices` this is within 16 % of
twelve measured points (H100, Qwen3-8B, bf16 and fp8, 1 to 512 sequences).
Several devices share bytes and FLOPs and pay two all-reduces a layer
(tensor parallel, Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workflows.scheduling.devices import DeviceProfile
from workflows.scheduling.model_cost import ModelCost

USABLE_MEMORY = 0.85
"""Fraction of device memory that an engine fills with weights and KV."""
TRAIN_PASSES = 3
"""Forward and backward pass in forward passes."""


@dataclass(frozen=True)
class Load:
    """What a device is asked to do: ``batch`` sequences at once, ``context`` tokens each on average."""

    batch: int = 64
    context: int = 4096
    devices: int = 1


@dataclass(frozen=True)
class Rates:
    """Tokens/s of ``Load.devices`` devices together."""

    prefill: float
    decode: float
    train: float


def decode_step_s(
    device: DeviceProfile, model: ModelCost, batch: float, context_tokens: float, *, devices: int = 1
) -> float:
    """Seconds in which each of ``batch`` sequences gets one token; ``context_tokens``: all that their KV holds."""
    if batch <= 0:
        return 0.0
    bytes_read = model.read_bytes(batch) + context_tokens * model.kv_bytes_per_token
    memory = bytes_read / (device.decode_efficiency * device.bandwidth)
    compute = model.flops(batch, context_tokens / batch) / (device.prefill_efficiency * device.peak_flops)
    shared = max(memory, compute) / devices + _reduce_s(device, model, batch, devices)
    return shared + device.decode_step_s + device.decode_sequence_s * batch


def prefill_s(device: DeviceProfile, model: ModelCost, tokens: float, *, context: float = 0, devices: int = 1) -> float:
    """Seconds to read ``tokens`` new prompt tokens of one sequence behind ``context`` tokens already in its KV."""
    flops = model.flops(tokens, context + tokens / 2)
    compute = flops / (device.prefill_efficiency * device.peak_flops * devices)
    return compute + _reduce_s(device, model, tokens, devices)


def train_s(device: DeviceProfile, model: ModelCost, tokens: float, *, context: float, devices: int = 1) -> float:
    """Seconds of one update on ``tokens`` tokens in sequences of ``context`` tokens: forward, backward, optimizer."""
    flops = TRAIN_PASSES * model.flops(tokens, context / 2)
    compute = flops / (device.train_efficiency * device.peak_flops)
    sequences = device.train_sequence_s * tokens / max(1.0, context)
    return (compute + sequences) / devices + device.train_step_s


def kv_tokens(device: DeviceProfile, model: ModelCost, devices: int = 1) -> int:
    """Tokens of KV that fit beside the weights; 0 if not even the weights fit."""
    free = USABLE_MEMORY * device.memory_bytes * devices - model.weight_bytes
    return max(0, int(free / model.kv_bytes_per_token))


def fewest_devices(device: DeviceProfile, model: ModelCost, context: int = 4096) -> int:
    """The smallest power of two of devices that holds the model and one sequence of ``context`` tokens."""
    needed = model.weight_bytes + context * model.kv_bytes_per_token
    return 1 << max(0, math.ceil(math.log2(needed / (USABLE_MEMORY * device.memory_bytes))))


def rates(device: DeviceProfile, model: ModelCost, load: Load | None = None) -> Rates:
    """Tokens/s in each role under ``load``; of decoding, no more sequences at once than KV memory holds."""
    load = load or Load(devices=fewest_devices(device, model))
    shared = load.devices
    batch = max(1, min(load.batch, kv_tokens(device, model, shared) // max(1, load.context)))
    step = decode_step_s(device, model, batch, batch * load.context, devices=shared)
    tokens = batch * load.context
    return Rates(
        prefill=load.context / prefill_s(device, model, load.context, devices=shared),
        decode=batch / step,
        train=tokens / train_s(device, model, tokens, context=load.context, devices=shared),
    )


def train_priority(device: DeviceProfile, model: ModelCost) -> float:
    """How much better the device trains than it decodes: tokens/s trained per token/s decoded.

    Nodes are taken for training in this order: training is bound by compute,
    decoding by memory bandwidth, so what counts is a device's ratio of the two
    (paper, section 4.3), not its speed. An H800 goes before an H20.
    """
    each = rates(device, model)
    return each.train / each.decode


def _reduce_s(device: DeviceProfile, model: ModelCost, tokens: float, devices: int) -> float:
    if devices == 1:
        return 0.0
    size = tokens * model.hidden * model.activation_bytes
    return 2 * model.layers * 2 * (devices - 1) / devices * size / device.link_bandwidth
