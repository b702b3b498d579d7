"""Which complete groups make a batch: pure functions of what waits. A user's own is named by ``pipeline.selection``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class Candidate(Protocol):
    """A complete group; :class:`storage.books.records.WaitingGroup` is one."""

    @property
    def ordinal(self) -> int: ...

    @property
    def start_version(self) -> int:
        """Weight version that started it."""
        ...

    @property
    def rewards(self) -> tuple[float, ...]: ...

    @property
    def completed(self) -> float:
        """Unix seconds."""
        ...

    @property
    def tokens(self) -> int:
        """Trainable tokens of its samples."""
        ...


Selection = Callable[[Sequence[Candidate], int], Sequence[int]]
"""From the complete groups and the number wanted (never more than there are) to the ordinals chosen."""


def ordinal_window(waiting: Sequence[Candidate], wanted: int) -> Sequence[int]:
    """The oldest tasks first: what was left behind by its length goes into the next batch."""
    return sorted(group.ordinal for group in waiting)[:wanted]


def completion_order(waiting: Sequence[Candidate], wanted: int) -> Sequence[int]:
    """Those that were complete first, whatever their place in the data: short ones, if lengths differ much."""
    by_time = sorted(waiting, key=lambda group: (group.completed, group.ordinal))
    return [group.ordinal for group in by_time[:wanted]]


BUILT_IN: dict[str, Selection] = {"ordinal": ordinal_window, "completion": completion_order}


def preferring(ordinals: Collection[int], select: Selection) -> Selection:
    """``select`` behind the groups that are wanted in any case, those with ``ordinals``, in their order."""

    def chosen(waiting: Sequence[Candidate], wanted: int) -> Sequence[int]:
        first = sorted(group.ordinal for group in waiting if group.ordinal in ordinals)[:wanted]
        others = [group for group in waiting if group.ordinal not in ordinals]
        return [*first, *select(others, min(wanted - len(first), len(others)))]

    return chosen if ordinals else select
