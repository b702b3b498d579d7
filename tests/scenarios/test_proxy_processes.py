"""Three proxy processes over one PostgreSQL database, killed and stopped in the middle of answers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import aiohttp
import openai
import pytest

from proxy.client import ControlClient
from proxy.testing import write_toy_model
from storage.errors import SeamlessFlowError
from storage.journal import open_journal
from storage.ledger import Ledger
from storage.ports import free_ports
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.engines.script import hash_play
from workers.engines.scripted import ScriptedEngine

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
TOKENS = 40
BODY = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
KEYS = Secrets(control_key="control", s3_access_key="access", s3_secret_key="secret-of-s3")


@contextmanager
def proxy_process(state: StateFolder, url: str) -> Iterator[subprocess.Popen[bytes]]:
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "proxy", "--port", port, "--state", str(state.root), "--url", url]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.wait(20)


class Proxies:
    """Processes by URL; `control` talks to the last one, which no test kills."""

    def __init__(self, state, urls, processes, control, engine, database):
        self.state = state
        self.urls = urls
        self.processes = processes
        self.control = control
        self.engine = engine
        self.ledger = Ledger(database)
        self.journal = open_journal(database)

    def signal(self, session, number):
        """To the owner of a session."""
        self.processes[session["base_url"].partition("/s/")[0]].send_signal(number)

    def elsewhere(self, session):
        """A proxy that does not own it."""
        return next(url for url in self.urls[:2] if not session["base_url"].startswith(url))

    def client(self, url, session, **options):
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session["api_key"], timeout=60, **options)

    def tokens(self, session):
        rows = self.journal.read(session["session"])
        return tuple(token for row in rows if row.kind == "tokens" for token in row.ids)

    async def owned_session(self):
        """A session of the first proxy."""
        async with ControlClient(self.urls[0], KEYS.control_key) as first:
            return await first.create_session("demo")


@pytest.fixture
async def proxies(tmp_path, postgres, spec_for):
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(3)]
    database = postgres.database()
    state = StateFolder(tmp_path)
    addresses = {"temporal": "127.0.0.1:1", "proxy": urls[0], "s3": "127.0.0.1:1"}
    state.write(ClusterConfig(**addresses, ledger_url=database, journal_url=database), KEYS)
    write_toy_model(tmp_path / "model")
    engine = ScriptedEngine(vocab_size=259, delay_s=0.05)
    async with engine, ControlClient(urls[2], KEYS.control_key) as control:
        with ExitStack() as stack:
            processes = {url: stack.enter_context(proxy_process(state, url)) for url in urls}
            for url in urls:
                async with ControlClient(url, KEYS.control_key) as each:
                    await each.routes()
            await control.create_run("demo", spec_for(tmp_path), "digest")
            await control.put_route("a", run="demo", node="n", url=engine.url, epoch=1, version=0, state="open")
            made = Proxies(state, urls, processes, control, engine, database)
            yield made
        made.journal.close()
        made.ledger.close()
    postgres.drop(database)


async def test_an_answer_whose_owner_is_killed_is_gone_on_with_elsewhere(proxies, until):
    session = await proxies.owned_session()
    async with proxies.client(proxies.elsewhere(session), session, max_retries=0) as client:
        asking = asyncio.create_task(client.chat.completions.create(**BODY))
        await until(lambda: len(proxies.tokens(session)) >= 8, "eight tokens are journalled")
        proxies.signal(session, signal.SIGKILL)
        answer = await asking
    assert answer.usage.completion_tokens == TOKENS
    assert proxies.tokens(session) == hash_play(proxies.engine.requests[0], 259).ids
    (turn,) = (await proxies.control.session(session["session"]))["turns"]
    assert [segment["number"] for segment in turn["segments"]] == [0, 1]
    assert turn["finish_reason"] == "length"


async def test_a_stream_whose_owner_is_killed_goes_on_and_is_what_a_retry_is_told(proxies, until):
    session = await proxies.owned_session()
    url = proxies.elsewhere(session)
    key = {"Authorization": f"Bearer {session['api_key']}"}
    async with aiohttp.ClientSession(headers=key) as http:
        async with http.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as stream:
            first = await stream.content.readuntil(b"\n\n")
            proxies.signal(session, signal.SIGKILL)
            told = first + await stream.read()
        retry = {"x-stainless-retry-count": "1"}
        async with http.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}, headers=retry) as stream:
            again = await stream.read()
    assert again == told
    assert again.endswith(b"data: [DONE]\n\n")
    assert proxies.tokens(session) == hash_play(proxies.engine.requests[0], 259).ids


async def test_a_process_that_starts_at_the_address_of_a_killed_one_has_its_sessions_at_once(proxies, until):
    session = await proxies.owned_session()
    url = session["base_url"].partition("/s/")[0]
    async with proxies.client(url, session, max_retries=12) as client:
        asking = asyncio.create_task(client.chat.completions.create(**BODY))
        await until(lambda: len(proxies.tokens(session)) >= 8, "eight tokens are journalled")
        proxies.signal(session, signal.SIGKILL)
        proxies.processes[url].wait(10)
        with proxy_process(proxies.state, url):
            assert (await asking).usage.completion_tokens == TOKENS
            (owner,) = [proxy for proxy in proxies.ledger.proxies() if proxy.url == url]
            assert proxies.ledger.session(session["session"]).proxy == owner.proxy
    assert proxies.tokens(session) == hash_play(proxies.engine.requests[0], 259).ids


async def test_an_owner_that_stood_still_too_long_can_add_nothing(proxies, until):
    session = await proxies.owned_session()
    owner = session["base_url"].partition("/s/")[0]
    async with proxies.client(owner, session, max_retries=0) as old, proxies.client(proxies.urls[1], session) as new:
        asking = asyncio.create_task(old.chat.completions.create(**BODY))
        await until(lambda: len(proxies.tokens(session)) >= 8, "eight tokens are journalled")
        proxies.signal(session, signal.SIGSTOP)
        retry = {"x-stainless-retry-count": "1"}
        answer = await new.chat.completions.create(**BODY, extra_headers=retry)
        assert answer.usage.completion_tokens == TOKENS
        proxies.signal(session, signal.SIGCONT)
        assert (await asking).choices == answer.choices
        assert proxies.tokens(session) == hash_play(proxies.engine.requests[0], 259).ids
        # It serves again, and knows that the session is not its own any more.
        assert len((await old.chat.completions.create(**{**BODY, "max_tokens": 2})).choices) == 1
    assert len((await proxies.control.session(session["session"]))["turns"]) == 2


async def test_case_86_300_requests_that_are_held_at_the_wrong_proxy_are_all_answered_once(proxies):
    held = {"run": "demo", "node": "n", "url": proxies.engine.url, "epoch": 1, "version": 0}
    await proxies.control.put_route("a", **held, state="held")
    async with ControlClient(proxies.urls[0], KEYS.control_key) as first:
        sessions = [await first.create_session("demo") for _ in range(300)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(session):
            key = {"Authorization": f"Bearer {session['api_key']}"}
            url = f"{proxies.urls[1]}/v1/chat/completions"
            async with http.post(url, json={**BODY, "max_tokens": 3}, headers=key) as answer:
                return answer.status

        asking = [asyncio.create_task(ask(session)) for session in sessions]
        while (await proxies.control.run_status("demo"))["generations_in_flight"] < 300:  # noqa: ASYNC110  # of processes
            await asyncio.sleep(0.2)
        assert not proxies.engine.requests
        await proxies.control.put_route("a", **{**held, "version": 1}, state="open")
        assert await asyncio.gather(*asking) == [200] * 300
    assert len(proxies.engine.requests) == 300


def test_a_second_proxy_on_the_same_sqlite_files_is_refused_with_the_reason(tmp_path):
    state = StateFolder(tmp_path)
    ports = free_ports(2)
    addresses = {"temporal": "127.0.0.1:1", "proxy": f"http://127.0.0.1:{ports[0]}", "s3": "127.0.0.1:1"}
    files = {f"{name}_url": f"sqlite:///{tmp_path / name}.db" for name in ("ledger", "journal")}
    state.write(ClusterConfig(**addresses, **files), KEYS)
    with proxy_process(state, addresses["proxy"]):
        asyncio.run(_ready(addresses["proxy"]))
        command = [sys.executable, "-m", "proxy", "--port", str(ports[1]), "--state", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "a SQLite journal is one proxy's" in second.stderr
    assert "--database postgresql://" in second.stderr


def test_a_ledger_on_a_server_needs_its_journal_there_too(tmp_path):
    state = StateFolder(tmp_path)
    (port,) = free_ports(1)
    urls = {"ledger_url": "postgresql://nobody@127.0.0.1:1/x", "journal_url": f"sqlite:///{tmp_path / 'journal.db'}"}
    state.write(ClusterConfig(temporal="127.0.0.1:1", proxy="http://127.0.0.1:1", s3="127.0.0.1:1", **urls), KEYS)
    command = [sys.executable, "-m", "proxy", "--port", str(port), "--state", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "must both be SQLite files" in done.stderr


async def _ready(url: str) -> None:
    async with ControlClient(url, KEYS.control_key) as control:
        try:
            await control.routes()
        except SeamlessFlowError as error:
            pytest.fail(f"the first proxy did not start: {error}")
