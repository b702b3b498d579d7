"""An object store in memory, which can be away."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from storage.errors import NotFoundError, StorageError


@dataclass
class MemoryStore:
    objects: dict[str, bytes] = field(default_factory=dict)
    away: bool = False

    def put(self, key: str, data: bytes) -> str:
        self.objects[key] = data
        return hashlib.sha256(data).hexdigest()

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        if self.away:
            raise StorageError("the object store is away")
        if key not in self.objects:
            raise NotFoundError(f"there is no object {key}")
        return self.objects[key]
