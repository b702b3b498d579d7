"""The engine process of a node: start, find again, load, hold, park, restart on the last good version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from storage.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable, IntegrityError
from storage.ports import free_port
from storage.weights import WeightsStore
from workers.cluster import StateFolder
from workers.engines.base import Engine, Stats, Transfer
from workers.engines.kinds import KINDS, connect, kind_of
from workers.engines.launch import Place
from workers.node_agent.sender import Sender
from workers.node_agent.spawn import spawn, tail
from workers.residency import EngineResidency
from workflows.messages import EngineTask, WeightsRef
from workflows.spec import NodeSpec, RunSpec

log = logging.getLogger(__name__)

POLL_S = 0.1
DEAD_POLL_S = 0.2
DRAIN_LIMIT_S = 10.0
DRAIN_POLL_S = 0.01
"""Short: whoever waits for the node waits for this."""
HANG_LIMIT_S = 60.0
READ_BYTES = 1 << 24
PROBE_EVERY_S = 2.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class EngineHost:
    """One node's engine. Methods that change it are serialised; only the newest lease's commands get here.

    ``host``: the name under which others reach this node.
    """

    def __init__(
        self, state: StateFolder, node: str, *, host: str = "127.0.0.1", connect: Callable[[str, str], Engine] = connect
    ) -> None:
        self._state = state
        self._node = node
        self._host = host
        self._connect = connect
        self._file = state.node(node) / "engine.json"
        self._log = state.logs / f"engine-{node}.log"
        self._lock = asyncio.Lock()
        self._adapters: dict[str, Engine] = {}
        self._sender = Sender()

    def resident(self) -> EngineResidency | None:
        """The engine that runs on this node, if any."""
        found = EngineResidency.read(self._file)
        return found if found is not None and found.process.alive() else None

    async def ensure(self, task: EngineTask) -> EngineResidency:
        """Find the run's engine, or start it; returns when it serves confirmed weights and is not paused."""
        async with self._lock:
            last = EngineResidency.read(self._file)
            found = self.resident()
            if found is not None and found.run != task.run:
                await found.process.end()
                found = None
            if found is None:
                if last is not None:
                    await last.process.end()  # it is dead, but processes that it had started may not be
                found = await self._start(task, last)
            await self._wait_ready(found, task.spec.engine.start_limit_s)
            found = await self._confirm(found, task)
            await self._engine(found).resume()
            if task.spec.engine.transfer == "collective":
                await self._sender.prepare()
            return found

    async def load(self, task: EngineTask) -> int:
        """Change weights between two tokens; returns the version the engine confirmed by checksum."""
        async with self._lock:
            found = self._must_run()
            if found.serving == task.weights:
                await self._engine(found).resume()
                return task.weights.version
            async with self._source(task) as transfer:
                if transfer is None:
                    await asyncio.to_thread(read_ahead, Path(task.weights.path))
                await self._change(found, task, transfer)
            return task.weights.version

    async def hold(self, paused: bool) -> None:
        """Pause (True) or resume (False) the engine where it is."""
        async with self._lock:
            found = self._must_run()
            if found.serving is None and not paused:
                raise EngineUnavailable(f"the engine on {self._node} stays paused until its weights are confirmed")
            engine = self._engine(found)
            await (engine.pause("in_place") if paused else engine.resume())

    async def park(self) -> None:
        """Quiesce: what still runs is cut, then the engine is paused and stays resident; idle will do for one that
        would keep a core busy with its pause."""
        async with self._lock:
            found = self.resident()
            if found is None:
                return
            engine = self._engine(found)
            await self._drain(engine)
            if not KINDS[found.kind].spins_paused:
                await engine.pause("in_place")
            await self._sender.close()

    async def end(self, run: str) -> None:
        """End the engine if it belongs to ``run``."""
        async with self._lock:
            found = self.resident()
            if found is not None and found.run == run:
                await found.process.end()
                self._pin(run)
                await self._sender.close()
                self._file.unlink(missing_ok=True)

    async def load_now(self) -> Stats | None:
        """How busy the engine is; None if none runs."""
        found = self.resident()
        return None if found is None else await self._engine(found).stats()

    async def until_dead(self, found: EngineResidency) -> str:
        """Watch the engine; returns why it counts as dead (it is, or it has not answered for a minute)."""
        answered = probed = time.monotonic()
        while found.process.alive():
            now = time.monotonic()
            if now - probed > PROBE_EVERY_S:
                probed = now
                if await self._answers(found):
                    answered = now
                elif now - answered > HANG_LIMIT_S:
                    await found.process.end()
                    return (
                        f"engine on {self._node} (pid {found.pid}) did not answer for {HANG_LIMIT_S:g} s; it was killed"
                    )
            await asyncio.sleep(DEAD_POLL_S)
        return f"engine on {self._node} (pid {found.pid}) has died; end of {self._log}:\n{tail(self._log)[-1000:]}"

    async def close(self) -> None:
        """Release connections; the engine goes on."""
        await self._sender.close()
        for adapter in self._adapters.values():
            await adapter.close()

    # Mechanics

    async def _start(self, task: EngineTask, last: EngineResidency | None) -> EngineResidency:
        node = node_spec(task.spec, self._node)
        port = free_port()
        bind = self._host if self._host in LOOPBACK else "0.0.0.0"  # noqa: S104 - other machines have to reach it
        place = Place(node, bind, port, self._state.node(self._node) / "tokens.jsonl")
        launch = kind_of(task.spec.engine).launch(task.spec, place)
        process = await asyncio.to_thread(
            spawn,
            launch.command,
            log=self._log,
            cores=node.cores,
            threads=node.threads,
            environment=launch.environment,
        )
        log.info("started the engine of %s: pid %d, port %d", task.run, process.pid, port)
        found = EngineResidency(
            pid=process.pid,
            start_time=process.start_time,
            host=self._host,
            port=port,
            run=task.run,
            kind=task.spec.engine.kind,
            epoch=task.epoch,
            good=_good(last, task.run),
        )
        found.write(self._file)
        return found

    async def _wait_ready(self, found: EngineResidency, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not await self._answers(found):
            if not found.process.alive():
                raise EngineUnavailable(
                    f"the engine on {self._node} did not start; end of {self._log}:\n{tail(self._log)}"
                )
            if time.monotonic() > end:
                await found.process.end()
                raise EngineUnavailable(f"the engine on {self._node} was not ready within {limit_s:g} s; it was ended")
            await asyncio.sleep(POLL_S)

    async def _confirm(self, found: EngineResidency, task: EngineTask) -> EngineResidency:
        """Make the engine serve the newest weights known here; if they cannot be loaded, the last good ones."""
        good = found.good
        if good is not None and good.version > task.weights.version:
            task = task.model_copy(update={"weights": good})
        if found.serving == task.weights:
            return self._write(found.model_copy(update={"epoch": task.epoch}))
        try:
            return await self._load_unpaused(found, task)
        except (EngineError, IntegrityError):
            if good is None or good == task.weights:
                raise
            log.exception("version %d cannot be loaded; going on with %d", task.weights.version, good.version)
            task = task.model_copy(update={"weights": good})
            if not found.process.alive():
                found = await self._start(task, found)
                await self._wait_ready(found, task.spec.engine.start_limit_s)
            return await self._load_unpaused(found, task)

    async def _load_unpaused(self, found: EngineResidency, task: EngineTask) -> EngineResidency:
        async with self._source(task) as transfer:
            return await self._load(found, task, transfer)

    async def _change(self, found: EngineResidency, task: EngineTask, transfer: Transfer | None) -> None:
        engine = self._engine(found)
        await engine.pause(task.spec.engine.sync_mode)
        try:
            await self._load(found, task, transfer)
        except (EngineError, IntegrityError):
            with contextlib.suppress(EngineError):  # it may be gone; the failed load is what matters
                await engine.resume()
            raise
        await engine.resume()

    async def _load(self, found: EngineResidency, task: EngineTask, transfer: Transfer | None) -> EngineResidency:
        """Load and compare. An engine that refuses goes on with the weights it has; one that fails otherwise is ended,
        since nobody knows what it serves: it restarts on the last good version. Until the end of the change the
        residency says that its weights are not known, so whoever finds it after a kill confirms them anew."""
        weights, limit_s = task.weights, task.spec.engine.load_limit_s
        self._pin(task.run, found.good, weights)
        self._write(found.model_copy(update={"epoch": task.epoch, "serving": None}))
        try:
            async with asyncio.timeout(limit_s):
                loaded = await self._engine(found).load_weights(weights.path, weights.version, transfer)
        except EngineRejected:
            self._write(found.model_copy(update={"epoch": task.epoch}))
            raise
        except TimeoutError:
            await found.process.end()
            raise EngineUnavailable(
                f"the engine on {self._node} has not loaded version {weights.version} within {limit_s:g} s "
                "(engine.load_limit_s): it was ended"
            ) from None
        except EngineError:
            await found.process.end()
            raise
        if loaded.checksum is not None and loaded.checksum != weights.digest:
            await found.process.end()
            raise IntegrityError(
                f"the engine on {self._node} loaded {weights.path} with checksum {loaded.checksum}, "
                f"version {weights.version} was published with {weights.digest}: the engine was ended"
            )
        self._pin(task.run, weights)
        return self._write(found.model_copy(update={"epoch": task.epoch, "serving": weights, "good": weights}))

    @asynccontextmanager
    async def _source(self, task: EngineTask) -> AsyncIterator[Transfer | None]:
        """Where the engine gets the weights from, before it is paused: None is the disk."""
        options = task.spec.engine
        if options.transfer == "disk":
            yield None
            return
        ranks, limit_s = options.tensor_parallel, options.load_limit_s
        async with self._sender.sending(task.weights.path, engine_ranks=ranks, limit_s=limit_s) as transfer:
            yield transfer

    def _pin(self, run: str, *held: WeightsRef | None) -> None:
        """Keep from collection what the engine may need: the version it serves or falls back to, and the next one."""
        WeightsStore(self._state.weights(run)).pin(self._node, [weights.path for weights in held if weights])

    async def _drain(self, engine: Engine) -> None:
        """Its route is closed, so requests end by themselves; what does not is aborted."""
        end = time.monotonic() + DRAIN_LIMIT_S
        aborted = False
        while (load := await engine.stats()).running + load.waiting:
            if time.monotonic() > end:
                raise EngineUnavailable(
                    f"{load.running} requests did not end on {self._node} within {DRAIN_LIMIT_S:g} s"
                )
            if not aborted:
                await engine.abort(None)
                aborted = True
            await asyncio.sleep(DRAIN_POLL_S)

    async def _answers(self, found: EngineResidency) -> bool:
        try:
            return await self._engine(found).ready()
        except EngineError:
            return False

    def _must_run(self) -> EngineResidency:
        found = self.resident()
        if found is None:
            raise EngineUnavailable(f"no engine runs on {self._node}: its supervisor starts it again")
        return found

    def _engine(self, found: EngineResidency) -> Engine:
        if found.url not in self._adapters:
            self._adapters[found.url] = self._connect(found.kind, found.url)
        return self._adapters[found.url]

    def _write(self, found: EngineResidency) -> EngineResidency:
        found.write(self._file)
        return found


def read_ahead(folder: Path) -> int:
    """Bring a version's files into memory while the engine decodes: what it stands still for is the copy from there.
    Returns the bytes read."""
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as raw:
            while piece := raw.read(READ_BYTES):
                size += len(piece)
    return size


def _good(last: EngineResidency | None, run: str) -> WeightsRef | None:
    """The version that the run's previous engine on this node had confirmed."""
    return last.good if last is not None and last.run == run else None


def node_spec(spec: RunSpec, node: str) -> NodeSpec:
    """The node's section of the run file; defaults for one that it does not name but takes (``pool.nodes: any``)."""
    if spec.pool.nodes == "any" or any(entry.id == node for entry in spec.nodes):
        return spec.node(node)
    raise ConfigError(f"run {spec.run} has no node {node!r}: its nodes are {', '.join(n.id for n in spec.nodes)}")
