"""Manifests: the shards one step trains on, as one canonical JSON object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage.books.records import BatchClaim, GroupRef, ManifestRef
from storage.errors import IntegrityError

if TYPE_CHECKING:
    from storage.objects import ObjectStore

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ManifestGroup:
    """A shard to train on; ``sessions`` and ``rewards`` are aligned, in sample order."""

    ordinal: int
    key: str
    sha256: str
    sessions: tuple[str, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class Manifest:
    """What step ``step`` trains on. ``temperature`` is the behaviour policy's: logits are divided by it.

    After a rewind the manifest of a step is used as it was written: its ``lineage`` is that of the first claim.
    """

    run: str
    lineage: int
    step: int
    groups: tuple[ManifestGroup, ...]
    temperature: float

    @classmethod
    def of(cls, claim: BatchClaim, temperature: float) -> Manifest:
        """The manifest of a claimed batch."""
        return cls(claim.run, claim.lineage, claim.step, manifest_groups(claim.groups), temperature)

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal manifests have equal bytes."""
        content = {"schema": SCHEMA_VERSION, **asdict(self)}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises IntegrityError if the bytes are no manifest of this schema."""
        try:
            content: dict[str, Any] = json.loads(data)
            schema = content.pop("schema")
            if schema != SCHEMA_VERSION:
                raise ValueError(f"schema {schema}, this release reads {SCHEMA_VERSION}")
            groups = tuple(_group(entry) for entry in content.pop("groups"))
            return cls(**content, groups=groups)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"not a readable manifest ({len(data)} bytes): {error}") from error

    @property
    def digest(self) -> str:
        """sha256 hex of the canonical bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def key(self) -> str:
        """Object key: the same content has the same key."""
        return f"runs/{self.run}/manifests/{self.lineage:04d}.{self.step:08d}-{self.digest}.json"


def manifest_groups(refs: Iterable[GroupRef]) -> tuple[ManifestGroup, ...]:
    """Shards of the ledger as a manifest lists them."""
    return tuple(ManifestGroup(g.ordinal, g.shard_key, g.sha256, g.sessions, g.rewards) for g in refs)


def write_manifest(store: ObjectStore, manifest: Manifest) -> ManifestRef:
    """Write the object; writing the same manifest twice is the same object."""
    return ManifestRef(manifest.key, store.put(manifest.key, manifest.to_bytes()))


def read_manifest(store: ObjectStore, key: str, digest: str) -> Manifest:
    """Read and verify. Raises NotFoundError, IntegrityError or DeadlineError as the store does."""
    return Manifest.from_bytes(store.get(key, sha256=digest))


def _group(entry: dict[str, Any]) -> ManifestGroup:
    lists = {"sessions": tuple(entry["sessions"]), "rewards": tuple(float(r) for r in entry["rewards"])}
    return ManifestGroup(**{**entry, **lists})
