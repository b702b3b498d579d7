"""An agent that is a program: environment in, stdout out, and nothing left running."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from children import started

from storage.errors import ConfigError
from workers.agents.command import CommandAgent
from workers.agents.outcome import Outcome

PAYLOAD: dict[str, Any] = {
    "task": {"question": "7+41"},
    "llm": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sfs_x", "model": "policy"},
}


async def run(code: str, limit_s: float = 30.0, cwd: Path | None = None) -> Outcome:
    agent = CommandAgent(shlex.join([sys.executable, "-c", code]), str(cwd) if cwd else None)
    return await agent.run("s1", PAYLOAD, limit_s)


async def test_it_finds_model_and_task_in_its_environment_and_its_stdout_is_the_output(tmp_path: Path) -> None:
    code = """
import json, os
names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "SEAMLESSFLOW_TASK"]
print(json.dumps([os.getcwd(), *(os.environ[name] for name in names)]), end="")
"""
    outcome = await run(code, cwd=tmp_path)
    assert outcome.status == "ok"
    cwd, url, key, model, task = json.loads(outcome.value)
    assert (cwd, url, key, model) == (str(tmp_path), "http://127.0.0.1:9/v1", "sfs_x", "policy")
    assert json.loads(task) == {"question": "7+41"}


async def test_a_client_of_the_anthropic_api_finds_the_same_model_in_its_own_variables() -> None:
    names = ["ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"]
    outcome = await run(f"import os; print(*(os.environ[name] for name in {names}), end='')")
    assert outcome.value == "http://127.0.0.1:9 sfs_x policy"


async def test_a_non_zero_exit_is_the_agents_error_with_the_end_of_its_stderr() -> None:
    outcome = await run("import sys; sys.stderr.write('x' * 100_000 + 'the end'); sys.exit(3)")
    assert outcome.status == "error"
    assert "exit code 3" not in outcome.detail  # only the end is kept
    assert outcome.detail.endswith("the end")
    assert len(outcome.detail) < 5000


async def test_a_signal_is_named() -> None:
    assert "SIGSEGV" in (await run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")).detail


async def test_a_command_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
open({str(pid_file)!r}, "w").write(str(child.pid))
time.sleep(3600)
"""
    outcome = await run(code, limit_s=3.0)
    assert outcome.status == "timeout"
    await gone(int(pid_file.read_text()))


async def test_what_a_command_leaves_behind_is_killed_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys
null = subprocess.DEVNULL
sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
child = subprocess.Popen(sleep, stdin=null, stdout=null, stderr=null)
open({str(pid_file)!r}, "w").write(str(child.pid))
"""
    assert (await run(code)).status == "ok"
    await gone(int(pid_file.read_text()))


async def test_a_cancelled_command_is_killed() -> None:
    task = asyncio.create_task(run("import time; time.sleep(3600)"))
    await until(lambda: bool(started()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started() == []


@pytest.mark.parametrize("target", ["", "'open quote", "no-such-program-anywhere --now"])
async def test_a_command_that_cannot_be_started_is_a_mistake_in_the_run_file(target: str) -> None:
    with pytest.raises(ConfigError):
        await CommandAgent(target, None).run("s1", PAYLOAD, 5.0)


async def gone(pid: int) -> None:
    """Wait until the process is dead; an orphan that nobody reaped counts as dead."""
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 (other processes set no event)
            await asyncio.sleep(0.01)
