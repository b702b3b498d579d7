"""Group commit: which items share a commit, who makes it, and what waiters learn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from storage import group_commit
from storage.errors import DeadlineError, FencedError, StorageError
from storage.group_commit import LIMIT_BYTES, GroupCommit, Refusals, WouldWait


class Database:
    """Notes each commit with the thread that made it. ``gate`` holds up the writer's thread."""

    def __init__(self) -> None:
        self.commits: list[list[str]] = []
        self.threads: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.busy = False

    def commit(self, items: Sequence[str]) -> Refusals:
        self.started.set()
        assert self.gate.wait(30)
        return self._write(items)

    def quick(self, items: Sequence[str]) -> Refusals:
        if self.busy:
            raise WouldWait
        return self._write(items)

    def _write(self, items: Sequence[str]) -> Refusals:
        if "broken" in items:
            raise OSError("disk full")
        self.commits.append(list(items))
        self.threads.append(threading.get_ident())
        return {index: FencedError(item) for index, item in enumerate(items) if item.startswith("late")}

    def items(self) -> list[str]:
        return [item for commit in self.commits for item in commit]


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def quick(database: Database) -> Iterator[GroupCommit[str]]:
    writer = GroupCommit("quick writer", database.commit, database.quick)
    yield writer
    database.gate.set()
    writer.close()


@pytest.fixture
def slow(database: Database) -> Iterator[GroupCommit[str]]:
    writer = GroupCommit("slow writer", database.commit)
    yield writer
    database.gate.set()
    writer.close()


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def test_an_idle_writer_commits_in_the_event_loop_and_at_once(
    quick: GroupCommit[str], database: Database
) -> None:
    append = quick.submit("a", 1)
    with pytest.raises(StopIteration):
        append.send(None)
    assert (database.commits, database.threads) == ([["a"]], [threading.get_ident()])


async def test_what_one_turn_of_the_loop_brings_shares_a_commit(
    quick: GroupCommit[str], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GAP_S", 60.0)
    names = [str(n) for n in range(50)]
    await asyncio.gather(*(quick.submit(name, 1) for name in names))
    assert database.items() == names
    assert len(database.commits) == 2


async def test_a_commit_that_would_wait_is_made_in_the_thread(quick: GroupCommit[str], database: Database) -> None:
    database.busy = True
    await asyncio.gather(quick.submit("a", 1), quick.submit("b", 1))
    assert database.items() == ["a", "b"]
    assert threading.get_ident() not in database.threads


@pytest.mark.parametrize(("size", "flag"), [(1, True), (LIMIT_BYTES, False)])
async def test_large_and_slow_items_stay_off_the_event_loop_and_keep_their_place(
    quick: GroupCommit[str], database: Database, size: int, flag: bool
) -> None:
    database.gate.clear()
    first = asyncio.create_task(quick.submit("slow", size, slow=flag))
    await reached(database.started)
    second = asyncio.create_task(quick.submit("after", 1))
    await asyncio.sleep(0)
    assert database.commits == []
    database.gate.set()
    await asyncio.gather(first, second)
    assert database.commits == [["slow"], ["after"]]
    assert database.threads[0] != threading.get_ident()
    assert database.threads[1] == threading.get_ident()


async def test_a_busy_thread_collects_what_arrives(slow: GroupCommit[str], database: Database) -> None:
    database.gate.clear()
    tasks = [asyncio.create_task(slow.submit("first", 1))]
    await reached(database.started)
    tasks += [asyncio.create_task(slow.submit(str(n), 1)) for n in range(20)]
    await asyncio.sleep(0)
    database.gate.set()
    await asyncio.gather(*tasks)
    assert database.commits == [["first"], [str(n) for n in range(20)]]


@pytest.mark.parametrize("kind", ["quick", "slow"])
async def test_a_refused_item_does_not_hold_up_the_others(
    request: pytest.FixtureRequest, database: Database, kind: str
) -> None:
    writer: GroupCommit[str] = request.getfixturevalue(kind)
    names = ["late 0", "a", "late 1", "b"]
    outcomes = await asyncio.gather(*(writer.submit(name, 1) for name in names), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [FencedError, type(None), FencedError, type(None)]


@pytest.mark.parametrize("kind", ["quick", "slow"])
async def test_a_commit_that_fails_fails_for_all_its_items_and_the_next_goes_on(
    request: pytest.FixtureRequest, database: Database, kind: str
) -> None:
    writer: GroupCommit[str] = request.getfixturevalue(kind)
    for item in ("broken", "broken"):
        with pytest.raises(StorageError, match="disk full"):
            await writer.submit(item, 1)
    await writer.submit("a", 1)
    assert database.items() == ["a"]


async def test_a_wait_has_a_deadline_and_a_name_and_the_item_may_be_committed_later(
    slow: GroupCommit[str], database: Database
) -> None:
    database.gate.clear()
    with pytest.raises(DeadlineError, match="slow writer did not commit a record in time"):
        await slow.submit("a", 1, deadline_s=0.01)
    with pytest.raises(DeadlineError):
        await slow.submit("b", 1, deadline_s=0.01)
    database.gate.set()
    await slow.submit("c", 1)
    assert database.items() == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["quick", "slow"])
async def test_an_item_whose_waiter_is_cancelled_is_committed_all_the_same(
    request: pytest.FixtureRequest, database: Database, kind: str
) -> None:
    writer: GroupCommit[str] = request.getfixturevalue(kind)
    await writer.submit("first", 1)
    task = asyncio.create_task(writer.submit("a", 1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await writer.submit("b", 1)
    assert database.items() == ["first", "a", "b"]


@pytest.mark.parametrize("kind", ["quick", "slow"])
async def test_closing_commits_what_waits(request: pytest.FixtureRequest, database: Database, kind: str) -> None:
    writer: GroupCommit[str] = request.getfixturevalue(kind)
    await writer.submit("first", 1)
    task = asyncio.create_task(writer.submit("a", 1))
    await asyncio.sleep(0)
    await asyncio.to_thread(writer.close)
    await task
    assert database.items() == ["first", "a"]
    with pytest.raises(StorageError, match="closed"):
        await writer.submit("b", 1)


def test_what_a_loop_left_behind_goes_with_the_next_one(database: Database) -> None:
    writer = GroupCommit("writer", database.commit, database.quick)

    async def leave() -> None:
        await writer.submit("first", 1)
        task = asyncio.create_task(writer.submit("left", 1))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    asyncio.run(writer.submit("next", 1))
    writer.close()
    assert database.items() == ["first", "left", "next"]


async def test_two_loops_at_once_are_refused(quick: GroupCommit[str]) -> None:
    await quick.submit("a", 1)
    with pytest.raises(StorageError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, quick.submit("b", 1))


async def test_closing_has_a_deadline_and_a_name(slow: GroupCommit[str], database: Database) -> None:
    database.gate.clear()
    task = asyncio.create_task(slow.submit("a", 1))
    await reached(database.started)
    with pytest.raises(DeadlineError, match="slow writer to commit its last records"):
        await asyncio.to_thread(slow.close, 0.01)
    database.gate.set()
    await task
