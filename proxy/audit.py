"""Journal against shards: is every acknowledged token of a committed group where the trainer finds it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from proxy.trajectory.session import Session
from proxy.trajectory.turn import Choice
from storage import shards
from storage.ledger import TRAIN, Ledger, State

_IN_SHARDS = (State.GROUPED, State.CLAIMED, State.TRAINED)


class Store(Protocol):
    """What is needed of the object store."""

    def list(self, prefix: str = "") -> list[str]: ...

    def get(self, key: str, *, sha256: str | None = None) -> bytes: ...


def audit(run: str, ledger: Ledger, store: Store, rebuild: Callable[[str], Session]) -> dict[str, Any]:
    """Compare all sessions of committed training groups; ``rebuild`` reads one from the journal. Blocks: use a thread.

    ``tokens_lost`` are journalled tokens of such sessions that no shard holds.
    """
    found = _shard_generations(run, store)
    held: Counter[str] = Counter()
    for shard, generation in found.values():
        held[generation.session] += sum(len(shard.spans[index].ids) for index in generation.spans)
    sessions = tokens_journalled = tokens_in_shards = tokens_lost = 0
    mismatches: list[str] = []
    for row in ledger.samples(run, TRAIN):
        if row.session is None or not (row.state in _IN_SHARDS or (row.state is State.FILTERED and row.tokens)):
            continue
        sessions += 1
        collected = ledger.session(row.session).collected
        if collected is not None:  # its journal is gone but for the number of its tokens
            tokens = held[row.session]
            tokens_journalled += collected
            tokens_in_shards += min(tokens, collected)
            tokens_lost += max(collected - tokens, 0)
            if tokens != collected:
                mismatches.append(f"session {row.session}: the journal held {collected} tokens, its shard {tokens}")
            continue
        session = rebuild(row.session)
        trainable = session.trainable()
        for turn, choice in session.generations():
            tokens = len(choice.recording.ids)
            if not tokens:
                continue
            tokens_journalled += tokens
            problem = _compare(choice, found.get(choice.generation), choice.generation in trainable)
            if problem:
                tokens_lost += tokens
                mismatches.append(f"session {row.session}, turn {turn.index}, choice {choice.index}: {problem}")
            else:
                tokens_in_shards += tokens
    return {
        "sessions": sessions,
        "tokens_journalled": tokens_journalled,
        "tokens_in_shards": tokens_in_shards,
        "tokens_lost": tokens_lost,
        "mismatches": mismatches,
    }


_Found = tuple[shards.Shard, shards.Generation]


def _shard_generations(run: str, store: Store) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for key in store.list(shards.prefix_of(run)):
        digest = key.rpartition("-")[2].removesuffix(".arrow")
        shard = shards.decode(store.get(key, sha256=digest))
        for generation in shard.generations:
            found[generation.id] = (shard, generation)
    return found


def _compare(choice: Choice, found: _Found | None, trainable: bool) -> str:
    """What differs, empty if nothing does: ids, log-probs bit by bit, versions, and the mask."""
    if found is None:
        return "in no shard"
    shard, generation = found
    spans = [shard.spans[index] for index in generation.spans]
    recording = choice.recording
    ids = np.concatenate([span.ids for span in spans])
    if not np.array_equal(ids, np.asarray(recording.ids, np.int32)):
        return "other ids"
    logprobs = np.concatenate([span.logprobs for span in spans])
    if logprobs.tobytes() != np.asarray(recording.logprobs, np.float32).tobytes():
        return "other log-probs"
    if np.concatenate([span.token_versions() for span in spans]).tolist() != recording.versions:
        return "other versions"
    return "" if generation.trainable == trainable else "other mask"
