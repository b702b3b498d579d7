"""Starting processes that outlive their starter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from storage.errors import ConfigError
from workers.residency import ProcessRef

TAIL_BYTES = 4000
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""Tensors of one step have the sizes of the last: glibc keeps their pages instead of having them zeroed anew, which
takes four fifths of the page faults and of the system time out of a training step on CPU."""
_children: set[int] = set()
"""Started here and not known to have been reaped."""


def spawn(
    command: Sequence[str], *, log: Path, cores: Sequence[int], threads: int, environment: Mapping[str, str]
) -> ProcessRef:
    """Start ``command`` in a session of its own, pinned to ``cores`` (empty: not pinned), output appended to ``log``.

    Raises :class:`ConfigError` if it cannot be started or pinned.
    """
    _reap()
    log.parent.mkdir(parents=True, exist_ok=True)
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **KEEP_PAGES, **environment, **limits},
            )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error.strerror or error}") from None
    reference = ProcessRef.of(process.pid)
    process.returncode = 0  # it is not waited for here: residency reaps it, also after a restart of this process
    _children.add(process.pid)
    if cores:
        _pin(process.pid, cores)
    return reference


def _reap() -> None:
    """Let the ended ones go that nobody asked for any more: they would stay in the process table as zombies."""
    for child in list(_children):
        try:
            ended, _ = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:  # residency was first
            ended = child
        if ended:
            _children.discard(child)


def _pin(pid: int, cores: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(pid, cores)
    except ProcessLookupError:
        return  # it has ended already; whoever waits for it will see why
    except OSError as error:
        os.kill(pid, 9)
        offered = sorted(os.sched_getaffinity(0))
        raise ConfigError(
            f"cores {list(cores)} cannot be used ({error.strerror}): this machine offers {offered}"
        ) from None


def tail(log: Path) -> str:
    """The end of a log, for error messages."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return "(no log)"
