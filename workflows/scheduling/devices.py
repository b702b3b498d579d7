"""What a device can do: published peaks, achieved fractions of them, and the table of known devices.

SI units: FLOP/s at the compute dtype (dense bfloat16 for GPUs), bytes/s, bytes,
seconds. Efficiencies are fractions of the peak.

Sources
    peaks        verl ``verl/utils/flops_counter.py`` (bf16 of A100, H100, H200, H800, H20, B200, L40S, MI300X);
                 memory and its bandwidth from the vendors' sheets. Traps: pages that print sparse figures (H100 FP8
                 3958), and L40 (181) for L40S (362).
    decode       a roofline fitted to twelve points of one H100 with Qwen3-8B: 0.80 of the bandwidth, 0.60 of the peak,
                 1.4 ms a step and 20 us a sequence. Not validated on other GPUs; ``node profile`` measures.
    train        0.30 of the peak is an assumption inside the published range (0.12-0.40, dense 8B-32B). B200 starts
                 far lower: prime-rl measured 8.8-12.3 % where H100 had 21-37 %.
    links        NVLink or Infinity Fabric per direction; PCIe 4 for L40S.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field


class DeviceProfile(BaseModel):
    """One device. From :data:`DEVICES`, or measured; read by :mod:`workflows.scheduling.roofline`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    peak_flops: float = Field(gt=0)
    """FLOP/s, dense, at the compute dtype."""
    bandwidth: float = Field(gt=0)
    """Bytes/s of device memory."""
    memory_bytes: float = Field(gt=0)
    prefill_efficiency: float = Field(default=0.60, gt=0, le=1)
    """Fraction of ``peak_flops`` that prompts are read with, and that bounds large decode batches."""
    decode_efficiency: float = Field(default=0.80, gt=0, le=1)
    """Fraction of ``bandwidth`` that weights and KV are read with in a decode step."""
    train_efficiency: float = Field(default=0.30, gt=0, le=1)
    """Fraction of ``peak_flops`` over forward and backward (MFU)."""
    decode_step_s: float = Field(default=1.4e-3, ge=0)
    """Seconds of every decode step, whatever it holds."""
    decode_sequence_s: float = Field(default=20e-6, ge=0)
    """Seconds that each sequence adds to a decode step: sampling and bookkeeping."""
    train_step_s: float = Field(default=0.0, ge=0)
    """Seconds of every update, whatever it holds: optimizer, bookkeeping."""
    train_sequence_s: float = Field(default=0.0, ge=0)
    """Seconds that each sequence adds to an update: launching its forward and backward pass."""
    link_bandwidth: float = Field(gt=0)
    """Bytes/s per direction between devices of one node."""


def _gpu(name: str, tflops: float, gigabytes: float, terabytes_s: float, link_gb_s: float, mfu: float) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        peak_flops=tflops * 1e12,
        bandwidth=terabytes_s * 1e12,
        memory_bytes=gigabytes * 1e9,
        train_efficiency=mfu,
        link_bandwidth=link_gb_s * 1e9,
    )


_CPU = DeviceProfile(
    name="CPU",
    peak_flops=5e10,
    bandwidth=10e9,
    memory_bytes=8e9,
    decode_efficiency=0.5,
    decode_step_s=5e-3,
    decode_sequence_s=100e-6,
    link_bandwidth=5e9,
)
"""One core of a laptop, float32: an assumption that stands until the node is measured."""

DEVICES: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        device.name: device
        for device in (
            _gpu("A100", 312, 80, 2.04, 300, 0.30),
            _gpu("H100", 989, 80, 3.35, 450, 0.30),
            _gpu("H200", 989, 141, 4.8, 450, 0.30),
            _gpu("H800", 989, 80, 3.35, 200, 0.30),
            _gpu("H20", 148, 96, 4.0, 450, 0.30),
            _gpu("B200", 2250, 180, 8.0, 900, 0.12),
            _gpu("L40S", 362, 48, 0.864, 32, 0.30),
            _gpu("MI300X", 1307, 192, 5.3, 448, 0.30),
            _CPU,
        )
    }
)
"""By name."""
