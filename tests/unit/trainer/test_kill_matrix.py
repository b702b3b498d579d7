"""SIGKILL of either of two ranks at every point of an update: the same weights, and each manifest trained once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from books import Books
from nursery import POINTS

from storage.ledger import Checkpoint
from storage.objects import ObjectStore
from storage.seaweed import Weed
from storage.shards import Shard
from workers.trainer.messages import UpdateRequest

ONLY_RANK_0 = ("sealing", "published")
"""Points that the other rank does not come to."""
pytestmark = pytest.mark.timeout(900)
KILLS = [(rank, point) for point in POINTS for rank in (0, 1) if rank == 0 or point not in ONLY_RANK_0]


@pytest.fixture(scope="module")
def shards(make: Any) -> list[Shard]:
    """One group for each kill."""
    return [make.random_shard(ordinal, 3, samples=3) for ordinal in range(len(KILLS))]


async def test_whichever_rank_is_killed_wherever_the_run_ends_with_the_weights_of_an_undisturbed_one(
    make: Any, qwen: Path, weed: Weed, object_store: ObjectStore, tmp_path: Path, shards: list[Shard]
) -> None:
    spec = make.make_spec(qwen, trainer={"row_tokens": 24})

    def gang(name: str, found: Checkpoint | None) -> Any:
        state = make.make_cluster(tmp_path / name, weed, object_store)
        checkpoint = {"checkpoint": Path(found.path), "checkpoint_digest": found.digest} if found else {}
        return make.Gang(spec, state, ranks=2, **checkpoint)

    undisturbed = Books(tmp_path / "undisturbed.db", object_store)
    undisturbed.produce(shards)
    async with gang("undisturbed", None) as ranks:
        await ranks.ready()
        for step in range(len(KILLS)):
            undisturbed.commit(await ranks.update(undisturbed.claim(step)))

    books = Books(tmp_path / "books.db", object_store)
    books.produce(shards)
    lost: UpdateRequest | None = None
    for step, (rank, point) in enumerate([*KILLS, (None, None)]):
        async with gang("killed", books.checkpoint()) as ranks:
            await ranks.ready()
            if lost is not None:
                books.commit(await ranks.update(lost))
            if rank is None:
                break
            request = books.claim(step)
            ranks.processes[rank].dies_at.write_text(point)
            calls = (client.update(request, deadline_s=60) for client in ranks.clients)
            await asyncio.gather(*calls, return_exceptions=True)
            assert ranks.processes[rank].wait(timeout=30) == -9, f"rank {rank} was not killed at {point}"
            lost = books.rewind()

    last, expected = books.checkpoint(), undisturbed.checkpoint()
    assert last is not None
    assert expected is not None
    assert (last.version, last.weights_digest) == (len(KILLS), expected.weights_digest)
    found = books.ledger.books(books.run)
    assert found.balanced
    assert (found.trained, found.filtered, found.failed, found.pending) == (3 * len(KILLS), {}, {}, {})
