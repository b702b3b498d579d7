"""`seamlessflow shards`: trajectory shards as text."""

from __future__ import annotations

from cli.reach import store_of
from storage import shards
from storage.objects import ObjectStore
from workers.cluster import StateFolder


def list_shards(state: StateFolder, run: str) -> list[str]:
    """Keys of the run's shards, in order."""
    with store_of(state) as store:
        return keys_of(store, run)


def keys_of(store: ObjectStore, run: str) -> list[str]:
    """The same, of a store."""
    prefix = shards.key_for(run, 0, "0").partition(run)[0] + run + "/"
    return sorted(key for key in store.list(prefix) if key.endswith(".arrow"))


def show_shard(state: StateFolder, key: str) -> str:
    """Sessions, generations and the prefix tree of one shard."""
    with store_of(state) as store:
        return shards.show(shards.decode(store.get(key)))
