"""Reaching a cluster's servers from a command, and what to do if none is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from cli import stack
from storage.errors import DeadlineError
from storage.objects import ObjectStore
from workers.cluster import StateFolder

ASK_S = 10.0
"""How long a person waits for a store that does not answer."""


@contextmanager
def advised(state: StateFolder) -> Iterator[None]:
    """Say beside a missed deadline how to start the cluster, if nothing of it runs here."""
    try:
        yield
    except DeadlineError as error:
        if stack.running(state):
            raise
        raise DeadlineError(
            f"{error}; nothing of the cluster runs here: start it with `seamlessflow up --state {state.root}`"
        ) from error


@contextmanager
def store_of(state: StateFolder) -> Iterator[ObjectStore]:
    """The cluster's object store, to read what a run has written; :class:`DeadlineError` if it does not answer."""
    with advised(state), closing(ObjectStore.from_state(state, deadline_s=ASK_S)) as store:
        yield store
