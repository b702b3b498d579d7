"""What the device can do at most: FLOP/s of a large product, bytes/s of a large sum, bytes of memory."""

from __future__ import annotations

import os

import torch

from workers.profiling.clock import best_s

SIDE = 1024
STREAM = 32 * 2**20
"""Numbers summed: 128 MB in float32, more than caches hold."""


def peak_flops() -> float:
    """FLOP/s of a float32 product of square matrices."""
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    return 2 * SIDE**3 / best_s(lambda: a @ b, tries=8)


def bandwidth() -> float:
    """Bytes/s at which memory is read."""
    numbers = torch.rand(STREAM)
    return 4 * STREAM / best_s(numbers.sum, tries=5)


def memory_bytes() -> float:
    """Of the machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
