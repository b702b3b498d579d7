"""Async client of a trainer rank's control port (aiohttp, no torch).

>>> async with TrainerClient("http://127.0.0.1:4711", token) as client:
...     await client.wait_ready(deadline_s=60)
...     result = await client.update(UpdateRequest(...), deadline_s=600)
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from storage import errors
from storage.errors import DeadlineError, GangLost, SeamlessFlowError, TrainerError
from workers.trainer.launch import Residency
from workers.trainer.messages import (
    Accumulated,
    ColumnRef,
    ColumnRequest,
    ErrorBody,
    Order,
    TrainerStatus,
    UpdateRequest,
    UpdateResult,
)

_Answer = TypeVar("_Answer", bound=BaseModel)


class TrainerClient:
    """One rank. Every call has a deadline; a rank that cannot be reached is :class:`GangLost`.

    Errors of the rank come back as the classes of ``storage.errors`` they were raised as there: ``FencedError`` for
    an epoch or step that is out of date, ``StorageError`` (nothing was trained, ask again), ``GangLost`` (restart the
    gang from the last checkpoint), ``ConfigError``.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, residency: Residency) -> TrainerClient:
        return cls(residency.url, residency.token)

    async def __aenter__(self) -> TrainerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self, *, deadline_s: float = 5.0) -> TrainerStatus:
        """Answers in every phase, also while the rank trains."""
        return await self._call("GET", "/status", None, TrainerStatus, deadline_s)

    async def update(self, request: UpdateRequest, *, deadline_s: float) -> UpdateResult:
        """Train one step. Repeating the call joins the running update or returns the committed result."""
        return await self._call("POST", "/update", request, UpdateResult, deadline_s)

    async def accumulate(self, request: UpdateRequest, *, deadline_s: float) -> Accumulated:
        """Have gradients computed ahead of a step. Repeating the call changes nothing."""
        return await self._call("POST", "/accumulate", request, Accumulated, deadline_s)

    async def columns(self, request: ColumnRequest, *, deadline_s: float) -> ColumnRef:
        """Have the model say what it can of a batch. Repeating the call joins the pass or returns what it wrote."""
        return await self._call("POST", "/columns", request, ColumnRef, deadline_s)

    async def park(self, epoch: int, *, deadline_s: float) -> TrainerStatus:
        """Leave the device to another role. Repeating the call changes nothing."""
        return await self._call("POST", "/park", Order(epoch=epoch), TrainerStatus, deadline_s)

    async def unpark(self, epoch: int, *, deadline_s: float) -> TrainerStatus:
        """Take the device again. Repeating the call changes nothing."""
        return await self._call("POST", "/unpark", Order(epoch=epoch), TrainerStatus, deadline_s)

    async def shutdown(self, *, deadline_s: float = 10.0) -> TrainerStatus:
        """The rank ends after its answer; a step in work is abandoned and left uncommitted."""
        return await self._call("POST", "/shutdown", None, TrainerStatus, deadline_s)

    async def wait_ready(self, *, deadline_s: float, poll_s: float = 0.1) -> TrainerStatus:
        """Wait until the rank has loaded its state. Raises what made the start fail, or :class:`DeadlineError`."""
        last = "nothing has answered yet"
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        status = await self.status()
                    except (GangLost, DeadlineError) as error:  # not listening yet, or too busy importing
                        last = str(error)
                    else:
                        if status.phase == "failed":
                            raise TrainerError(f"trainer rank {status.rank} at {self.url} failed: {status.last_error}")
                        if status.phase != "starting":
                            return status
                        last = f"phase is {status.phase}"
                    await asyncio.sleep(poll_s)
        except TimeoutError:
            raise DeadlineError(f"trainer at {self.url} was not ready within {deadline_s:g} s: {last}") from None

    async def _call(
        self, method: str, path: str, body: BaseModel | None, answer: type[_Answer], deadline_s: float
    ) -> _Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=None if body is None else body.model_dump(),
                timeout=aiohttp.ClientTimeout(total=deadline_s),
            ) as response:
                text = await response.text()
        except TimeoutError:
            raise DeadlineError(f"trainer {method} {self.url}{path} had no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as error:
            raise GangLost(f"trainer rank at {self.url} cannot be reached ({error}): restart the gang") from error
        if response.status != 200:
            raise _error(response.status, text, self.url + path)
        return answer.model_validate_json(text)


def _error(status: int, text: str, where: str) -> SeamlessFlowError:
    try:
        body = ErrorBody.model_validate_json(text)
    except ValidationError:
        return TrainerError(f"trainer {where} answered {status}: {text[:500]}")
    kind = getattr(errors, body.error, None)
    if isinstance(kind, type) and issubclass(kind, SeamlessFlowError):
        return kind(body.message)
    return TrainerError(f"trainer {where} answered {status} {body.error}: {body.message}")
