"""Tasks of your own: ``data: {source: examples.layers.tasks:sums, path: "3", shuffle: false}``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def sums(path: str) -> Iterator[dict[str, str]]:
    """Sums of two numbers with at most ``path`` digits, without end; the position in this order is the ordinal."""
    for n in itertools.count():
        a, b = divmod(n * 7919, 10 ** int(path))
        yield {"prompt": f"{a % 10 ** int(path)}+{b}=", "answer": str(a % 10 ** int(path) + b)}


class Squares:
    """A sequence: it is shuffled by the run's seed and repeated as ``data.epochs`` says."""

    def __init__(self, path: str) -> None:
        self._count = int(path)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> dict[str, str]:
        return {"prompt": f"{place}*{place}=", "answer": str(place * place)}
