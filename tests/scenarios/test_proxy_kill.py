"""`kill -9` of the proxy process in the middle of an answer: the client's own retry gets the whole answer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from proxy.client import ControlClient
from proxy.testing import write_toy_model
from storage.journal import open_journal
from storage.ports import free_port
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.engines.script import hash_play
from workers.engines.scripted import ScriptedEngine

pytestmark = pytest.mark.chaos
TOKENS = 40


@contextmanager
def proxy_process(state: StateFolder, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "proxy", "--port", str(port), "--state", str(state.root)]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


@pytest.fixture
def state(tmp_path) -> StateFolder:
    port = free_port()
    folder = StateFolder(tmp_path)
    config = ClusterConfig(
        temporal="127.0.0.1:1",
        proxy=f"http://127.0.0.1:{port}",
        s3="127.0.0.1:1",
        ledger_url=f"sqlite:///{tmp_path / 'ledger.db'}",
        journal_url=f"sqlite:///{tmp_path / 'journal.db'}",
    )
    folder.write(config, Secrets(control_key="control", s3_access_key="access", s3_secret_key="secret-of-s3"))
    write_toy_model(tmp_path / "model")
    return folder


async def test_a_killed_proxy_loses_no_token_and_the_retry_continues_the_answer(state, spec_for, until):
    url = state.cluster().proxy
    port = int(url.rsplit(":", 1)[1])
    # Slow enough to be killed in the middle; its tokens depend on those before them only, so a cut changes nothing.
    engine = ScriptedEngine(vocab_size=259, delay_s=0.05)
    async with engine, ControlClient(url, "control") as control:
        with proxy_process(state, port) as first:
            await control.create_run("demo", spec_for(state.root), "digest")
            await control.put_route("a", run="demo", node="n", url=engine.url, epoch=1, version=0, state="open")
            await control.set_admission("demo", "train", admit_until=1, target_in_flight=1, samples_per_task=1)
            (sample,) = await control.claim_samples("demo", "train", "w", 1)
            client = openai.AsyncOpenAI(base_url=sample.base_url, api_key=sample.api_key, max_retries=12)
            async with client:
                messages = [{"role": "user", "content": "hi"}]
                asking = asyncio.create_task(
                    client.chat.completions.create(model="any", messages=messages, max_tokens=TOKENS)
                )
                await until(lambda: any(len(o.ids) >= 8 for o in engine.outputs.values()), "eight tokens")
                first.kill()
                first.wait(10)
                with proxy_process(state, port) as second:
                    answer = await asking
                    assert answer.usage.completion_tokens == TOKENS
                    assert await control.finish_sample("demo", sample.session, None) == "finished"
                    (turn,) = (await control.session(sample.session))["turns"]
                    assert [segment["number"] for segment in turn["segments"]] == [0, 1]
                    assert (await control.routes())[0]["lease"] == "a"
                assert second.returncode == 0
    journal = open_journal(state.cluster().journal_url)
    recorded = [token for row in journal.read(sample.session) if row.kind == "tokens" for token in row.ids]
    journal.close()
    assert tuple(recorded) == hash_play(engine.requests[0], 259).ids
