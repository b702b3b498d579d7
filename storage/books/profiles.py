"""What was measured of each node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part, upsert
from storage.books.schema import node_profiles


class Profiles(Part):
    """Device profiles by node and model; a new measurement replaces the last."""

    def put_profile(self, node: str, model: str, profile: Mapping[str, Any]) -> None:
        row = {"node": node, "model": model, "profile": dict(profile), "measured": time.time()}
        with self._db.write() as connection:
            upsert(connection, node_profiles, ("node", "model"), row)

    def profiles(self, node: str | None = None) -> list[dict[str, Any]]:
        """``node``, ``model``, ``profile`` and ``measured`` (unix seconds) of each, by node and model."""
        columns = node_profiles.c
        query = sa.select(node_profiles).order_by(columns.node, columns.model)
        with self._db.read() as connection:
            rows = connection.execute(query if node is None else query.where(columns.node == node)).all()
        return [dict(row._mapping) for row in rows]
