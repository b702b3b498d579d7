"""SIGKILL in the middle of writing: what was acknowledged is there, what is there is whole."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from postgres import PostgresServer

from storage.journal import JournalRecord, open_journal
from storage.ledger import TRAIN, Ledger, State

JOURNAL_WRITER = """
import asyncio, sys
import numpy as np
from storage.journal import JournalRecord, open_journal

async def stream(journal, name):
    for n in range(1_000_000):
        ids = np.arange(n, n + 3, dtype=np.int32)
        await journal.append(JournalRecord(name, "chunk", {"n": n}, ids, np.full(3, -n, dtype=np.float32)))
        print(name, n, flush=True)

async def main():
    journal = open_journal(sys.argv[1])
    await asyncio.gather(*(stream(journal, f"s{i}") for i in range(8)))

asyncio.run(main())
"""

LEDGER_WRITER = """
import sys
from storage.ledger import Ledger

ledger, worker = Ledger(sys.argv[1]), sys.argv[2]
while claims := ledger.claim_samples("demo", "train", worker, 4):
    for claim in claims:
        session = f"{worker}-{claim.key.ordinal}-{claim.key.sample}"
        ledger.finish_sample(claim.key, claim.attempt, session=session, prompt_tokens=1, completion_tokens=1,
                             turns=1, min_version=0, max_version=0, output=None)
        print(claim.key.ordinal, claim.key.sample, flush=True)
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


def lines_until_kill(process: subprocess.Popen[str], lines: int) -> list[str]:
    """What the process printed up to its SIGKILL, which comes after so many lines."""
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    seen += process.stdout.readlines()
    process.stdout.close()
    process.wait()
    return [line for line in seen if line.endswith("\n")]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/test.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.database()


@pytest.mark.parametrize("killed_after", [1, 200])
def test_every_acknowledged_record_survives_the_kill_of_the_journal(url: str, killed_after: int) -> None:
    acknowledged: dict[str, int] = {}
    for line in lines_until_kill(start(JOURNAL_WRITER, url), killed_after):
        session, n = line.split()
        acknowledged[session] = int(n)
    journal = open_journal(url)
    assert acknowledged
    for session, last in acknowledged.items():
        records = journal.read(session)
        assert [record.data["n"] for record in records] == list(range(len(records)))
        assert len(records) > last
        for record in records:
            assert record.ids is not None
            assert record.logprobs is not None
            assert record.ids.tolist() == [record.data["n"] + i for i in range(3)]
            assert record.logprobs.tolist() == [-record.data["n"]] * 3
    asyncio.run(journal.append(JournalRecord("after", "note", {})))
    assert len(journal.read("after")) == 1
    journal.close()


def test_two_processes_share_a_ledger_and_the_kill_of_one_loses_nothing(url: str) -> None:
    ledger = Ledger(url)
    ledger.create_run("demo", {}, "digest")
    ledger.set_admission("demo", TRAIN, admit_until=40, target_in_flight=16, samples_per_task=4)
    killed, survivor = start(LEDGER_WRITER, url, "killed"), start(LEDGER_WRITER, url, "survivor")
    acknowledged = lines_until_kill(killed, 10)
    assert survivor.stdout is not None
    acknowledged += survivor.stdout.readlines()
    survivor.stdout.close()
    assert survivor.wait() == 0

    ledger.release_worker("demo", TRAIN, "killed", max_attempts=3)
    last = start(LEDGER_WRITER, url, "last")
    assert last.stdout is not None
    acknowledged += last.stdout.readlines()
    last.stdout.close()
    assert last.wait() == 0

    assert len(acknowledged) == len(set(acknowledged))
    finished = {(row.key.ordinal, row.key.sample) for row in ledger.samples("demo", TRAIN, state=State.FINISHED)}
    assert finished == {(ordinal, sample) for ordinal in range(40) for sample in range(4)}
    books = ledger.books("demo")
    assert (books.produced, books.pending, books.balanced) == (160, {"finished": 160}, True)
    ledger.close()
