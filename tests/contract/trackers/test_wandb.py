"""The Weights & Biases client, for real and without network: what it wrote is what it was told."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from workers.tracking.trackers import Wandb
from workflows.spec import WandbSpec


@pytest.fixture(autouse=True, scope="module")
def service() -> Iterator[None]:
    """W&B starts a process of its own, which it would look for at the end of the session."""
    yield
    wandb.teardown()


def records(folder: Path) -> Iterator[Record]:
    """Records of the one file that an offline run writes: a header of 7 bytes, then a log in LevelDB's format.

    Each record has CRC u32, length u16 and type u8 in front; type 1 is a whole record. A short run fits one block.
    """
    (path,) = folder.rglob("run-*.wandb")
    data = path.read_bytes()[7:]
    assert len(data) < 32768 - 7
    while data:
        _, length, kind = struct.unpack("<IHB", data[:7])
        assert kind == 1
        yield Record.FromString(data[7 : 7 + length])
        data = data[7 + length :]


def test_an_offline_run_holds_every_figure_of_every_step(tmp_path: Path) -> None:
    tracker = Wandb("demo", WandbSpec(project="p", mode="offline"), {"seed": 3}, tmp_path)
    for step in range(3):
        tracker.log({"train/loss": 1.0 / 2**step}, step=step, at=0.0)
    tracker.close()
    told = [record.history.item for record in records(tmp_path) if record.HasField("history")]
    rows = [{item.key or "/".join(item.nested_key): item.value_json for item in items} for items in told]
    assert [(row["step"], row["train/loss"]) for row in rows] == [("0", "1"), ("1", "0.5"), ("2", "0.25")]
