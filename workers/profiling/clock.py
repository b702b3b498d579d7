"""Seconds that work takes on the cores it has: CPU time by threads, so that others on the machine do not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def now_s() -> float:
    """CPU seconds of this process per thread of torch: those that would pass on a machine without others."""
    return time.process_time() / torch.get_num_threads()


def seconds_of(work: Callable[[], Any]) -> float:
    start = now_s()
    work()
    return now_s() - start


def best_s(work: Callable[[], Any], *, tries: int) -> float:
    """The shortest of several, after one that does not count."""
    work()
    return min(seconds_of(work) for _ in range(tries))


def median_s(work: Callable[[], Any], *, tries: int) -> float:
    """The median of several, after one that does not count."""
    work()
    return median(seconds_of(work) for _ in range(tries))
