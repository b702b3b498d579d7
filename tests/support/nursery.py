"""Starts trainer ranks in a moment: one process has imported torch and DeepSpeed, and forks each rank from itself.

A rank is a process of its own, in a session of its own, and runs the code of ``python -m workers.trainer``: it can be
killed, and gives an exit code; it can also be told to kill itself at a point of an update. ``Nursery`` is the test's
side, this module as a program the other.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Nursery:
    """The test's side."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def rank(self, launch: Path, log: Path) -> Rank:
        """Start a rank."""
        dies_at = launch.with_suffix(".dies_at")
        dies_at.unlink(missing_ok=True)
        return Rank(self, self._ask(launch=str(launch), log=str(log), dies_at=str(dies_at)), dies_at)

    def run(self, code: str, folder: Path, *, timeout: float = 120) -> str:
        """What a process that runs ``code`` prints; it may fail."""
        script, log = folder / "code.py", folder / "code.log"
        script.write_text(code)
        Rank(self, self._ask(code=str(script), log=str(log)), log).wait(timeout)
        return log.read_text()

    def poll(self, pid: int) -> int | None:
        """Exit code of a rank, None while it runs."""
        code: int | None = self._ask(poll=pid)
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@dataclass
class Rank:
    """A started rank, as a ``Popen`` is."""

    nursery: Nursery
    pid: int
    dies_at: Path
    """Write the name of one of :data:`POINTS` into it: the rank kills itself there, with SIGKILL."""
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.nursery.poll(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"rank with pid {self.pid} runs after {timeout} s")
            time.sleep(0.01)
        return code


POINTS = {
    "loading": ("workers.trainer.batch", "weigh"),
    "forward": ("workers.trainer.deepspeed_backend", "DeepSpeedBackend._logits"),
    "backward": ("workers.trainer.objective", "StepSums.add"),
    "optimizer": ("workers.trainer.deepspeed_backend", "DeepSpeedBackend.update"),
    "saving": ("workers.trainer.deepspeed_backend", "DeepSpeedBackend.save"),
    "saved": ("workers.trainer.trainer", "metrics_of"),
    "sealing": ("workers.trainer.checkpoint", "_sha256"),
    "sealed": ("workers.trainer.trainer", "Trainer._hold"),
    "publishing": ("workers.trainer.deepspeed_backend", "DeepSpeedBackend.publish"),
    "published": ("storage.weights", "WeightsStore.commit"),
}
"""Functions in front of which a rank dies when the file ``Rank.dies_at`` names their point."""
CRITIC_POINTS = {"critic": ("workers.trainer.deepspeed_backend", "DeepSpeedBackend.update_critic")}
"""The same, where there is a critic."""


PRELOADED = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.qwen3.modeling_qwen3",
    "storage.objects",
)
"""What a rank imports besides: seconds each."""


def _serve() -> None:
    """The other side: a line in, a line out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is imported may print
    import torch

    for module in (*(module for module, _ in POINTS.values()), *PRELOADED):
        importlib.import_module(module)
    assert torch.get_num_threads() == 1, "a process with threads cannot be forked"
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            answers.close()
            _become(**asked)
        answers.write(json.dumps(answer) + "\n")


def _become(log: str, launch: str = "", dies_at: str = "", code: str = "") -> None:
    """A rank, or a process that runs the file ``code``."""
    os.setsid()
    for stream, path in ((0, os.devnull), (1, log), (2, log)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
    from workers.trainer.__main__ import main

    result = 0
    try:
        if code:
            runpy.run_path(code)
        else:
            for point, (module, name) in (POINTS | CRITIC_POINTS).items():
                _die_at(Path(dies_at), point, module, name)
            sys.argv = ["workers.trainer", "--launch", launch]
            result = main()
    except BaseException:  # noqa: BLE001  # a child must not go on in its parent's place
        traceback.print_exc()
        result = 1
    sys.stdout.flush()
    os._exit(result)


def _die_at(file: Path, point: str, module: str, name: str) -> None:
    owner: Any = importlib.import_module(module)
    *owners, function = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, function)

    def dying(*arguments: Any, **options: Any) -> Any:
        if file.exists() and file.read_text() == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, function, dying)


if __name__ == "__main__":
    _serve()
