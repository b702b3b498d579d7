"""The process that broadcasts weights is there before the engine hears of it, and goes with whoever started it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from storage.errors import EngineUnavailable
from workers.node_agent.sender import Sender


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "workers.trainer.broadcast" in child.cmdline()]


async def test_a_sender_listens_before_the_engine_is_told_and_ends_when_the_load_fails(tmp_path: Path) -> None:
    sender = Sender()
    await sender.prepare()
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


async def test_a_sender_that_was_started_ahead_ends_when_it_is_no_longer_needed() -> None:
    sender = Sender()
    await sender.prepare()
    await sender.prepare()
    assert len(children()) == 1
    await sender.close()
    assert children() == []
