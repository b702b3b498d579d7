"""`seamlessflow shards`: trajectory shards as text."""

from __future__ import annotations

from storage import shards
from storage.objects import ObjectStore
from workers.cluster import StateFolder


def list_shards(state: StateFolder, run: str) -> list[str]:
    """Keys of the run's shards, in order."""
    prefix = shards.key_for(run, 0, "0").partition(run)[0] + run + "/"
    return sorted(key for key in ObjectStore.from_state(state).list(prefix) if key.endswith(".arrow"))


def show_shard(state: StateFolder, key: str) -> str:
    """Sessions, generations and the prefix tree of one shard."""
    return shards.show(shards.decode(ObjectStore.from_state(state).get(key)))
