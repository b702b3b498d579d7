"""Heartbeats beside work that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from temporalio import activity

T = TypeVar("T")

BEAT_S = 1.0


async def beating(work: Awaitable[T], *details: Any) -> T:
    """Await ``work`` and heartbeat once a second meanwhile; a cancelled activity cancels the work."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            activity.heartbeat(*details)
            done, _ = await asyncio.wait({task}, timeout=BEAT_S)
            if done:
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=BEAT_S)
