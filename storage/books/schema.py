"""Tables of the ledger. Portable column types only: SQLite now, PostgreSQL with the same definitions."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
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
    UniqueConstraint,
    text,
)

VERSION = 2
"""Of the schema; a database of another version is refused."""

metadata = MetaData()
_TAKEN = text("step IS NOT NULL")

about = Table("about", metadata, Column("name", String, primary_key=True), Column("value", String, nullable=False))

runs = Table(
    "runs",
    metadata,
    Column("run", String, primary_key=True),
    Column("spec", JSON, nullable=False),
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
    Column("detail", Text),
    Column("worker", String),
    Column("session", String),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("turns", Integer),
    Column("min_version", Integer),
    Column("max_version", Integer),
    Column("output", JSON),
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
    Column("detail", Text, nullable=False),
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
    Column("rewards", JSON, nullable=False),
    Column("lineage", Integer),
    Column("step", Integer),
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
    Column("metrics", JSON, nullable=False),
    Column("created", Float, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("run", String, primary_key=True),
    Column("lineage", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("metrics", JSON, nullable=False),
    Column("recorded", Float, nullable=False),
)

intervals = Table(
    "intervals",
    metadata,
    Column("id", Integer, primary_key=True),
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
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", String, nullable=False),
    Column("what", String, nullable=False),
    Column("why", Text, nullable=False),
    Column("data", JSON, nullable=False),
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
    Column("policy", JSON, nullable=False),
    Column("closed", Boolean, nullable=False),
    Index("sessions_by_sample", "run", "stream", "ordinal", "sample", "attempt"),
)
