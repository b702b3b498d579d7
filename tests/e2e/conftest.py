"""A small real job on the whole stack: Temporal, S3, proxy, two nodes, agents, rewards, DeepSpeed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, write_job

from cli import stack


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Job, dict[str, Any]]]:
    """A job that has run to its end, its cluster still up, and its JSON line."""
    folder = tmp_path_factory.mktemp("job")
    job = write_job(folder, tiny_model, "tiny-e2e")
    try:
        done = subprocess.run(job.demo(), capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        yield job, json.loads(done.stdout.strip().splitlines()[-1])
    finally:
        stack.down(job.state)
        shutil.rmtree(job.state.root, ignore_errors=True)
