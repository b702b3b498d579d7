"""The process that keeps a local cluster's services alive: ``python -m cli.supervisor --state DIR``.

Services start stage by stage, each stage when the one before is ready. One that ends is started again with
growing pauses, and every end is logged. SIGTERM or SIGINT stops the stages in reverse, and after the node
agents the resident engines and ranks; so does the removal of the state folder, from which nothing could go on.
A service that cannot even start once fails the whole cluster: nothing is started by halves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import psutil

from cli import probes
from cli.processes import stop_processes
from cli.servers import Service, base_environment, services
from cli.stack import (
    LOCK,
    STACK,
    ServiceStatus,
    StackSpec,
    StackStatus,
    locked,
    log_tail,
    residents,
    stop_leftovers,
)
from storage.errors import DeadlineError, SeamlessFlowError
from workers.cluster import StateFolder
from workers.residency import ProcessRef

log = logging.getLogger("supervisor")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
STEADY_S = 20.0
"""A service that ran this long starts again with the shortest pause."""
FOLDER_EVERY_S = 1.0
"""How often it is asked whether the state folder is still there."""
RESIDENTS_GRACE_S = 5.0
START_ATTEMPTS = 3
"""Times a service may end before it was ever ready; then the cluster fails."""


class ServiceFailed(SeamlessFlowError):
    """A service ended again and again before it was ready."""


class Supervisor:
    """Runs the services of one state folder until told to stop."""

    def __init__(self, state: StateFolder, todo: list[Service]) -> None:
        self.state = state
        self.todo = todo
        self.status = StackStatus(supervisor=ProcessRef.of(os.getpid()))
        self.status.services = {service.name: ServiceStatus() for service in todo}
        self.stopping = asyncio.Event()
        self._tasks: list[tuple[Service, asyncio.Task[None]]] = []
        self._folder = state.root.stat().st_ino
        self._residents: set[ProcessRef] = set()

    async def run(self) -> None:
        """Start everything, keep it running, stop it. Raises :class:`ServiceFailed` if a service never gets ready."""
        self._write()
        watch = asyncio.create_task(self._watch_folder(), name="watch the state folder")
        try:
            await self._start_all()
            if not self.stopping.is_set():
                self.status.phase = "running"
                self._write()
                log.info("all services are ready")
                await self._until_stopped()
        except ServiceFailed as error:
            self.status.error = str(error)
            raise
        finally:
            watch.cancel()
            await self._stop_all()

    async def _until_stopped(self) -> None:
        """Wait for the stop. A keeper that ends by itself has a defect, which must not pass for a running cluster."""
        stop = asyncio.create_task(self.stopping.wait())
        try:
            done, _ = await asyncio.wait(
                {stop, *(task for _, task in self._tasks)}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done - {stop}:
                if (error := task.exception()) is not None:
                    raise ServiceFailed(f"{task.get_name()} is not kept running any more: {error}") from error
        finally:
            stop.cancel()

    async def _watch_folder(self) -> None:
        """Stop when the state folder is gone; until then remember who lives in it, since its notes go with it."""
        while self._folder_is_there():
            found = self._residents | await asyncio.to_thread(residents, self.state)
            self._residents = {process for process in found if process.alive()}
            await asyncio.sleep(FOLDER_EVERY_S)
        log.error("%s was removed while its cluster runs: everything is stopped", self.state.root)
        self.stopping.set()

    def _folder_is_there(self) -> bool:
        try:
            (self.state.root / "cluster.json").stat()
            return self.state.root.stat().st_ino == self._folder
        except FileNotFoundError:
            return False

    def _write(self) -> None:
        if self._folder_is_there():
            with contextlib.suppress(FileNotFoundError):  # removed this moment
                self.status.write(self.state)

    async def _start_all(self) -> None:
        stop = asyncio.create_task(self.stopping.wait())
        try:
            for stage in sorted({service.stage for service in self.todo}):
                ready = [self._start(service) for service in self.todo if service.stage == stage]
                complete = asyncio.create_task(_all(ready))
                keepers = [task for _, task in self._tasks]
                # A keeper only ends by failing; a stop must not wait for a stage.
                await asyncio.wait({complete, stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                complete.cancel()
                for task in keepers:
                    if task.done():
                        task.result()
                if self.stopping.is_set():
                    return
        finally:
            stop.cancel()

    def _start(self, service: Service) -> asyncio.Event:
        """Begin to keep ``service`` running; the event is set when it is ready for the first time."""
        ready = asyncio.Event()
        self._tasks.append((service, asyncio.create_task(self._keep(service, ready), name=service.name)))
        return ready

    async def _keep(self, service: Service, ready: asyncio.Event) -> None:
        """Run one service again and again. Ends by cancellation, or with :class:`ServiceFailed` before it was ready."""
        row = self.status.services[service.name]
        pause = FIRST_PAUSE_S
        for attempt in range(1, 1 << 62):
            started = time.monotonic()
            process = await self._spawn(service)
            try:
                await self._attend(service, process, ready)
            finally:
                await _end(process, service)
            row.last_exit = describe_exit(process.returncode)
            row.process = None
            log.warning("%s ended: %s", service.name, row.last_exit)
            if not ready.is_set() and attempt >= START_ATTEMPTS:
                self._set(row, "failed")
                tail = log_tail(self.state.logs / f"{service.name}.log")
                raise ServiceFailed(
                    f"{service.name} ended {attempt} times before it was ready: {row.last_exit}\n{tail}"
                )
            row.restarts += 1
            self._set(row, "restarting")
            pause = FIRST_PAUSE_S if time.monotonic() - started > STEADY_S else min(pause * 2, LONGEST_PAUSE_S)
            log.info("%s starts again in %.1f s (restart %d)", service.name, pause, row.restarts)
            await asyncio.sleep(pause)

    async def _spawn(self, service: Service) -> asyncio.subprocess.Process:
        row = self.status.services[service.name]
        with (self.state.logs / f"{service.name}.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *service.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.state.root,
                env={**os.environ, **base_environment(self.state), **service.env},
                start_new_session=True,
            )
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
            row.process = ProcessRef.of(process.pid)
        self._set(row, "starting")
        log.info("%s runs as pid %d", service.name, process.pid)
        return process

    async def _attend(self, service: Service, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        """Until the process ends; on the way, note when it is ready. One that does not get ready in time is ended."""
        ended = asyncio.create_task(process.wait())
        probe = asyncio.create_task(probes.wait_ready(service.ready, self.state, since=time.time()))
        try:
            await asyncio.wait({ended, probe}, return_when=asyncio.FIRST_COMPLETED)
            if not probe.done():
                return
            try:
                probe.result()
            except DeadlineError as error:
                log.error("%s: %s", service.name, error)
                return
            self._set(self.status.services[service.name], "ready")
            log.info("%s is ready", service.name)
            ready.set()
            await ended
        finally:
            for task in (ended, probe):
                task.cancel()

    async def _stop_all(self) -> None:
        self.status.phase = "stopping"
        self._write()
        for stage in sorted({service.stage for service, _ in self._tasks}, reverse=True):
            await asyncio.gather(*(self._stop(*pair) for pair in self._tasks if pair[0].stage == stage))
            # Where there are node agents, they are in the last stage: nothing can start a resident process any more.
            found = self._residents | await asyncio.to_thread(residents, self.state)
            await asyncio.to_thread(stop_processes, found, RESIDENTS_GRACE_S)
        self.status.phase = "failed" if self.status.error else "stopped"
        self._write()

    async def _stop(self, service: Service, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait({task})
        row = self.status.services[service.name]
        row.process = None
        if row.state != "failed":
            self._set(row, "stopped")
        log.info("%s is stopped", service.name)

    def _set(self, row: ServiceStatus, value: str) -> None:
        row.state = value  # type: ignore[assignment]  # one of the literals above
        self._write()


async def _all(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _end(process: asyncio.subprocess.Process, service: Service) -> None:
    """SIGTERM, then SIGKILL to what is left of the process and its group."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), service.grace_s)
        except TimeoutError:
            log.warning("%s did not stop within %.0f s: killed", service.name, service.grace_s)
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def describe_exit(code: int | None) -> str:
    """*Example*: ``killed by SIGKILL`` for -9, ``exit code 1`` for 1."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


async def supervise(state: StateFolder) -> None:
    spec = StackSpec.model_validate_json((state.root / STACK).read_bytes())
    supervisor = Supervisor(state, services(state, spec.nodes))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stopping.set)
    await supervisor.run()


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep the services of a local SeamlessFlow cluster running.")
    parser.add_argument("--state", type=Path, required=True, help="state folder of the cluster")
    state = StateFolder(parser.parse_args().state)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with locked(state, LOCK, wait_s=2.0):
            stop_leftovers(state)
            asyncio.run(supervise(state))
    except BlockingIOError:
        raise SystemExit(f"another supervisor runs in {state.root}") from None
    except SeamlessFlowError as error:
        log.error("%s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
