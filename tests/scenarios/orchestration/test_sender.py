"""The process that broadcasts weights is there before the engine hears of it, and goes with whoever started it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from storage.errors import EngineUnavailable
from workers.engines.base import Transfer
from workers.node_agent.sender import Sender
from workers.trainer.broadcast import joined


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    """Closed also when the test fails."""
    sender = Sender()
    await sender.prepare()
    yield sender
    await sender.close()


def sends(process: psutil.Process) -> bool:
    try:
        return "workers.trainer.broadcast" in process.cmdline()
    except psutil.NoSuchProcess:  # another test's child, which has ended
        return False


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if sends(child)]


async def test_a_sender_listens_before_the_engine_is_told_and_ends_when_the_load_fails(
    sender: Sender, tmp_path: Path
) -> None:
    (ahead,) = children()

    async def load() -> None:
        async with sender.sending(str(tmp_path)) as transfer:
            assert children() == [ahead]
            _, writer = await asyncio.open_connection(transfer.address, transfer.port)
            writer.close()
            raise EngineUnavailable("the engine has died")

    with pytest.raises(EngineUnavailable, match="the engine has died"):
        await load()
    await sender.close()
    assert children() == []


def receive(transfer: Transfer) -> torch.Tensor:
    """As the rank of an engine."""
    tensor = torch.zeros(3)
    with joined(transfer, 30.0, transfer.rank) as group:
        dist.broadcast(tensor, src=0, group=group)
    return tensor


async def test_one_process_sends_every_version(sender: Sender, tmp_path: Path) -> None:
    started = children()
    for version in (1, 2):
        weights = tmp_path / str(version)
        weights.mkdir()
        save_file({"weight": torch.full((3,), float(version))}, weights / "model.safetensors")
        async with sender.sending(str(weights)) as transfer:
            assert (await asyncio.to_thread(receive, transfer)).tolist() == [version] * 3
    assert children() == started
    await sender.close()
    assert children() == []
