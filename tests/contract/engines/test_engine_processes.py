"""Engines as processes, the way a node agent starts them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from workers.engines.base import Sampling
from workers.engines.sglang import SglangEngine

KINDS = ["embedded", "scripted"]


@asynccontextmanager
async def process(kind: str, *flags: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A running engine process and its URL; its standard input is closed, as that of a detached process is."""
    started = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-m", f"workers.engines.{kind}", "--port", "0", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert started.stdout is not None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(started.stdout.readline), 60)
        assert line.startswith("listening on http://127.0.0.1:")
        yield started, line.removeprefix("listening on ").strip()
    finally:
        started.kill()
        await asyncio.to_thread(started.wait)
        started.stdout.close()


def refusal(kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"workers.engines.{kind}", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_it_serves_with_the_common_flags_and_ends_cleanly_on_sigterm(
    kind: str, checkpoints: Any, tmp_path: Path
) -> None:
    log = tmp_path / "tokens.jsonl"
    flags = ["--model-path", str(checkpoints.first), "--weight-version", "5", "--dtype", "float32", "--threads", "1"]
    flags += ["--max-running", "4", "--kv-tokens", "1024", "--seed", "1", "--log-tokens", str(log)]
    async with process(kind, *flags) as (started, url):
        engine = SglangEngine(url, vocab_size=64)
        info = await engine.info()
        assert (info.model_path, info.weight_version, info.vocab_size) == (str(checkpoints.first), 5, 64)
        ids: list[int] = []
        async for chunk in engine.generate([1, 2], Sampling(max_new_tokens=5), request_id="r" * 32, salt=""):
            ids += chunk.ids
        await engine.close()
        started.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(started.wait, 20) == 0
    if kind == "embedded":
        records = [orjson.loads(line) for line in log.read_bytes().splitlines()]
        assert [i for record in records for i in record.get("ids", [])] == ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_in_use_is_said_in_one_line(kind: str, checkpoints: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = refusal(kind, "--model-path", str(checkpoints.first), "--port", str(port))
    assert result.returncode == 2
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_path_that_does_not_exist_is_said_in_one_line(kind: str, tmp_path: Path) -> None:
    result = refusal(kind, "--model-path", str(tmp_path / "nowhere"), "--port", "0")
    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unsupported_architecture_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    result = refusal("embedded", "--model-path", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert "GPT2LMHeadModel" in result.stderr
    assert "Qwen3ForCausalLM" in result.stderr


async def test_a_script_file_is_played(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"plays": [{"ids": [7, 8, 9], "logprobs": [-1.0, -2.0, -3.0], "chunk": 3}]}')
    async with process("scripted", "--script", str(script)) as (_, url):
        engine = SglangEngine(url)
        chunks = [c async for c in engine.generate([1], Sampling(max_new_tokens=9), request_id="r" * 32, salt="")]
        await engine.close()
    assert [chunk.ids for chunk in chunks] == [(7, 8, 9)]
