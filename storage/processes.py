"""Which process is which."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_STARTED = 19
"""Place of the start time in ``/proc/<pid>/stat`` behind the name in brackets, see proc(5)."""


def started_at(pid: int) -> float:
    """Seconds from the machine's start to the process's: with the pid it tells a process from a later one.

    It never changes while the process lives. Unix time would: it is reckoned back from now, so every process seems to
    be another one after the clock was set or a virtual machine was asleep.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return int(stat.rpartition(")")[2].split()[_STARTED]) / os.sysconf("SC_CLK_TCK")
