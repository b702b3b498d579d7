"""A run's ledger and object store, kept as the control worker keeps them, and the requests that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from storage.ledger import TRAIN, Checkpoint, Ledger, SessionRecord
from storage.manifests import Manifest, write_manifest
from storage.shards import Shard, digest_of, encode, key_for
from workers.trainer.messages import UpdateRequest, UpdateResult


class Store(Protocol):
    def put(self, key: str, data: bytes) -> str: ...


class Books:
    """See the module."""

    run = "demo"

    def __init__(self, file: Path, store: Store, spec: Mapping[str, Any] | None = None) -> None:
        self.ledger = Ledger(f"sqlite:///{file}")
        self.ledger.create_run(self.run, spec or {"run": self.run}, "digest")
        self.store = store
        self.lineage = 0

    def produce(self, shards: Sequence[Shard]) -> None:
        """Complete groups, one by one."""
        ledger, samples = self.ledger, len(shards[0].sessions)
        ledger.set_admission(
            self.run, TRAIN, admit_until=len(shards), target_in_flight=samples * len(shards), samples_per_task=samples
        )
        for shard in shards:
            for claim, row in zip(ledger.claim_samples(self.run, TRAIN, "w", samples), shard.sessions, strict=True):
                ledger.put_session(SessionRecord(row.id, f"hash of {row.id}", self.run, claim.key, claim.attempt))
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
            key = key_for(self.run, shard.ordinal, digest_of(data))
            tokens = {row.id: 1 for row in shard.sessions}
            ledger.commit_group(self.run, TRAIN, shard.ordinal, key, self.store.put(key, data), tokens)

    def claim(self, step: int) -> UpdateRequest:
        """Claim one group for a step."""
        claim = self.ledger.claim_batch(
            self.run, self.lineage, step, 1, drop_zero_variance=True, min_version=0, take_partial=False
        )
        assert claim is not None
        ref = write_manifest(self.store, Manifest.of(claim, 1.0))  # type: ignore[arg-type]  # it only puts
        self.ledger.set_manifest(self.run, self.lineage, step, ref.key, ref.digest)
        return self._request(step, ref.key, ref.digest)

    def rewind(self) -> UpdateRequest:
        """The gang is lost: the step that it had claimed, under a new lineage."""
        (lost,) = self.ledger.rewind(self.run, self.lineage)
        self.lineage += 1
        assert lost.manifest_key is not None
        assert lost.digest is not None
        return self._request(lost.step, lost.manifest_key, lost.digest)

    def commit(self, result: UpdateResult) -> None:
        self.ledger.commit_checkpoint(
            self.run,
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
        return self.ledger.latest_checkpoint(self.run)

    def _request(self, step: int, key: str, digest: str) -> UpdateRequest:
        return UpdateRequest(lineage=self.lineage, step=step, manifest_key=key, manifest_digest=digest, epoch=1)
