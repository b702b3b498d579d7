"""The ranks of one role on a node: one member of a gang. Start, find again, drive an update or a pass, end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from storage.errors import DeadlineError, GangLost, SeamlessFlowError, TrainerError
from storage.ports import free_port
from workers.cluster import StateFolder
from workers.node_agent.engine import node_spec
from workers.node_agent.spawn import spawn, tail
from workers.residency import GangResidency
from workers.trainer.client import TrainerClient
from workers.trainer.launch import Launch, Residency
from workers.trainer.messages import ColumnRef as WrittenColumn
from workers.trainer.messages import ColumnRequest, TrainerStatus, UpdateRequest, UpdateResult
from workflows.messages import (
    CheckpointRef,
    ColumnRef,
    ColumnsOutcome,
    ColumnsTask,
    GangRole,
    GangView,
    TrainerTask,
    TrainInterval,
    TrainOutcome,
    TrainTask,
    WeightsRef,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Answer = TypeVar("_Answer", covariant=True)


class _Ask(Protocol[_Answer]):
    """A method of :class:`TrainerClient` that has a batch worked on."""

    async def __call__(self, client: TrainerClient, request: UpdateRequest, /, *, deadline_s: float) -> _Answer: ...


class _Order(Protocol):
    """``park`` or ``unpark`` of :class:`TrainerClient`."""

    async def __call__(self, client: TrainerClient, epoch: int, /, *, deadline_s: float) -> TrainerStatus: ...


START_LIMIT_S = 600.0
POLL_S = 0.1
PARK_LIMIT_S = 300.0
IDLE = frozenset({"ready", "parked"})


def rank_command(launch: Path) -> list[str]:
    """Command line of one trainer rank."""
    return [sys.executable, "-m", "workers.trainer", "--launch", str(launch)]


class TrainerHost:
    """One node's ranks of one role. A gang whose rank died is ended as a whole and never repaired.

    ``host``: the name under which other members reach rank 0. ``command``: how a rank is started from its launch file.
    """

    def __init__(
        self,
        state: StateFolder,
        node: str,
        *,
        role: GangRole = "trainer",
        host: str = "127.0.0.1",
        command: Callable[[Path], list[str]] | None = None,
    ) -> None:
        self._role = role
        self._prefix = "" if role == "trainer" else f"{role}-"
        self._command = command or rank_command
        self._state = state
        self._node = node
        self._host = host
        self._folder = state.node(node)
        self._file = self._folder / f"{self._prefix}gang.json"
        self._lock = asyncio.Lock()

    async def probe(self, run: str) -> GangView:
        """Which gang lives here with all its ranks idle, and at which version; ranks that start are waited for."""
        found = GangResidency.read(self._file)
        none = GangView(node=self._node, gang=None, ranks=0, host=self._host, free_port=free_port())
        if found is None or found.run != run or not found.complete or found.dead():
            return none
        try:
            await self._wait_ready(found.gang)
            statuses = await asyncio.gather(*(self._status(rank) for rank in found.ranks))
        except SeamlessFlowError as error:
            log.warning("gang %s does not answer: %s", found.gang, error)
            return none
        versions = {status.version for status in statuses}
        if len(versions) != 1 or any(status.phase not in IDLE for status in statuses):
            return none
        return none.model_copy(update={"gang": found.gang, "ranks": len(found.ranks), "version": versions.pop()})

    async def ensure(self, task: TrainerTask, *, parked: bool = False) -> None:
        """Find the gang's ranks, or end what is here and start them; returns when they are ready, or ``parked``.

        Raises :class:`GangLost` if a rank of this very gang has died, :class:`FencedError` if a newer lease has them.
        """
        async with self._lock:
            found = GangResidency.read(self._file)
            if found is None or found.gang != task.gang:
                await self._end()
                await self._launch(task)
            await self._wait_ready(task.gang)
            await (self.park(task) if parked else self._order(task, TrainerClient.unpark))

    async def park(self, task: TrainerTask) -> None:
        """Have the gang's ranks leave the device to another role; those that have done so stay as they are."""
        await self._order(task, TrainerClient.park)

    async def until_dead(self, gang: str) -> str:
        """Watch the ranks; returns why the gang is lost."""
        while True:
            if why := self._lost(gang):
                return why
            await asyncio.sleep(POLL_S)

    async def quiesce(self, gang: str, *, limit_s: float) -> None:
        """Wait until a running update has ended, so that the node can be used by others.

        Raises :class:`GangLost` after ``limit_s``, or if a rank has failed: the others may wait for it for ever. The
        ranks were ended instead.
        """
        found = GangResidency.read(self._file)
        if found is None or found.gang != gang:
            return
        end = time.monotonic() + limit_s
        while True:
            statuses = [await self._status(rank) for rank in found.ranks]
            if all(status.phase in IDLE for status in statuses):
                return
            failed = [status for status in statuses if status.phase == "failed"]
            if failed or time.monotonic() > end:
                await self.end(found.run)
                why = f"rank {failed[0].rank} has failed" if failed else f"it was busy for {limit_s:g} s"
                raise GangLost(f"gang {gang} was revoked and {why}: its ranks were ended")
            await asyncio.sleep(POLL_S)

    async def update(self, task: TrainTask) -> TrainOutcome:
        """Send one update to every rank of the node; all of them or none answer with a result."""
        start = time.time()
        found, results = await self._ask_ranks(task, TrainerClient.update)
        leader = results[0] if found.ranks[0] == 0 else None
        return TrainOutcome(
            node=self._node,
            start=start,
            end=time.time(),
            checkpoint=_checkpoint(leader) if leader else None,
            metrics={k: float(v) for k, v in results[0].metrics.model_dump().items()},
            dropped=results[0].dropped,
            returns=ColumnRef(**returns.model_dump()) if (returns := results[0].returns) else None,
        )

    async def accumulate(self, task: TrainTask) -> TrainInterval:
        """Have every rank of the node compute gradients ahead of the step; when that was."""
        start = time.time()
        await self._ask_ranks(task, TrainerClient.accumulate)
        return TrainInterval(node=self._node, start=start, end=time.time())

    async def columns(self, task: ColumnsTask) -> ColumnsOutcome:
        """Have the ranks of the node, which are a gang of their own, say what their model can of a share of a batch."""
        start = time.time()

        async def ask(client: TrainerClient, request: UpdateRequest, /, *, deadline_s: float) -> WrittenColumn:
            shared = ColumnRequest(**request.model_dump(), share=task.share, shares=task.shares)
            return await client.columns(shared, deadline_s=deadline_s)

        _, written = await self._ask_ranks(task, ask)
        busy = TrainInterval.model_validate(
            {"node": self._node, "start": start, "end": time.time(), "kind": self._role}
        )
        return ColumnsOutcome(column=ColumnRef(**written[0].model_dump()), busy=busy)

    async def _ask_ranks(self, task: TrainTask, ask: _Ask[_T]) -> tuple[GangResidency, list[_T]]:
        found = GangResidency.read(self._file)
        if found is None or found.gang != task.gang:
            raise GangLost(f"gang {task.gang} is not on {self._node} (here: {found.gang if found else 'none'})")
        watch = asyncio.ensure_future(self.until_dead(task.gang))
        calls = [asyncio.ensure_future(self._ask_rank(rank, task, ask)) for rank in found.ranks]
        try:
            return found, await _all_or_first(calls, watch)
        except DeadlineError as error:
            raise GangLost(f"step {task.manifest.step} took longer than {task.time_limit_s:g} s: {error}") from error
        finally:
            await _cancel(watch, *calls)

    async def end(self, run: str) -> None:
        """End the ranks if they belong to ``run``."""
        found = GangResidency.read(self._file)
        if found is not None and found.run == run:
            await self._end()

    def resident(self) -> GangResidency | None:
        """The ranks that were started here, dead ones included."""
        return GangResidency.read(self._file)

    # Mechanics

    async def _launch(self, task: TrainerTask) -> None:
        node = node_spec(task.spec, self._node)
        ranks = tuple(range(task.first_rank, task.first_rank + task.ranks))
        gang = GangResidency(gang=task.gang, run=task.run, ranks=ranks)
        gang.write(self._file)
        for local, rank in enumerate(ranks):
            launch = self._launch_file(task, rank, local)
            launch_path = self._folder / f"{self._prefix}launch-{rank}.json"
            launch.write(launch_path)
            process = await asyncio.to_thread(
                spawn,
                self._command(launch_path),
                log=self._log(rank),
                cores=node.cores,
                threads=node.threads,
                environment={},
            )
            gang = gang.model_copy(update={"processes": (*gang.processes, process)})
            gang.write(self._file)
        log.info("started gang %s: ranks %s, pids %s", gang.gang, ranks, [p.pid for p in gang.processes])

    def _launch_file(self, task: TrainerTask, rank: int, local: int) -> Launch:
        node = node_spec(task.spec, self._node)
        checkpoint = task.checkpoint
        return Launch(
            spec=task.spec,
            role=self._role,
            state=self._state.root,
            rank=rank,
            world_size=task.world_size,
            local_rank=local,
            master_addr=task.master_addr,
            master_port=task.master_port,
            token=secrets.token_hex(32),
            epoch=task.epoch,
            checkpoint=Path(checkpoint.path) if checkpoint.path else None,
            checkpoint_digest=checkpoint.digest or None,
            residency=self._rank_file(rank),
            threads=node.threads,
            cores=node.cores,
        )

    async def _wait_ready(self, gang: str) -> None:
        found = GangResidency.read(self._file)
        if found is None or not found.complete:
            raise GangLost(f"gang {gang} was not started completely on {self._node}")
        watch = asyncio.ensure_future(self.until_dead(gang))
        ready = [asyncio.ensure_future(self._rank_ready(rank)) for rank in found.ranks]
        try:
            await _all_or_first(ready, watch)
        except (DeadlineError, TrainerError):
            await self._end()
            raise
        finally:
            await _cancel(watch, *ready)

    async def _rank_ready(self, rank: int) -> TrainerStatus:
        end = time.monotonic() + START_LIMIT_S
        while not self._rank_file(rank).exists():
            if time.monotonic() > end:
                raise DeadlineError(f"rank {rank} on {self._node} opened no control port within {START_LIMIT_S:g} s")
            await asyncio.sleep(POLL_S)
        async with self._client(rank) as client:
            return await client.wait_ready(deadline_s=START_LIMIT_S)

    async def _ask_rank(self, rank: int, task: TrainTask, ask: _Ask[_T]) -> _T:
        request = UpdateRequest(
            lineage=task.lineage,
            step=task.manifest.step,
            manifest_key=task.manifest.key,
            manifest_digest=task.manifest.digest,
            epoch=task.epoch,
            columns=tuple(WrittenColumn(**column.model_dump()) for column in task.columns),
            dropped=task.dropped,
        )
        async with self._client(rank) as client:
            return await ask(client, request, deadline_s=task.time_limit_s)

    async def _order(self, task: TrainerTask, order: _Order) -> None:
        found = GangResidency.read(self._file)
        if found is not None and found.gang == task.gang:
            await asyncio.gather(*(self._order_rank(rank, task.epoch, order) for rank in found.ranks))

    async def _order_rank(self, rank: int, epoch: int, order: _Order) -> None:
        async with self._client(rank) as client:
            await order(client, epoch, deadline_s=PARK_LIMIT_S)

    async def _status(self, rank: int) -> TrainerStatus:
        async with self._client(rank) as client:
            return await client.status()

    async def _end(self) -> None:
        found = GangResidency.read(self._file)
        if found is None:
            return
        await asyncio.gather(*(process.end() for process in found.processes))
        for rank in found.ranks:
            self._rank_file(rank).unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _lost(self, gang: str) -> str:
        found = GangResidency.read(self._file)
        if found is None or found.gang != gang:
            return f"gang {gang} was ended on {self._node}"
        dead = found.dead()
        if not dead:
            return ""
        return (
            f"rank {dead[0]} on {self._node} has died; end of {self._log(dead[0])}:\n{tail(self._log(dead[0]))[-1000:]}"
        )

    def _client(self, rank: int) -> TrainerClient:
        try:
            return TrainerClient.of(Residency.model_validate_json(self._rank_file(rank).read_text()))
        except FileNotFoundError:
            raise GangLost(f"rank {rank} on {self._node} has no residency file: it was ended") from None

    def _rank_file(self, rank: int) -> Path:
        return self._folder / f"{self._prefix}rank-{rank}.json"

    def _log(self, rank: int) -> Path:
        return self._state.logs / f"{self._role}-{self._node}-{rank}.log"


async def _all_or_first(calls: Sequence[asyncio.Future[_T]], watch: asyncio.Future[str]) -> list[_T]:
    """Results of all calls; the first failure, or the death of a rank (GangLost), ends the wait."""
    waiting: set[asyncio.Future[Any]] = {*calls, watch}
    while waiting - {watch}:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if watch in done:
            raise GangLost(watch.result())
        for call in done:
            call.result()
    return [call.result() for call in calls]


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _checkpoint(result: UpdateResult) -> CheckpointRef:
    return CheckpointRef(
        lineage=result.lineage,
        step=result.step,
        version=result.version,
        path=result.checkpoint_path,
        digest=result.checkpoint_digest,
        weights=WeightsRef(version=result.version, path=result.weights_path, digest=result.weights_digest or ""),
    )
