"""Task tokens on disk: after a kill the agent fails its old attempts itself, so that they start again at once.

Without this the server waits for the heartbeat timeout (20 s) before it gives
the work out again; with it a restarted agent has its processes back in about a
second.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

log = logging.getLogger(__name__)


class TaskTokens:
    """One file per running activity in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the current activity's token on disk while it runs."""
        token = activity.info().task_token
        path = self._folder / f"{hashlib.sha256(token).hexdigest()[:32]}.token"
        self._folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(token)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    async def fail_old(self, client: Client) -> int:
        """Fail the attempts that a killed agent left behind; returns how many there were."""
        old = sorted(self._folder.glob("*.token"))
        for path in old:
            again = ApplicationError("the node agent was restarted", next_retry_delay=timedelta(milliseconds=1))
            try:
                await client.get_async_activity_handle(task_token=path.read_bytes()).fail(again)
            except RPCError as error:  # the server gave it up already
                log.info("an old attempt could not be failed: %s", error)
            path.unlink(missing_ok=True)
        return len(old)
