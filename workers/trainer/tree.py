"""Token paths merged into one tree, written depth first, and cut into rows. Deterministic; numpy only.

Paths that begin with the same tokens share them, whichever session, group or span they come from: a token's hidden
state depends on the tokens in front of it alone. Written depth first, the descendants of a token follow it without a
gap, so one number per token, where its descendants end, says which tokens see it.

Shape suffixes: ``T`` tokens of the tree, ``P`` paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Node:
    """A run of tokens without a branch. ``paths`` end at its last token."""

    ids: Ints
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    """By first token."""
    paths: list[int] = field(default_factory=list)
    start: int = 0
    depth: int = 0
    weight: int = 0
    """Tokens of the node and below it."""


class TokenTree:
    """The tree of some paths.

    *Example* ``TokenTree([[1, 2, 7], [1, 2, 3, 9]])`` has ``ids_T=[1, 2, 3, 9, 7]``, ``depth_T=[0, 1, 2, 3, 2]`` and
    ``end_T=[5, 5, 4, 4, 5]``; ``order=[1, 0]``, and ``positions(0)`` is ``[0, 1, 4]``.

    Of siblings the one with most tokens comes first. So a token has at most log2(T) turns on its path that are not the
    first child's, and what it sees is as few contiguous ranges: see :mod:`workers.trainer.attention`.
    """

    ids_T: Ints
    depth_T: Indices
    """Tokens in front of each on its paths."""
    end_T: Indices
    """Where the descendants of each end: token q sees token k if ``k <= q < end_T[k]``."""
    order: list[int]
    """Indices of the paths as the tree holds them, each behind those it is the continuation of."""

    def __init__(self, paths: Sequence[Ints], *, merge: bool = True) -> None:
        """``merge=False`` writes each path in full, one behind the other: a forest that shares nothing."""
        self._root = _Node(np.empty(0, np.int32))
        self._ends: dict[int, _Node] = {}
        for path, ids in enumerate(paths):
            self._add(path, np.asarray(ids, np.int32), merge)
        nodes = list(self._lay_out())
        self.order = [path for node in nodes for path in node.paths]
        self.ids_T = np.concatenate([node.ids for node in nodes])
        self.depth_T = np.concatenate([np.arange(len(node.ids)) + node.depth for node in nodes])
        self.end_T = np.repeat([n.start + n.weight for n in nodes], [len(n.ids) for n in nodes])

    def positions(self, path: int) -> Indices:
        """Where the tokens of a path are."""
        parts = []
        node: _Node | None = self._ends[path]
        while node is not None:
            parts.append(np.arange(node.start, node.start + len(node.ids)))
            node = node.parent
        return np.concatenate(parts[::-1])

    def cut(self, budget: int) -> list[list[int]]:
        """Paths in rows of at most ``budget`` tokens; a longer path is a row of its own.

        A row is a run of :attr:`order`; the prefix that both sides of a cut need is in both rows. Of all such rows
        these compute the fewest tokens, and are the fewest.
        """
        last_P = np.array([self._ends[path].start + len(self._ends[path].ids) - 1 for path in self.order])
        length_P = np.array([self._ends[path].depth + len(self._ends[path].ids) for path in self.order])
        # Paths i to j make a row of length[i] + last[j] - last[i] tokens: all that stands between two ends in
        # depth-first order belongs to the paths between them.
        scale = len(self.order) + 1  # ties in tokens go to fewer rows
        cost_P = np.zeros(len(self.order), np.int64)  # of the rows before path i, and of i's path up to its fork
        best, first_P, low = 0, [], 0
        for j in range(len(self.order)):
            cost_P[j] = best + (length_P[j] - last_P[j]) * scale + 1
            while low < j and length_P[low] + last_P[j] - last_P[low] > budget:
                low += 1
            first_P.append(low + int(cost_P[low : j + 1].argmin()))
            best = int(cost_P[first_P[-1]] + last_P[j] * scale)
        rows: list[list[int]] = []
        end = len(self.order)
        while end:
            rows.append(self.order[first_P[end - 1] : end])
            end = first_P[end - 1]
        return rows[::-1]

    def _add(self, path: int, ids: Ints, merge: bool) -> None:
        node, rest = self._root, ids
        while len(rest):
            key = int(rest[0]) if merge or node is not self._root else -1 - path
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(rest, node)
            shared = _shared(child.ids, rest)
            node = child if shared == len(child.ids) else _split(node, key, shared)
            rest = rest[shared:]
        node.paths.append(path)
        self._ends[path] = node

    def _lay_out(self) -> Iterator[_Node]:
        """All nodes depth first, weighed and placed."""
        nodes = [self._root]
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes):
            node.weight = len(node.ids) + sum(child.weight for child in node.children.values())
        stack, start = [self._root], 0
        while stack:
            node = stack.pop()
            node.start = start
            if node.parent is not None:
                node.depth = node.parent.depth + len(node.parent.ids)
            start += len(node.ids)
            stack.extend(sorted(reversed(node.children.values()), key=lambda child: child.weight))
            yield node


def _split(parent: _Node, key: int, length: int) -> _Node:
    """Makes the first ``length`` tokens of a child a node of their own, in front of the rest of it."""
    lower = parent.children[key]
    upper = parent.children[key] = _Node(lower.ids[:length], parent, {int(lower.ids[length]): lower})
    lower.ids, lower.parent = lower.ids[length:], upper
    return upper


def _shared(a: Ints, b: Ints) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
