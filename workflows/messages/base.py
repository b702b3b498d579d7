"""What every message is, and the references to stored things that many of them carry."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

GangRole = Literal["trainer", "reference", "critic"]
"""What the ranks of a gang are for."""
Role = Literal["engine", "trainer", "reference", "critic"]


class Message(BaseModel):
    """Base of every message: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightsRef(Message):
    """Published weights: the directory engines load and the digest they must confirm."""

    version: int
    path: str
    digest: str


class StateRef(Message):
    """A committed checkpoint folder and its digest."""

    path: str
    digest: str


class CheckpointRef(Message):
    """The newest committed checkpoint of a run; ``path`` is None for the initial model."""

    lineage: int
    step: int
    version: int
    path: str | None
    digest: str
    weights: WeightsRef
    critic: StateRef | None = None
    """Of a critic apart, after the same step; None where there is none."""


class ColumnRef(Message):
    """What a model said of a batch's tokens, an object of :mod:`storage.columns`: its name, key and digest."""

    name: str
    key: str
    digest: str


class ManifestRef(Message):
    """A claimed batch: its step, the manifest object and the digest recorded in history."""

    step: int
    key: str
    digest: str
