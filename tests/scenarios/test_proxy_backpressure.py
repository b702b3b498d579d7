"""A slow or missing object store holds new samples back; what shards have superseded leaves the journal."""

from __future__ import annotations

import threading

import pytest

from proxy.testing import MemoryStore, ProxyServer, toy_ids
from storage.errors import StorageError
from workers.engines.script import Play

USER = [{"role": "user", "content": "hi"}]


class Store(MemoryStore):
    """Waits while `open` is not set, and fails with `error` if there is one."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()
        self.error = ""

    def put(self, key, data):
        self.asked.set()
        if not self.open.wait(20):
            raise StorageError("the test never opened the store")
        if self.error:
            raise StorageError(self.error)
        return super().put(key, data)


async def group(bench, control, ordinal_rewards=(1.0, 0.0)):
    """Run and score what may be claimed; the sessions."""
    samples = await control.claim_samples("demo", "train", "w", 2)
    for sample in samples:
        client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
        await client.chat.completions.create(model="any", messages=USER)
        await control.finish_sample("demo", sample.session, None)
    for score, reward in zip(await control.claim_scores("demo", "r", 2), ordinal_rewards, strict=False):
        await control.commit_score("demo", score.session, reward)
    return [sample.session for sample in samples]


@pytest.fixture
async def bench(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 20)
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=9, target_in_flight=8, samples_per_task=2)
    return bench


@pytest.fixture
def store(bench):
    store = Store()
    bench.proxy.service.writer._store = bench.proxy.service._store = store
    return store


async def test_nothing_to_train_on_starts_while_too_much_waits_for_the_store(bench, store, monkeypatch, until):
    monkeypatch.setattr("proxy.shard_writer.MAX_GROUPS", 2)
    monkeypatch.setattr("proxy.shard_writer.SLOW_S", 0.0)
    control = bench.proxy.control
    store.open.clear()
    (running,) = await control.claim_samples("demo", "train", "w", 1)
    assert (await control.run_status("demo"))["shards"] == {
        "unwritten_groups": 0,
        "unwritten_tokens": 0,
        "waits_for": "",
    }
    (other,) = await control.claim_samples("demo", "train", "w", 1)
    assert len(await group(bench, control)) == 2
    await until(store.asked.is_set, "the shard is being written")
    assert len(await group(bench, control)) == 2
    assert await group(bench, control) == []
    shards = (await control.run_status("demo"))["shards"]
    assert shards["unwritten_groups"] == 2
    assert shards["unwritten_tokens"] > 0
    assert shards["waits_for"].startswith("the object store since 20")
    client = bench.client_of({"session": running.session, "api_key": running.api_key})
    assert await client.chat.completions.create(model="any", messages=USER)
    await control.set_admission("demo", "eval/0", admit_until=1, target_in_flight=1, samples_per_task=1)
    assert await control.claim_samples("demo", "eval/0", "w", 1)
    store.open.set()
    await bench.proxy.service.writer.idle()
    assert (await control.run_status("demo"))["shards"]["waits_for"] == ""
    holding = [running.session, other.session]
    assert len(await control.claim_samples("demo", "train", "w", 2, holding=holding)) == 2


async def test_tokens_that_wait_hold_back_as_groups_do(bench, store, monkeypatch):
    monkeypatch.setattr("proxy.shard_writer.MAX_TOKENS", 1)
    control = bench.proxy.control
    store.open.clear()
    await group(bench, control)
    assert await group(bench, control) == []
    store.open.set()
    await bench.proxy.service.writer.idle()
    assert len(await group(bench, control)) == 2


async def test_why_the_store_cannot_be_written_is_told_until_it_can(bench, store, monkeypatch, until):
    monkeypatch.setattr("proxy.shard_writer._PAUSE_S", 0.01)
    control = bench.proxy.control
    store.error = "no space left in the bucket"
    await group(bench, control)
    await until(lambda: bench.proxy.service.writer.waits_for("demo"), "the writer failed")
    assert (await control.run_status("demo"))["shards"]["waits_for"].endswith("no space left in the bucket")
    store.error = ""
    await bench.proxy.service.writer.idle()
    assert (await control.run_status("demo"))["shards"]["waits_for"] == ""
    assert len(store.objects) == 1


async def test_records_of_superseded_sessions_leave_the_journal_and_every_count_stays(bench, monkeypatch):
    control, service = bench.proxy.control, bench.proxy.service
    gone = await group(bench, control)
    kept = [sample.session for sample in await control.claim_samples("demo", "train", "w", 1)]
    await service.writer.idle()
    service.ledger.filter_group("demo", "train", 0, "stale")
    before, audit = await control.run_status("demo"), await control.audit("demo")
    now = service.ledger.session(gone[0]).ended
    monkeypatch.setattr("storage.collect.time.time", lambda: now + 3601)
    await service.housekeeping.collect()
    assert all(not service.journal.read(session) for session in gone)
    after = await control.run_status("demo")
    for what in ("tokens", "turns", "forks", "books"):
        assert {**after, "tokens": {**after["tokens"], "per_s": 0}}[what] == {
            **before,
            "tokens": {**before["tokens"], "per_s": 0},
        }[what]
    assert await control.audit("demo") == audit
    assert audit["tokens_lost"] == 0
    assert (await control.session(gone[0]))["collected"] == 2
    assert (await control.session(kept[0]))["collected"] is None
    async with ProxyServer(bench.folder, bench.proxy.store) as again:
        status = await again.control.run_status("demo")
        assert (status["tokens"]["journalled"], status["turns"]) == (4, 2)


async def test_records_stay_where_the_run_file_says_so(start_bench, monkeypatch):
    bench = await start_bench(*[Play(toy_ids("x"))] * 4, journal={"keep_s": None})
    service = bench.proxy.service
    await bench.proxy.control.set_admission("demo", "train", admit_until=1, target_in_flight=8, samples_per_task=2)
    (first, *_) = await group(bench, bench.proxy.control)
    await service.writer.idle()
    service.ledger.filter_group("demo", "train", 0, "stale")
    monkeypatch.setattr("storage.collect.time.time", lambda: 1e12)
    await service.housekeeping.collect()
    assert service.journal.read(first)
