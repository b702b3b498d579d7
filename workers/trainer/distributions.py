"""Distributions of a step as a few figures: quantiles, and shares by staleness. Pure; no torch.

Ratios are counted in bins of equal width in the logarithm, which add up over micro-batches and ranks; lengths and
rewards are known whole to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.floating] | npt.NDArray[np.integer]

BINS = 801
WIDTH = 0.01
"""Of a bin, in nats: a quantile of the ratio is right to 0.5 %, between e^-4 and e^4."""
NO_BINS = np.zeros(BINS, np.int64)
TOO_OLD = 3
"""Tokens as stale as this or staler are counted together."""


def bins(log_ratio_N: Numbers) -> npt.NDArray[np.int64]:
    """How many of the log-ratios lie in each bin; those outside count in the outermost."""
    index_N = np.clip(np.rint(log_ratio_N / WIDTH), -(BINS // 2), BINS // 2).astype(np.int64) + BINS // 2
    return np.bincount(index_N, minlength=BINS)


def ratio_quantiles(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """1st, 50th and 99th percentile of the ratio; 1 where nothing was counted."""
    total, below = int(counts.sum()), np.cumsum(counts)
    found = {f"importance_p{part:02d}": np.searchsorted(below, part / 100 * total) for part in (1, 50, 99)}
    return {name: float(np.exp((index - BINS // 2) * WIDTH)) if total else 1.0 for name, index in found.items()}


def quantiles(name: str, values: Numbers) -> dict[str, float]:
    """10th, 50th and 90th percentile and the maximum, between neighbours by a straight line; 0 without values."""
    cuts = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {f"{name}_{cut}": float(np.quantile(values, part)) if len(values) else 0.0 for cut, part in cuts.items()}


def staleness_shares(staleness_N: Numbers) -> Mapping[str, float]:
    """Share of the tokens that are 0, 1, 2, and 3 or more updates old.

    >>> staleness_shares(np.array([0, 0, 1, 5]))
    {'staleness_0': 0.5, 'staleness_1': 0.25, 'staleness_2': 0.0, 'staleness_3_up': 0.25}
    """
    counts = np.bincount(np.clip(staleness_N, 0, TOO_OLD).astype(np.int64), minlength=TOO_OLD + 1)
    shares = (counts / max(len(staleness_N), 1)).tolist()
    names = [*(f"staleness_{age}" for age in range(TOO_OLD)), f"staleness_{TOO_OLD}_up"]
    return dict(zip(names, shares, strict=True))
