"""Ends what a test session has started when the session is gone, however it went: ranks and engines are detached.

Runs beside pytest and reads its standard input, which closes with pytest. Processes are told by a mark that they have
in their environment. ``python sweeper.py MARK``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid

import psutil

MARK = "SEAMLESSFLOW_TESTS"


def start() -> subprocess.Popen[bytes]:
    """Mark this process and all that it will start; close ``stdin`` of what is returned to have them ended."""
    os.environ[MARK] = uuid.uuid4().hex
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, __file__, os.environ[MARK]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=unmarked, start_new_session=True)


def sweep(mark: str) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
