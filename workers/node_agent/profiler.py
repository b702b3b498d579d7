"""Runs ``python -m workers.profiling`` for a node and reads its answer. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from storage.errors import ConfigError, DeadlineError
from workers.node_agent.spawn import KEEP_PAGES
from workers.profiling.result import ProfileResult
from workflows.messages import NodeProfiled, ProfileTask

LIMIT_S = 900.0


async def measure(task: ProfileTask, *, limit_s: float = LIMIT_S) -> NodeProfiled:
    """Measure this machine. Raises :class:`ConfigError` with the process's last words, :class:`DeadlineError`."""
    command = [sys.executable, "-m", "workers.profiling", "--model", task.model, "--dtype", task.dtype]
    command += ["--threads", str(task.threads), "--cores", ",".join(map(str, task.cores))]
    output = await _run(command, task.threads, limit_s)
    result = ProfileResult.model_validate_json(output)
    return NodeProfiled(
        node=task.node,
        model=task.model,
        device=result.device,
        train_priority=result.train_priority,
        rates=result.rates(),
    )


async def _run(command: Sequence[str], threads: int, limit_s: float) -> str:
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **KEEP_PAGES, **limits},
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        raise DeadlineError(f"the measurement took longer than {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ConfigError(f"{' '.join(command[1:5])} failed: {errors.decode(errors='replace')[-2000:]}")
    return output.decode().strip().splitlines()[-1]


def remember(folder: Path, found: NodeProfiled) -> None:
    """Keep the node's last profile where its agent finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").write_text(found.model_dump_json())


def remembered(folder: Path) -> NodeProfiled | None:
    """The node's last profile."""
    try:
        return NodeProfiled.model_validate_json((folder / "profile.json").read_text())
    except FileNotFoundError:
        return None
