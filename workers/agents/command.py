"""Agents and rewards that are commands: no shell, an environment, a time limit, nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from storage.errors import ConfigError
from workers.agents.child import OUTPUT_LIMIT
from workers.agents.outcome import Outcome, judge_reward, tail
from workers.agents.pool import user_environment


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``code`` is None if its time was up; negative is the signal that ended it."""

    code: int | None
    stdout: str
    stderr: str


class CommandAgent:
    """Runs the command once per session; what it prints on stdout is the output, a string.

    It finds the model in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``, or in the same three of
    ``ANTHROPIC_``, whose clients add the ``/v1`` themselves, and its task, as JSON, in ``SEAMLESSFLOW_TASK``.
    """

    def __init__(self, target: str, code: str | None) -> None:
        self._argv = split_command(target)
        self._code = code

    async def run(self, job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        llm = payload["llm"]
        variables = {
            "OPENAI_BASE_URL": llm["base_url"],
            "OPENAI_API_KEY": llm["api_key"],
            "OPENAI_MODEL": llm["model"],
            "ANTHROPIC_BASE_URL": llm["base_url"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": llm["api_key"],
            "ANTHROPIC_MODEL": llm["model"],
            "SEAMLESSFLOW_TASK": orjson.dumps(payload["task"]).decode(),
        }
        ended = await run_command(self._argv, variables, self._code, b"", limit_s)
        if ended.code == 0 and len(ended.stdout) > OUTPUT_LIMIT:
            return Outcome(
                "error", detail=f"stdout has {len(ended.stdout)} characters: at most {OUTPUT_LIMIT} are kept"
            )
        return _failure(ended, limit_s) or Outcome("ok", ended.stdout)

    async def close(self) -> None:
        """Nothing outlives :meth:`run`."""


class CommandReward:
    """Runs the command once per rollout: the rollout is JSON on its stdin, it prints one number (or ``null``)."""

    def __init__(self, target: str, code: str | None) -> None:
        self._argv = split_command(target)
        self._code = code

    async def run(self, job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        ended = await run_command(self._argv, {}, self._code, orjson.dumps(payload), limit_s)
        return _failure(ended, limit_s) or _printed_reward(ended.stdout)

    async def close(self) -> None:
        """Nothing outlives :meth:`run`."""


def split_command(target: str) -> list[str]:
    """Words of a command line, as a shell would split it; :class:`ConfigError` if it has none or a quote is open."""
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise ConfigError(f"command {target!r}: {error}") from None
    if not words:
        raise ConfigError(f"command {target!r} is empty: write the program and its arguments")
    return words


async def run_command(
    argv: list[str], variables: Mapping[str, str], cwd: str | None, stdin: bytes, limit_s: float
) -> Ended:
    """Run a command in a process group of its own; all of it is killed when it ends, is late, or we are cancelled.

    Raises :class:`ConfigError` if the program cannot be started.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            env={**user_environment(), **variables},
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"command {argv[0]!r} cannot be started in {cwd or os.getcwd()}: {error}") from error
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate(stdin)
        return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    except TimeoutError:
        return Ended(None, "", "")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _failure(ended: Ended, limit_s: float) -> Outcome | None:
    if ended.code is None:
        return Outcome("timeout", detail=f"the command did not end within {limit_s:g} s")
    if ended.code != 0:
        how = f"exit code {ended.code}" if ended.code > 0 else f"signal {signal.Signals(-ended.code).name}"
        return Outcome("error", detail=tail(f"the command ended with {how}:\n{ended.stderr}"))
    return None


def _printed_reward(stdout: str) -> Outcome:
    text = stdout.strip()
    if text in ("", "null", "None"):
        return judge_reward(None)
    try:
        return judge_reward(float(text))
    except ValueError:
        return Outcome("invalid", detail=f"the reward printed {text[:200]!r}, not a number")
