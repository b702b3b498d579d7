"""Measures over busy intervals and evaluations. Pure functions; times are unix seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from storage.books.records import Interval

Stretch = tuple[float, float]


def merge(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The union of half-open stretches as disjoint ones in order; empty ones vanish."""
    merged: list[Stretch] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def shared(a: Sequence[Stretch], b: Sequence[Stretch]) -> float:
    """Seconds that lie in both of two sequences of disjoint stretches."""
    return sum(max(0.0, min(a_end, b_end) - max(a_start, b_start)) for a_start, a_end in a for b_start, b_end in b)


def pass_at(k: int, rewards: Iterable[Sequence[float]], passes: float) -> float | None:
    """pass@k: the mean over tasks of the chance that one of k samples has a reward of ``passes`` or more.

    ``1 - C(n - c, k) / C(n, k)`` for ``n`` rewards of which ``c`` pass, unbiased (Chen et al., arXiv 2107.03374,
    equation 1). ``rewards`` are those of each task; a task with fewer than k has no estimate; None if no task has one.

    >>> pass_at(2, [[1.0, 0.0, 0.0], [1.0]], 1.0)
    0.6666666666666667
    """
    counts = [(len(of_task), sum(reward >= passes for reward in of_task)) for of_task in rewards]
    chances = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
    return math.fsum(chances) / len(chances) if chances else None


def passes(ks: Iterable[int], rewards: Sequence[Sequence[float]], passing: float) -> dict[int, float]:
    """:func:`pass_at` for each k that has an estimate."""
    found = {k: pass_at(k, rewards, passing) for k in ks}
    return {k: chance for k, chance in found.items() if chance is not None}


def seconds(intervals: Sequence[Interval], kind: str, node: str | None = None) -> float:
    """Seconds in which ``node`` (None: any node) was busy with ``kind``."""
    merged = merge((i.start, i.end) for i in intervals if i.kind == kind and node in (None, i.node))
    return sum(end - start for start, end in merged)


def overlap_fraction(train: Sequence[Interval], generate: Sequence[Interval]) -> float | None:
    """Share of training time in which another node was generating; None where nothing was trained.

    Training time is summed over training nodes; for each of them every *other* node counts as another.
    """
    total = overlap = 0.0
    for node in sorted({interval.node for interval in train}):
        mine = merge((i.start, i.end) for i in train if i.node == node)
        others = merge((i.start, i.end) for i in generate if i.node != node)
        total += sum(end - start for start, end in mine)
        overlap += shared(mine, others)
    return overlap / total if total else None
