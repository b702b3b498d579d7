"""The control port of one rank: answers at any time, while torch works in a thread of its own."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from storage.errors import (
    AuthenticationFailed,
    ConfigError,
    FencedError,
    GangLost,
    InvalidRequest,
    SeamlessFlowError,
    TrainerError,
)
from workers.trainer.launch import Launch
from workers.trainer.messages import (
    Accumulated,
    ColumnRef,
    ColumnRequest,
    ErrorBody,
    Message,
    Order,
    TrainerStatus,
    UpdateRequest,
    UpdateResult,
)
from workers.trainer.progress import Progress

if TYPE_CHECKING:
    from workers.trainer.rank import Rank  # imports torch

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=Message)
_Identity = tuple[str, str]
"""What is asked for, in words, and the digest of its manifest."""
_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlServer:
    """Serialises updates, joins repeated ones, refuses old epochs.

    ``make_trainer`` imports torch and runs in the working thread, so that the port listens before that is done.
    """

    def __init__(self, launch: Launch, make_trainer: Callable[[], Rank]) -> None:
        self._launch = launch
        self._make_trainer = make_trainer
        self._trainer: Rank | None = None
        self._epoch = launch.epoch
        self._last_error: str | None = None
        self._lost = False
        self._running: tuple[_Identity, asyncio.Task[Any]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._stopped = asyncio.Event()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._edge])
        application.router.add_get("/status", self._get_status)
        application.router.add_post("/update", self._post_update)
        application.router.add_post("/accumulate", self._post_accumulate)
        application.router.add_post("/columns", self._post_columns)
        application.router.add_post("/park", self._post_park)
        application.router.add_post("/unpark", self._post_unpark)
        application.router.add_post("/shutdown", self._post_shutdown)
        return application

    async def start_trainer(self) -> None:
        """Load the model; a failure is kept for ``/status``."""
        try:
            self._trainer = await self._work(self._start)
        except Exception as error:  # noqa: BLE001  # whatever made the start fail must be seen from outside
            self._fail(error)

    def stop(self) -> None:
        """End :meth:`wait_stopped`."""
        self._stopped.set()

    async def wait_stopped(self) -> None:
        await self._stopped.wait()

    def status(self) -> TrainerStatus:
        progress = self._trainer.progress if self._trainer is not None else Progress()
        phase = "failed" if self._lost else "stopping" if self._stopped.is_set() else progress.phase
        return TrainerStatus(
            rank=self._launch.rank,
            world_size=self._launch.world_size,
            pid=os.getpid(),
            phase=phase,
            step=progress.step,
            version=progress.version,
            lineage=progress.lineage,
            epoch=self._epoch,
            last_error=self._last_error,
        )

    async def update(self, request: UpdateRequest) -> UpdateResult:
        """Run an update, or join the one that runs. See :meth:`Rank.update` for what it raises."""
        return await self._on(request, "update", lambda trainer: trainer.update(request))

    async def accumulate(self, request: UpdateRequest) -> Accumulated:
        """Compute gradients ahead of a step, or join who does. See :meth:`Rank.accumulate` for what it raises."""
        groups = await self._on(request, "accumulate", lambda trainer: trainer.accumulate(request))
        return Accumulated(groups=groups)

    async def columns(self, request: ColumnRequest) -> ColumnRef:
        """Have the model say what it can of a batch, or join who does. See :meth:`Rank.columns`."""
        what = f"share {request.share + 1} of {request.shares} of the columns"
        return await self._on(request, what, lambda rank: rank.columns(request))

    async def park(self, epoch: int) -> TrainerStatus:
        """Leave the device to another role; refused while an update runs."""
        await self._run(("park", ""), epoch, lambda trainer: trainer.park())
        return self.status()

    async def unpark(self, epoch: int) -> TrainerStatus:
        """Take the device again."""
        await self._run(("unpark", ""), epoch, lambda trainer: trainer.unpark())
        return self.status()

    async def _on(self, request: UpdateRequest, what: str, work: Callable[[Rank], _T]) -> _T:
        name = f"{what} of step {request.step} of lineage {request.lineage}"
        return await self._run((name, request.manifest_digest), request.epoch, work)

    async def _run(self, identity: _Identity, epoch: int, work: Callable[[Rank], _T]) -> _T:
        self._admit(epoch)
        if self._running is None:
            # A task of its own: a caller that goes away must not cut a collective operation short.
            task: asyncio.Task[_T] = asyncio.create_task(self._train(identity[0], work))
            self._running = (identity, task)
        else:
            running, task = self._running
            if running != identity:
                raise TrainerError(f"{identity[0]} cannot start: {running[0]} is in work")
        return await asyncio.shield(task)

    def _admit(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise FencedError(f"epoch {epoch} is out of date: this trainer has seen epoch {self._epoch}")
        self._epoch = epoch
        if self._lost:
            raise GangLost(f"this trainer has failed and must be restarted: {self._last_error}")
        if self._trainer is None:
            raise TrainerError("the trainer is still starting: wait for phase ready")

    async def _train(self, what: str, work: Callable[[Rank], _T]) -> _T:
        assert self._trainer is not None  # noqa: S101  # _admit has checked it
        trainer = self._trainer
        try:
            result = await self._work(lambda: work(trainer))
        except SeamlessFlowError as error:
            if isinstance(error, GangLost) or trainer.progress.phase == "failed":
                self._fail(error)
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        except Exception as error:
            self._fail(error)
            raise GangLost(f"{what} failed: {self._last_error}") from error
        finally:
            self._running = None
        self._last_error = None
        return result

    def _start(self) -> Rank:
        trainer = self._make_trainer()
        trainer.start()
        return trainer

    async def _work(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _fail(self, error: BaseException) -> None:
        _log.error("trainer rank %d failed", self._launch.rank, exc_info=error)
        self._lost = True
        self._last_error = f"{type(error).__name__}: {error}"

    @web.middleware
    async def _edge(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        expected = f"Bearer {self._launch.token}".encode()
        try:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
                raise AuthenticationFailed("the control port of a trainer needs the bearer token of its launch file")
            return await handler(request)
        except SeamlessFlowError as error:
            body = ErrorBody(error=type(error).__name__, message=str(error))
            return web.json_response(body.model_dump(), status=_http_status(error))

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.json_response(self.status().model_dump())

    async def _post_update(self, request: web.Request) -> web.Response:
        result = await self.update(await _parsed(request, UpdateRequest))
        return web.json_response(result.model_dump())

    async def _post_accumulate(self, request: web.Request) -> web.Response:
        result = await self.accumulate(await _parsed(request, UpdateRequest))
        return web.json_response(result.model_dump())

    async def _post_columns(self, request: web.Request) -> web.Response:
        result = await self.columns(await _parsed(request, ColumnRequest))
        return web.json_response(result.model_dump())

    async def _post_park(self, request: web.Request) -> web.Response:
        return web.json_response((await self.park((await _parsed(request, Order)).epoch)).model_dump())

    async def _post_unpark(self, request: web.Request) -> web.Response:
        return web.json_response((await self.unpark((await _parsed(request, Order)).epoch)).model_dump())

    async def _post_shutdown(self, _: web.Request) -> web.Response:
        self.stop()
        return web.json_response(self.status().model_dump())


async def _parsed(request: web.Request, kind: type[_Body]) -> _Body:
    try:
        return kind.model_validate_json(await request.text())
    except ValidationError as error:
        raise InvalidRequest(f"{request.path}: {error}") from error


def _http_status(error: SeamlessFlowError) -> int:
    match error:
        case AuthenticationFailed():
            return 401
        case FencedError():
            return 409
        case InvalidRequest() | ConfigError():
            return 400
        case _:
            return 500
