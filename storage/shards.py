"""Shards: the prefix-merged token tree of one group, as one immutable object.

A shard is three Arrow IPC streams (zstd) one after the other: spans,
generations, sessions. It is readable by pyarrow alone::

    reader = pyarrow.BufferReader(data)
    spans, generations, sessions = (pyarrow.ipc.open_stream(reader).read_all() for _ in range(3))

The same shard always encodes to the same bytes, so a rewrite is the same object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import IntegrityError
from storage.tree import ROOT, UNKNOWN_VERSION, Generation, SessionRow, Shard, Span, TreePath, path_to, paths

__all__ = [
    "ROOT",
    "SCHEMA_VERSION",
    "UNKNOWN_VERSION",
    "Generation",
    "SessionRow",
    "Shard",
    "Span",
    "TreePath",
    "decode",
    "digest_of",
    "encode",
    "key_for",
    "path_to",
    "paths",
    "show",
]

SCHEMA_VERSION = 1
"""Of the format; a shard of another version is refused."""

_IDS = pa.list_(pa.int32())
_TABLES = {
    "spans": pa.schema(
        [
            ("parent", pa.int32()),
            ("kind", pa.utf8()),
            ("ids", _IDS),
            ("logprobs", pa.list_(pa.float32())),
            ("version_values", _IDS),
            ("version_lengths", _IDS),
            ("generation", pa.utf8()),
        ]
    ),
    "generations": pa.schema(
        [
            ("id", pa.utf8()),
            ("session", pa.utf8()),
            ("turn", pa.int32()),
            ("choice", pa.int32()),
            ("spans", _IDS),
            ("finish_reason", pa.utf8()),
            ("temperature", pa.float64()),
            ("top_p", pa.float64()),
            ("trainable", pa.bool_()),
            ("segments", pa.utf8()),
        ]
    ),
    "sessions": pa.schema(
        [
            ("id", pa.utf8()),
            ("sample", pa.int32()),
            ("attempt", pa.int32()),
            ("reward", pa.float64()),
            ("status", pa.utf8()),
            ("turns", pa.int32()),
            ("forks", pa.int32()),
            ("leaves", _IDS),
        ]
    ),
}


def encode(shard: Shard) -> bytes:
    """The object for a shard. Raises IntegrityError if it breaks the format."""
    shard.validate()
    columns: dict[str, list[list[Any]]] = {
        "spans": [
            [s.parent, s.kind, s.ids, s.logprobs, s.versions[0], s.versions[1], s.generation] for s in shard.spans
        ],
        "generations": [
            [*(g.id, g.session, g.turn, g.choice, list(g.spans), g.finish_reason), *_policy(g)]
            for g in shard.generations
        ],
        "sessions": [
            [r.id, r.sample, r.attempt, r.reward, r.status, r.turns, r.forks, list(r.leaves)] for r in shard.sessions
        ],
    }
    sink = pa.BufferOutputStream()
    for table, rows in columns.items():
        _write(sink, shard, table, rows)
    return bytes(sink.getvalue())


def decode(data: bytes) -> Shard:
    """The shard in an object. Raises IntegrityError if the bytes are none, or break the format."""
    try:
        tables = _read(data)
        shard = _build(tables)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise IntegrityError(f"not a readable shard ({len(data)} bytes): {error}") from error
    shard.validate()
    return shard


def prefix_of(run: str) -> str:
    """Where the object keys of a run's shards begin, and of nothing else."""
    return f"runs/{run}/shards/"


def key_for(run: str, ordinal: int, sha256: str) -> str:
    """Object key of a shard: the same content has the same key."""
    return f"{prefix_of(run)}{ordinal:08d}-{sha256}.arrow"


def digest_of(data: bytes) -> str:
    """sha256 hex of an encoded shard."""
    return hashlib.sha256(data).hexdigest()


def show(shard: Shard) -> str:
    """The shard as text for people: the tree of spans, then sessions and their generations."""
    tokens = {kind: sum(len(s.ids) for s in shard.spans if s.kind == kind) for kind in ("prompt", "completion")}
    lines = [
        f"group {shard.run}/{shard.stream}/{shard.ordinal}: {len(shard.sessions)} sessions, {len(shard.spans)} spans, "
        f"{tokens['prompt']} prompt and {tokens['completion']} completion tokens"
    ]
    lines += _show_tree(shard)
    for row in shard.sessions:
        lines.append(
            f"session {row.id} sample {row.sample} attempt {row.attempt} reward {row.reward:g} {row.status} "
            f"turns {row.turns} forks {row.forks} leaves {list(row.leaves)}"
        )
        lines += [_show_generation(g) for g in shard.generations if g.session == row.id]
    return "\n".join(lines) + "\n"


def _policy(generation: Generation) -> tuple[float, float, bool, str]:
    return generation.temperature, generation.top_p, generation.trainable, _canonical(generation.segments)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _write(sink: pa.BufferOutputStream, shard: Shard, table: str, rows: list[list[Any]]) -> None:
    about = {"table": table, "schema": str(SCHEMA_VERSION), "run": shard.run, "stream": shard.stream}
    about["ordinal"] = str(shard.ordinal)
    schema = _TABLES[table].with_metadata({f"seamlessflow.{name}": value for name, value in about.items()})
    arrays = [pa.array([row[i] for row in rows], type=schema.field(i).type) for i in range(len(schema))]
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))


def _read(data: bytes) -> dict[str, pa.Table]:
    reader = pa.BufferReader(data)
    tables = {}
    for name, schema in _TABLES.items():
        table = pa.ipc.open_stream(reader).read_all()
        table.validate(full=True)
        about = _about(table)
        if about.get("table") != name or about.get("schema") != str(SCHEMA_VERSION):
            raise ValueError(f"expected table {name!r} of schema {SCHEMA_VERSION}, found {about}")
        if not table.schema.equals(schema):
            raise ValueError(f"table {name!r} has columns {table.schema.names}, expected {schema.names}")
        tables[name] = table
    if reader.tell() != len(data):
        raise ValueError(f"{len(data) - reader.tell()} bytes after the last table")
    return tables


def _about(table: pa.Table) -> dict[str, str]:
    prefix = "seamlessflow."
    entries = ((key.decode(), value.decode()) for key, value in (table.schema.metadata or {}).items())
    return {key.removeprefix(prefix): value for key, value in entries if key.startswith(prefix)}


def _build(tables: Mapping[str, pa.Table]) -> Shard:
    about = _about(tables["spans"])
    generations = (
        Generation(**{**row, "spans": tuple(row["spans"]), "segments": tuple(json.loads(row["segments"]))})
        for row in tables["generations"].to_pylist()
    )
    sessions = (SessionRow(**{**row, "leaves": tuple(row["leaves"])}) for row in tables["sessions"].to_pylist())
    return Shard(
        run=about["run"],
        stream=about["stream"],
        ordinal=int(about["ordinal"]),
        spans=tuple(_spans(tables["spans"])),
        generations=tuple(generations),
        sessions=tuple(sessions),
    )


def _spans(table: pa.Table) -> Iterable[Span]:
    parents, kinds, generations = (table.column(name).to_pylist() for name in ("parent", "kind", "generation"))
    ids, values, lengths = (_arrays(table, name, np.int32) for name in ("ids", "version_values", "version_lengths"))
    logprobs = _arrays(table, "logprobs", np.float32)
    for i, kind in enumerate(kinds):
        yield Span(parents[i], kind, ids[i], logprobs[i], (values[i], lengths[i]), generations[i])


def _arrays(table: pa.Table, name: str, dtype: Any) -> list[np.ndarray[Any, Any]]:
    column = table.column(name).combine_chunks()
    flat = np.array(column.values.to_numpy(zero_copy_only=False), dtype=dtype)
    ends = column.offsets.to_numpy()
    return [flat[start:end] for start, end in pairwise(ends)]


def _show_tree(shard: Shard) -> list[str]:
    depth: dict[int, int] = {ROOT: -1}
    children: dict[int, list[int]] = {}
    for index, span in enumerate(shard.spans):
        depth[index] = depth[span.parent] + 1
        children.setdefault(span.parent, []).append(index)
    lines, todo = [], list(reversed(children.get(ROOT, [])))
    while todo:
        index = todo.pop()
        lines.append("  " * (depth[index] + 1) + _show_span(index, shard.spans[index]))
        todo += reversed(children.get(index, []))
    return lines


def _show_span(index: int, span: Span) -> str:
    head = " ".join(str(i) for i in span.ids[:8]) + (" ..." if len(span.ids) > 8 else "")
    text = f"[{index}] {span.kind} {len(span.ids)} tokens: {head}"
    if span.kind == "prompt":
        return text
    values, lengths = span.versions
    versions = " ".join(f"v{value}x{length}" for value, length in zip(values, lengths, strict=True))
    mean = float(span.logprobs.mean()) if len(span.logprobs) else 0.0
    return f"{text} | {span.generation} | {versions} | mean logprob {mean:.4f}"


def _show_generation(generation: Generation) -> str:
    masked = "" if generation.trainable else " not trainable"
    return (
        f"  generation {generation.id} turn {generation.turn} choice {generation.choice} "
        f"spans {list(generation.spans)} {generation.finish_reason} temperature {generation.temperature:g} "
        f"top_p {generation.top_p:g}{masked} segments {_canonical(generation.segments)}"
    )
