"""`seamlessflow shards`: trajectory shards as text."""

from __future__ import annotations

from cli.reach import store_of
from storage import shards
from workers.cluster import StateFolder


def list_shards(state: StateFolder, run: str) -> list[str]:
    """Keys of the run's shards, in order."""
    with store_of(state) as store:
        return store.list(shards.prefix_of(run))


def show_shard(state: StateFolder, key: str) -> str:
    """Sessions, generations and the prefix tree of one shard."""
    with store_of(state) as store:
        return shards.show(shards.decode(store.get(key)))
