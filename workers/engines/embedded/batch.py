"""The running sequences and their KV rows, kept dense: decoding ones in rows [0, decoding), prefilling ones behind."""

from __future__ import annotations

from torch import Tensor

from workers.engines.embedded.model import KvRows
from workers.engines.embedded.sequence import Sequence


class Batch:
    """Sequence i of :attr:`members` has row i."""

    def __init__(self, rows: KvRows) -> None:
        self.rows = rows
        self.members: list[Sequence] = []
        self.decoding = 0

    @property
    def decoders(self) -> list[Sequence]:
        return self.members[: self.decoding]

    @property
    def prefillers(self) -> list[Sequence]:
        return self.members[self.decoding :]

    def add(self, sequence: Sequence, segments: list[Tensor]) -> None:
        """Give ``sequence`` a row that starts with ``segments``."""
        count = len(self.members)
        self.rows.ensure(count + 1, len(sequence.ids) + 1)
        sequence.computed = sum(segment.shape[2] for segment in segments)
        if sequence.ready and self.decoding < count:
            self._move(self.decoding, count)
            row = self.decoding
        else:
            row = count
        self.members[row : row + 1] = [sequence]
        self.decoding += sequence.ready
        start = 0
        for segment in segments:
            self.rows.write(row, start, segment)
            start += segment.shape[2]

    def promote(self, count: int) -> None:
        """The first ``count`` prefilling sequences decode from now on."""
        self.decoding += count

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's row away; others move up so that rows stay dense."""
        row = self.members.index(sequence)
        if row < self.decoding:
            self.decoding -= 1
            self._move(self.decoding, row)
            row = self.decoding
        last = len(self.members) - 1
        self._move(last, row)
        self.members.pop()

    def clear(self) -> None:
        self.members.clear()
        self.decoding = 0

    def _move(self, source: int, target: int) -> None:
        moved = self.members[source]
        if source != target:
            self.rows.move(source, target, moved.computed)
            self.members[target : target + 1] = [moved]
