"""Finding and ending processes that others noted down by pid *and* start time.

Node agents and trainer ranks write both into their residency files, the supervisor into ``services.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.residency import ProcessRef


def records_in(path: Path) -> list[ProcessRef]:
    """Every process that a residency file speaks of, however it is nested there.

    *Example*: ``gang.json`` holds ``{"gang": ..., "processes": [{"pid": 7, "start_time": 1.5}]}``.
    """
    try:
        todo: list[Any] = [json.loads(path.read_bytes())]
    except (FileNotFoundError, ValueError):
        return []
    found = []
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
            with contextlib.suppress(ValidationError):
                found.append(ProcessRef.model_validate({k: item[k] for k in ProcessRef.model_fields if k in item}))
    return found


def signal_group(process: ProcessRef, number: signal.Signals) -> None:
    """Signal the process and, where it leads its own group, its children too."""
    if not process.alive():
        return
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)


def write_json(path: Path, data: object) -> None:
    """Replace the file at once: a reader sees the old or the new text, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def stop_processes(records: Iterable[ProcessRef], grace_s: float) -> int:
    """SIGTERM all of them together, SIGKILL those that are left after ``grace_s``; the number that were running."""
    running = [record for record in records if record.alive()]
    for record in running:
        # A parked engine is stopped (SIGSTOP): it takes SIGTERM only once it runs again.
        signal_group(record, signal.SIGTERM)
        signal_group(record, signal.SIGCONT)
    wait_gone(running, grace_s)
    for record in running:
        signal_group(record, signal.SIGKILL)
    wait_gone(running, 10.0)
    return len(running)


def wait_gone(records: Iterable[ProcessRef], limit_s: float) -> bool:
    """Whether all of them ended within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    left = list(records)
    while left:
        left = [record for record in left if record.alive()]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return not left
