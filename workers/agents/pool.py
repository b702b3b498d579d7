"""A pool of processes for user code: jobs in, outcomes out, whatever the code does to itself.

What a lost process means for the jobs it ran: the job that blocked it is ``timeout``; if it ran a single job, that job
ended it and is ``error``; otherwise nobody can tell whose doing it was, and all of them are ``infra``: a new attempt
follows. A process that asks to be retired gets no new jobs, ends with its last one, and is replaced at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson

from storage.errors import ConfigError
from workers.agents.child import EXIT_BLOCKED, LINE_LIMIT
from workers.agents.outcome import Outcome, tail

START_LIMIT_S = 120.0
ANSWER_GRACE_S = 10.0
STOP_GRACE_S = 1.0
STDERR_LINES = 60
OUR_VARIABLES = "SEAMLESSFLOW_"


@dataclass(frozen=True)
class Setup:
    """What each process of the pool is for."""

    kind: Literal["agent", "reward"]
    target: str
    code: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class ProcessPool:
    """A :class:`~workers.agents.outcome.Runner` over ``processes`` children, started when first needed."""

    def __init__(self, setup: Setup, processes: int = 1) -> None:
        self._setup = setup
        self._size = processes
        self._children: list[_Process] = []
        self._retired: set[_Process] = set()
        self._starting = asyncio.Lock()

    async def run(self, job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        """Run one job. Raises :class:`ConfigError` if the user's code cannot be loaded."""
        child = await self._pick()
        answer = child.submit(job, payload, limit_s)
        try:
            async with asyncio.timeout(limit_s + ANSWER_GRACE_S):
                outcome, retire = await answer
        except TimeoutError:
            child.pending.pop(job, None)
            child.kill()
            return Outcome(
                "timeout", detail=f"the process gave no sign of life {ANSWER_GRACE_S:g} s past the time limit"
            )
        finally:
            child.pending.pop(job, None)
        if retire:
            self._retire(child)
        if child in self._retired and not child.pending:
            self._retired.discard(child)
            await child.stop()
        return outcome

    async def close(self) -> None:
        """End all processes; their jobs are lost."""
        children = [*self._children, *self._retired]
        self._children.clear()
        self._retired.clear()
        await asyncio.gather(*(child.stop() for child in children))

    async def _pick(self) -> _Process:
        """The least busy process; a new one while there are fewer than asked for."""
        async with self._starting:
            self._children = [child for child in self._children if child.alive]
            idle = next((child for child in self._children if not child.pending), None)
            if idle is None and len(self._children) < self._size:
                idle = await _Process.start(self._setup)
                self._children.append(idle)
        return idle or min(self._children, key=lambda child: len(child.pending))

    def _retire(self, child: _Process) -> None:
        if child in self._children:
            self._children.remove(child)
            self._retired.add(child)


class _Process:
    """One child and the jobs it has. ``pending`` maps each to the future of (outcome, retire)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pending: dict[str, asyncio.Future[tuple[Outcome, bool]]] = {}
        self.alive = True
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._tasks = [asyncio.create_task(self._read_stderr())]

    @classmethod
    async def start(cls, setup: Setup) -> _Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "workers.agents.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            env=user_environment(),
            cwd=setup.code,
        )
        child = cls(process)
        child._write({"setup": asdict(setup)})
        try:
            await child._wait_ready(setup)
        except BaseException:
            await child.stop()
            raise
        child._tasks.append(asyncio.create_task(child._read()))
        return child

    def submit(self, job: str, payload: dict[str, Any], limit_s: float) -> asyncio.Future[tuple[Outcome, bool]]:
        future: asyncio.Future[tuple[Outcome, bool]] = asyncio.get_running_loop().create_future()
        self.pending[job] = future
        if self.alive:
            self._write({"job": job, "limit_s": limit_s, "payload": payload})
        else:
            future.set_result((Outcome("infra", detail="the process ended before the job began"), False))
        return future

    def kill(self) -> None:
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Ask it to exit by closing its stdin, then kill it; returns when it is gone."""
        self.alive = False
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait_ready(self, setup: Setup) -> None:
        try:
            async with asyncio.timeout(START_LIMIT_S):
                line = await self._stdout.readline()
        except TimeoutError:
            raise ConfigError(f"target {setup.target!r}: not imported within {START_LIMIT_S:g} s") from None
        if not line:
            await self._process.wait()
            raise ConfigError(f"target {setup.target!r}: its process ended on import ({self._how_it_ended()})")
        message = orjson.loads(line)
        if "fatal" in message:
            raise ConfigError(message["fatal"])

    @property
    def _stdout(self) -> asyncio.StreamReader:
        if self._process.stdout is None:
            raise RuntimeError("the child was started without a pipe on stdout")
        return self._process.stdout

    def _write(self, message: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(orjson.dumps(message) + b"\n")

    async def _read(self) -> None:
        while line := await self._stdout.readline():
            message = orjson.loads(line)
            future = self.pending.get(message["job"])
            if future is not None and not future.done():
                outcome = Outcome(message["status"], message["value"], message["detail"])
                future.set_result((outcome, message["retire"]))
        self.alive = False
        await self._process.wait()
        self._settle()

    def _settle(self) -> None:
        """The process is gone: say so to every job that is still waiting."""
        waiting = [future for future in self.pending.values() if not future.done()]
        status: Literal["error", "infra"] = "error" if len(waiting) == 1 and not self._we_killed_it() else "infra"
        for future in waiting:
            future.set_result((Outcome(status, detail=f"its process ended: {self._how_it_ended()}"), False))

    def _we_killed_it(self) -> bool:
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM, EXIT_BLOCKED)

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return tail("\n".join([how, *self._stderr]))

    async def _read_stderr(self) -> None:
        """Pass the child's stderr on to ours, and keep its end for error messages."""
        if self._process.stderr is None:
            return
        while chunk := await self._process.stderr.read(65536):
            text = chunk.decode(errors="replace")
            self._stderr.extend(text.splitlines())
            sys.stderr.write(text)


def user_environment() -> dict[str, str]:
    """Our environment without what is ours in it: the state folder, and in containers the cluster's keys."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OUR_VARIABLES)}
    return kept | {"PYTHONSAFEPATH": "1"}
