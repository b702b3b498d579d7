"""SIGKILL of either of two ranks at every point of an update: the same weights, and each manifest trained once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nursery import POINTS

from storage.ledger import TRAIN, Checkpoint, Ledger, SessionRecord
from storage.manifests import Manifest, write_manifest
from storage.objects import ObjectStore
from storage.seaweed import Weed
from storage.shards import Shard, digest_of, encode, key_for
from workers.trainer.messages import UpdateRequest, UpdateResult

RUN = "demo"
ONLY_RANK_0 = ("sealing", "published")
"""Points that the other rank does not come to."""
KILLS = [(rank, point) for point in POINTS for rank in (0, 1) if rank == 0 or point not in ONLY_RANK_0]


class Books:
    """A run's ledger as the control worker keeps it, and the requests that follow from it."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        folder.mkdir()
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        self.ledger.create_run(RUN, {"run": RUN}, "digest")
        self.store = store
        self.lineage = 0

    def produce(self, shards: Sequence[Shard]) -> None:
        """Complete groups, one by one."""
        ledger, samples = self.ledger, len(shards[0].sessions)
        ledger.set_admission(
            RUN, TRAIN, admit_until=len(shards), target_in_flight=samples * len(shards), samples_per_task=samples
        )
        for shard in shards:
            for claim, row in zip(ledger.claim_samples(RUN, TRAIN, "w", samples), shard.sessions, strict=True):
                ledger.put_session(SessionRecord(row.id, f"hash of {row.id}", RUN, claim.key, claim.attempt))
                ledger.finish_sample(
                    claim.key,
                    claim.attempt,
                    session=row.id,
                    prompt_tokens=1,
                    completion_tokens=1,
                    turns=1,
                    min_version=0,
                    max_version=0,
                    output=None,
                )
                ledger.score_sample(claim.key, claim.attempt, row.reward)
            data = encode(shard)
            key = key_for(RUN, shard.ordinal, digest_of(data))
            tokens = {row.id: 1 for row in shard.sessions}
            ledger.commit_group(RUN, TRAIN, shard.ordinal, key, self.store.put(key, data), tokens)

    def claim(self, step: int) -> UpdateRequest:
        """Claim one group for a step."""
        claim = self.ledger.claim_batch(
            RUN, self.lineage, step, 1, drop_zero_variance=True, min_version=0, take_partial=False
        )
        assert claim is not None
        ref = write_manifest(self.store, Manifest.of(claim, 1.0))
        self.ledger.set_manifest(RUN, self.lineage, step, ref.key, ref.digest)
        return self._request(step, ref.key, ref.digest)

    def rewind(self) -> UpdateRequest:
        """The gang is lost: the step that it had claimed, under a new lineage."""
        (lost,) = self.ledger.rewind(RUN, self.lineage)
        self.lineage += 1
        assert lost.manifest_key is not None
        assert lost.digest is not None
        return self._request(lost.step, lost.manifest_key, lost.digest)

    def commit(self, result: UpdateResult) -> None:
        self.ledger.commit_checkpoint(
            RUN,
            result.lineage,
            result.step,
            version=result.version,
            path=result.checkpoint_path,
            digest=result.checkpoint_digest,
            weights_path=result.weights_path,
            weights_digest=result.weights_digest,
            metrics={},
        )

    def checkpoint(self) -> Checkpoint | None:
        return self.ledger.latest_checkpoint(RUN)

    def _request(self, step: int, key: str, digest: str) -> UpdateRequest:
        return UpdateRequest(lineage=self.lineage, step=step, manifest_key=key, manifest_digest=digest, epoch=1)


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

    undisturbed = Books(tmp_path / "undisturbed books", object_store)
    undisturbed.produce(shards)
    async with gang("undisturbed", None) as ranks:
        await ranks.ready()
        for step in range(len(KILLS)):
            undisturbed.commit(await ranks.update(undisturbed.claim(step)))

    books = Books(tmp_path / "books", object_store)
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
    found = books.ledger.books(RUN)
    assert found.balanced
    assert (found.trained, found.filtered, found.failed, found.pending) == (3 * len(KILLS), {}, {}, {})
