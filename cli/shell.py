"""What every part of the command shares: the state folder it is about, and talking to runs and to the pool."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from storage.errors import ConfigError
from workers.cluster import STATE_VARIABLE, StateFolder

STATE_ROOT = Path(".seamlessflow")
DEFAULT_STATE = STATE_ROOT / "local"

StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state", help=f"State folder; default: ${STATE_VARIABLE}, else {DEFAULT_STATE}.", show_default=False
    ),
]
Why = Annotated[str, typer.Option("--why", help="Reason, kept in the audit table.")]
Answer = TypeVar("Answer")


def state_folder(given: Path | None, *, create: bool = False) -> StateFolder:
    """The state folder asked for; :class:`ConfigError` names those that exist if it does not."""
    path = given or Path(os.environ.get(STATE_VARIABLE) or DEFAULT_STATE)
    if not create and not (path / "cluster.json").is_file():
        others = sorted(str(found.parent) for found in STATE_ROOT.glob("*/cluster.json"))
        hint = f"; there is: {', '.join(f'--state {other}' for other in others)}" if others else ""
        raise ConfigError(f"{path} holds no cluster: start one with `seamlessflow up run.yaml`{hint}")
    return StateFolder(path.resolve())


def tell(state: Path | None, run: str, update: str, message: BaseModel) -> None:
    from cli.runs import Runs

    async def ask() -> Any:
        return await (await Runs.connect(state_folder(state).cluster())).tell(run, update, message)

    show(wait(ask()))


def tell_pool(state: Path | None, update: str, message: BaseModel) -> None:
    from cli.runs import Runs

    async def ask() -> Any:
        return await (await Runs.connect(state_folder(state).cluster())).tell_pool(update, message)

    show(wait(ask()))


def wait(work: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(work)


def show(answer: Any) -> None:
    if isinstance(answer, dict) and "phase" in answer:
        waits = f", waits for {answer['waiting_for']}" if answer["waiting_for"] else ""
        step = f"step {answer['step']}/{answer['steps']}"
        print(f"{answer['run']}: {answer['phase']}, {step}, weight version {answer['version']}{waits}")
        return
    print(answer if isinstance(answer, str) else json.dumps(answer, indent=2, default=str))


def say(line: str) -> None:
    """Progress goes to standard error: standard output carries results only."""
    print(line, file=sys.stderr, flush=True)
