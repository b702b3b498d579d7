"""One process that runs user code: many jobs on one asyncio loop, told and answered in JSON lines.

    stdin    {"setup": {...}}, then {"job", "limit_s", "payload"} per job; its end is the order to exit
    stdout   {"ready": true} or {"fatal": "..."}, then {"job", "status", "value", "detail", "retire"} per job

What user code prints goes to stderr. Async code runs on the loop, plain functions in threads. Each job has a time
limit of its own: an async job is cancelled; one that ignores that, or sits in a thread, is left behind and the process
asks to be *retired*: it gets no new jobs. A job that blocks the loop past its limit is reported by a watchdog thread,
which then ends the process, since nothing else can.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from storage.errors import ConfigError
from workers.agents.api import Llm, Rollout
from workers.agents.infrastructure import is_infrastructure
from workers.agents.outcome import Outcome, judge_reward, tail
from workers.agents.targets import load_target

LINE_LIMIT = 64 * 2**20
OUTPUT_LIMIT = 16 * 2**20
CANCEL_GRACE_S = 1.0
WATCH_S = 0.25
BLOCKED_GRACE_S = 1.0
MAX_THREADS = 1024
EXIT_BLOCKED = 75


@dataclass
class Job:
    """One running job; ``thread`` is set while a plain function runs in one."""

    name: str
    limit_s: float
    deadline: float
    payload: dict[str, Any]
    thread: int | None = None
    where: str = ""


_current: contextvars.ContextVar[Job | None] = contextvars.ContextVar("job", default=None)


class Child:
    """The loop side of the process. ``kind`` (``agent`` or ``reward``) says how ``call``, the user's, is called."""

    def __init__(self, kind: str, call: Callable[..., Any], options: dict[str, Any], out: BinaryIO) -> None:
        self._kind = kind
        self._call = call
        self._options = options
        self._out = out
        self._out_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="user")
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], Job] = weakref.WeakKeyDictionary()
        self._running: set[asyncio.Task[None]] = set()
        self._ticks = 0

    async def serve(self, commands: asyncio.StreamReader) -> None:
        """Run jobs until the commands end."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._new_task)  # type: ignore[arg-type]  # typeshed asks for a generic callable
        self._tick(loop)
        threading.Thread(target=self._watch, args=(loop, threading.get_ident()), daemon=True, name="watchdog").start()
        self.send({"ready": True})
        while line := await commands.readline():
            command = orjson.loads(line)
            limit_s = float(command["limit_s"])
            job = Job(command["job"], limit_s, time.monotonic() + limit_s, command["payload"])
            task = loop.create_task(self._run(job))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def send(self, message: dict[str, Any]) -> None:
        """One line to the parent; from any thread."""
        data = orjson.dumps(message) + b"\n"
        with self._out_lock:
            self._out.write(data)
            self._out.flush()

    async def _run(self, job: Job) -> None:
        task = asyncio.get_running_loop().create_task(self._finish(job), context=_context_of(job))
        done, _ = await asyncio.wait({task}, timeout=max(job.deadline - time.monotonic(), 0))
        if done:
            self._answer(job, task.result(), retire=False)
            return
        if job.thread is not None:
            job.where = _stack_of(job.thread)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        where = job.where or "unknown: it did not stop when it was cancelled"
        detail = f"no result within {job.limit_s:g} s; it was here:\n{where}"
        self._answer(job, Outcome("timeout", detail=tail(detail)), retire=not done or job.thread is not None)

    async def _finish(self, job: Job) -> Outcome:
        """The job's outcome; every way that user code can end is one."""
        try:
            value = await self._invoke(job)
            return judge_reward(value) if self._kind == "reward" else _json_outcome(value)
        except asyncio.CancelledError:
            job.where = job.where or traceback.format_exc()
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (user code may raise anything)
            detail = tail("".join(traceback.format_exception(error)))
            infra = self._kind == "agent" and is_infrastructure(error, job.payload["llm"]["base_url"])
            return Outcome("infra" if infra else "error", detail=detail)

    async def _invoke(self, job: Job) -> Any:
        arguments = self._arguments(job.payload)
        if inspect.iscoroutinefunction(self._call):
            return await self._call(*arguments, **self._options)
        context = contextvars.copy_context()
        result = await asyncio.get_running_loop().run_in_executor(
            self._threads, context.run, _in_thread, self._call, job, arguments, self._options
        )
        return await result if inspect.isawaitable(result) else result

    def _arguments(self, payload: dict[str, Any]) -> tuple[Any, ...]:
        if self._kind == "agent":
            return payload["task"], Llm(**payload["llm"])
        return (Rollout(**payload),)

    def _answer(self, job: Job, outcome: Outcome, *, retire: bool) -> None:
        line = {"job": job.name, "status": outcome.status, "value": outcome.value, "detail": outcome.detail}
        self.send(line | {"retire": retire})

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **settings: Any
    ) -> asyncio.Task[Any]:
        """Task factory that remembers which job a task works for, its sub-tasks included."""
        context = settings.get("context")
        job = context.get(_current) if context is not None else _current.get()
        task = asyncio.Task(coroutine, loop=loop, **settings)
        if job is not None:
            self._owners[task] = job
        return task

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticks += 1
        loop.call_later(WATCH_S, self._tick, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        """Watchdog thread: ends the process if the parent is gone or a job blocks the loop past its limit."""
        parent, last_tick = os.getppid(), -1
        while True:
            time.sleep(2 * WATCH_S)
            if os.getppid() != parent:
                os._exit(1)
            if self._ticks == last_tick:
                self._end_if_blocked(loop, loop_thread)
            last_tick = self._ticks

    def _end_if_blocked(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        task = asyncio.current_task(loop)
        job = self._owners.get(task) if task is not None else None
        if job is None or time.monotonic() < job.deadline + BLOCKED_GRACE_S:
            return
        detail = f"blocked the event loop past its limit of {job.limit_s:g} s, here:\n{_stack_of(loop_thread)}"
        self._answer(job, Outcome("timeout", detail=tail(detail)), retire=True)
        os._exit(EXIT_BLOCKED)


def _in_thread(call: Callable[..., Any], job: Job, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    job.thread = threading.get_ident()
    try:
        return call(*arguments, **options)
    finally:
        job.thread = None


def _context_of(job: Job) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(_current.set, job)
    return context


def _json_outcome(value: Any) -> Outcome:
    try:
        size = len(orjson.dumps(value))
    except TypeError as error:
        return Outcome("error", detail=f"the agent's output is not JSON: {error}: {value!r:.200}")
    if size > OUTPUT_LIMIT:
        return Outcome("error", detail=f"the agent's output has {size} bytes: at most {OUTPUT_LIMIT} are kept")
    return Outcome("ok", value)


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


async def _main(out: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    setup = orjson.loads(await commands.readline())["setup"]
    try:
        call = load_target(setup["target"], setup["code"])
    except ConfigError as error:
        _fatal(out, str(error))
        return
    except Exception as error:  # noqa: BLE001 (a user's module may raise anything when it is imported)
        _fatal(
            out, f"target {setup['target']!r} cannot be imported:\n{tail(''.join(traceback.format_exception(error)))}"
        )
        return
    await Child(setup["kind"], call, setup["options"], out).serve(commands)
    os._exit(0)  # at once: neither tasks that ignore cancellation nor threads that hang may keep the process


def _fatal(out: BinaryIO, message: str) -> None:
    out.write(orjson.dumps({"fatal": message}) + b"\n")
    out.flush()


def main() -> None:
    """Entry of ``python -m workers.agents.child``; started by :mod:`workers.agents.pool` only."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(_main(out))


if __name__ == "__main__":
    main()
