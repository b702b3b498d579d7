"""Keys and values of finished prompts and answers, found again by longest prefix.

A radix tree per salt. Nodes own their tensors; whoever uses a prefix copies it, so nothing is pinned and the least
recently used leaves can go at any time. The cache must be cleared when weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ids = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Node:
    ids: Ids
    kv: Tensor | None  # [layers, 2, len(ids), K, D]; None: root
    parent: _Node | None
    used: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """Holds up to ``capacity`` tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._roots: dict[str, _Node] = {}
        self._clock = 0
        self.tokens = 0

    def match(self, salt: str, ids: Ids) -> list[Tensor]:
        """Segments that cover the longest known prefix of ``ids`` under ``salt``, in order; views, not copies."""
        return [node.kv[:, :, :n] for node, n in self._walk(salt, ids) if node.kv is not None]

    def match_length(self, salt: str, ids: Ids) -> int:
        """Length of what :meth:`match` covers."""
        return sum(n for _, n in self._walk(salt, ids))

    def insert(self, salt: str, ids: Ids, read: Callable[[int, int], Tensor]) -> None:
        """Remember ``ids``; ``read(start, end)`` gives a copy of the KV of those not known yet."""
        node = self._roots.setdefault(salt, _Node(np.empty(0, np.int32), None, None))
        done = 0
        for found, n in self._walk(salt, ids):
            node = self._split(found, n) if n < len(found.ids) else found
            done += n
        if done < len(ids):
            self._clock += 1
            leaf = _Node(ids[done:].copy(), read(done, len(ids)), node, self._clock)
            node.children[int(ids[done])] = leaf
            self.tokens += len(leaf.ids)
            self._evict()

    def clear(self) -> None:
        self._roots.clear()
        self.tokens = 0

    def _walk(self, salt: str, ids: Ids) -> list[tuple[_Node, int]]:
        """Nodes along the longest common prefix with the number of tokens that match in each (all but in the last)."""
        self._clock += 1
        node = self._roots.get(salt)
        path: list[tuple[_Node, int]] = []
        done = 0
        while node is not None and done < len(ids):
            node = node.children.get(int(ids[done]))
            if node is None:
                break
            n = common_prefix(node.ids, ids[done:])
            node.used = self._clock
            path.append((node, n))
            done += n
            if n < len(node.ids):
                break
        return path

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; returns the upper part. Both get their own memory, so evicting one frees it."""
        if node.kv is None or node.parent is None:
            raise AssertionError("a root is never split")
        upper = _Node(node.ids[:at].copy(), node.kv[:, :, :at].clone(), node.parent, node.used)
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.kv, node.parent = node.ids[at:].copy(), node.kv[:, :, at:].clone(), upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _evict(self) -> None:
        if self.tokens <= self._capacity:
            return
        target = self._capacity * 9 // 10  # some slack, so that not every insertion searches
        while self.tokens > target:
            leaves = sorted((n for n in self._nodes() if not n.children), key=lambda leaf: leaf.used)
            for leaf in leaves:
                if self.tokens <= target:
                    break
                self._remove(leaf)

    def _remove(self, leaf: _Node) -> None:
        if leaf.parent is not None:
            del leaf.parent.children[int(leaf.ids[0])]
            self.tokens -= len(leaf.ids)

    def _nodes(self) -> Iterator[_Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading ids that are equal."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
