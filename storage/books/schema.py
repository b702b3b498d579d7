"""Tables of the ledger, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.engine import Dialect

VERSION = 6
"""Of the schema; older databases are brought up to it (:mod:`storage.books.upgrade`), others are refused."""

metadata = MetaData()
_TAKEN = text("step IS NOT NULL")
_UNCOLLECTED = text("closed AND collected IS NULL")
_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""Of rows that only have to differ. SQLite gives such numbers to INTEGER columns only."""


class Json(TypeDecorator[Any]):
    """JSON as text: a server's own type refuses the NaN that a diverged step reports."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        # Databases made by version 2 hold bare numbers as numbers.
        return json.loads(value) if isinstance(value, str) else value


class Prose(TypeDecorator[str]):
    """Text of unknown origin, e.g. the end of an agent's output: no SQL text holds a NUL or half a surrogate pair."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value and value.replace("\0", "\N{SYMBOL FOR NULL}").encode(errors="replace").decode()


about = Table("about", metadata, Column("name", String, primary_key=True), Column("value", String, nullable=False))

runs = Table(
    "runs",
    metadata,
    Column("run", String, primary_key=True),
    Column("spec", Json, nullable=False),
    Column("spec_digest", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("stopped", Float),
    Column("lineage", Integer, nullable=False),
)

streams = Table(
    "streams",
    metadata,
    Column("run", String, primary_key=True),
    Column("stream", String, primary_key=True),
    Column("admit_until", BigInteger, nullable=False),
    Column("target_in_flight", Integer, nullable=False),
    Column("samples_per_task", Integer, nullable=False),
    Column("paused", Boolean, nullable=False),
    Column("produced", BigInteger, nullable=False),
    Column("per_route", Integer),
    Column("fresh_from", BigInteger),
    Column("fresh_version", Integer),
)

samples = Table(
    "samples",
    metadata,
    Column("run", String, primary_key=True),
    Column("stream", String, primary_key=True),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("sample", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("cause", String),
    Column("detail", Prose),
    Column("worker", String),
    Column("session", String),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("turns", Integer),
    Column("min_version", Integer),
    Column("max_version", Integer),
    Column("output", Json),
    Column("reward", Float),
    Column("reward_worker", String),
    Column("reward_until", Float),
    Column("tokens", BigInteger),
    Column("lineage", Integer),
    Column("step", Integer),
    Index("samples_by_state", "run", "state", "stream", "ordinal", "sample"),
    Index("samples_by_step", "run", "lineage", "step", sqlite_where=_TAKEN, postgresql_where=_TAKEN),
)

attempts = Table(
    "attempts",
    metadata,
    Column("run", String, primary_key=True),
    Column("stream", String, primary_key=True),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("sample", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("cause", String, nullable=False),
    Column("detail", Prose, nullable=False),
    Column("worker", String),
    Column("session", String),
    Column("ended", Float, nullable=False),
)
"""Attempts that ended without a result, with why; the last one of a failed sample included."""

groups = Table(
    "groups",
    metadata,
    Column("run", String, primary_key=True),
    Column("stream", String, primary_key=True),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("shard_key", String, nullable=False),
    Column("sha256", String, nullable=False),
    Column("state", String, nullable=False),
    Column("cause", String),
    Column("start_version", Integer),
    Column("rewards", Json, nullable=False),
    Column("lineage", Integer),
    Column("step", Integer),
    Column("completed", Float),
    Index("groups_by_state", "run", "stream", "state", "ordinal"),
)

batches = Table(
    "batches",
    metadata,
    Column("run", String, primary_key=True),
    Column("lineage", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("state", String, nullable=False),
    Column("zero_variance", Integer, nullable=False),
    Column("stale", Integer, nullable=False),
    Column("reward_mean", Float, nullable=False),
    Column("reward_std", Float, nullable=False),
    Column("manifest_key", String),
    Column("manifest_digest", String),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run", String, primary_key=True),
    Column("lineage", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("path", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("weights_path", String, nullable=False),
    Column("weights_digest", String, nullable=False),
    Column("metrics", Json, nullable=False),
    Column("created", Float, nullable=False),
    Column("critic_path", String),
    Column("critic_digest", String),
)

steps = Table(
    "steps",
    metadata,
    Column("run", String, primary_key=True),
    Column("lineage", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("metrics", Json, nullable=False),
    Column("recorded", Float, nullable=False),
)

intervals = Table(
    "intervals",
    metadata,
    Column("id", _NUMBER, primary_key=True),
    Column("run", String, nullable=False),
    Column("node", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("start", Float, nullable=False),
    Column("end", Float, nullable=False),
    UniqueConstraint("run", "node", "kind", "start"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _NUMBER, primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", String, nullable=False),
    Column("what", String, nullable=False),
    Column("why", Prose, nullable=False),
    Column("data", Json, nullable=False),
)

routes = Table(
    "routes",
    metadata,
    Column("lease", String, primary_key=True),
    Column("run", String, nullable=False),
    Column("node", String, nullable=False),
    Column("url", String, nullable=False),
    Column("engine_kind", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("state", String, nullable=False),
)

node_epochs = Table(
    "node_epochs",
    metadata,
    Column("node", String, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
)
"""Newest epoch seen of each node: it outlives the routes, so a deleted route stays fenced."""

node_profiles = Table(
    "node_profiles",
    metadata,
    Column("node", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("profile", Json, nullable=False),
    Column("measured", Float, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session", String, primary_key=True),
    Column("key_hash", String, nullable=False, unique=True),
    Column("run", String, nullable=False),
    Column("stream", String),
    Column("ordinal", BigInteger),
    Column("sample", Integer),
    Column("attempt", Integer, nullable=False),
    Column("policy", Json, nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("parent", String, index=True),
    Column("label", Prose),
    Column("created", Float, nullable=False, server_default="0"),
    Column("ended", Float),
    Column("proxy", String),
    Column("reward", Float),
    Column("reward_cause", Prose),
    Column("turns", BigInteger),
    Column("forks", BigInteger),
    Column("collected", BigInteger),
    Index("sessions_by_sample", "run", "stream", "ordinal", "sample", "attempt"),
    Index("sessions_open", "closed", "run", "session"),
    Index("sessions_uncollected", "run", sqlite_where=_UNCOLLECTED, postgresql_where=_UNCOLLECTED),
)

proxies = Table(
    "proxies",
    metadata,
    Column("proxy", String, primary_key=True),
    Column("url", String, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("routes_seen", BigInteger, nullable=False),
)
