"""Columns: what a model says of the trained tokens of a batch, one number a token, as one immutable object.

Written by the ranks that hold the model (a reference, a critic), read by the ranks that train on it. A token is named
by its task, its span in the task's shard and its place in that span, so a column fits every manifest that holds these
tokens. It is one Arrow IPC stream (zstd); the same column always encodes to the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.errors import IntegrityError, NotFoundError

if TYPE_CHECKING:
    from storage.objects import ObjectStore

COLUMN_OF = {"reference": "reference_logprob", "critic": "value"}
"""By role of the model, the column it writes: log-probs at the sampling temperature in nats, values in rewards."""
RETURN = "return"
"""What the trainer writes for a critic apart: what each value should have been."""
SCHEMA_VERSION = "1"
_SCHEMA = pa.schema(
    [("ordinal", pa.int64()), ("span", pa.int32()), ("offset", pa.int32()), ("value", pa.float32())],
)
_VERSION, _NAME = b"seamlessflow.schema", b"seamlessflow.column"

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Column:
    """``N`` tokens. *Example* ``name="reference_logprob", place_N3=[[17, 4, 0]], value_N=[-1.25]``."""

    name: str
    place_N3: Places
    """Task, span of its shard, index in the span."""
    value_N: Floats


def encode_column(column: Column) -> bytes:
    schema = _SCHEMA.with_metadata({_VERSION: SCHEMA_VERSION.encode(), _NAME: column.name.encode()})
    places = (pa.array(column.place_N3[:, i], type=_SCHEMA.field(i).type) for i in range(3))
    arrays = [*places, pa.array(column.value_N)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return bytes(sink.getvalue())


def decode_column(data: bytes) -> Column:
    """Raises :class:`IntegrityError` if the bytes are no column of this schema."""
    try:
        table = pa.ipc.open_stream(pa.BufferReader(data)).read_all()
        about = table.schema.metadata or {}
        if about.get(_VERSION) != SCHEMA_VERSION.encode() or not table.schema.equals(_SCHEMA):
            raise ValueError(f"schema {about.get(_VERSION)!r}, this release reads {SCHEMA_VERSION}")
        places = np.stack([table.column(i).to_numpy().astype(np.int64) for i in range(3)], axis=1)
        return Column(about[_NAME].decode(), places, table.column("value").to_numpy().astype(np.float32))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise IntegrityError(f"not a readable column ({len(data)} bytes): {error}") from error


def key_for(run: str, name: str, manifest_digest: str, by: str, share: int = 0, shares: int = 1) -> str:
    """Object key of one share of what a model says of a manifest's tokens: who computes it again finds it there.

    ``by``: the state of the model.
    """
    return f"runs/{run}/columns/{manifest_digest}-{name}-{by}-{share + 1}.{shares}.arrow"


def write_column(store: ObjectStore, key: str, column: Column) -> str:
    """Write the object; returns its sha256."""
    return store.put(key, encode_column(column))


def find_column(store: ObjectStore, key: str) -> str | None:
    """sha256 of the column that an earlier attempt wrote under ``key``; None if there is none that can be read."""
    try:
        data = store.get(key)
        decode_column(data)
    except (NotFoundError, IntegrityError):
        return None
    return hashlib.sha256(data).hexdigest()


def look_up(columns: Sequence[Column], place_M3: Places) -> Floats:
    """The values of the tokens at ``place_M3``, in order, from columns that may hold more.

    Raises :class:`IntegrityError` if one of them is in no column.
    """
    known_N3 = np.concatenate([column.place_N3 for column in columns])
    _, number = np.unique(np.concatenate([known_N3, place_M3]), axis=0, return_inverse=True)
    number = number.reshape(-1)
    table = np.full(len(number), np.nan, np.float32)
    found = np.zeros(len(number), bool)
    table[number[: len(known_N3)]] = np.concatenate([column.value_N for column in columns])
    found[number[: len(known_N3)]] = True
    wanted = number[len(known_N3) :]
    if not found[wanted].all():
        task, span, offset = place_M3[int(np.argmin(found[wanted]))].tolist()
        raise IntegrityError(
            f"column {columns[0].name} says nothing of token {offset} of span {span} of task {task}, which is trained: "
            "it is of another batch"
        )
    return table[wanted]
