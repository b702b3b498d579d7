"""A ledger with one run, on each kind of database, and a player that moves samples through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from postgres import PostgresServer

from storage.ledger import TRAIN, BatchClaim, Ledger, SampleClaim, SessionRecord

RUN = "demo"


class Player:
    """Plays agents, rewards and shard writer on a ledger, with as few words as a test needs."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def admit(self, until: int, *, in_flight: int = 1000, per_task: int = 2, stream: str = TRAIN) -> None:
        self.ledger.set_admission(RUN, stream, admit_until=until, target_in_flight=in_flight, samples_per_task=per_task)

    def claim(self, limit: int = 1000, *, worker: str = "w", stream: str = TRAIN) -> list[SampleClaim]:
        claims = self.ledger.claim_samples(RUN, stream, worker, limit)
        self.ledger.put_session(
            *(SessionRecord(session(c), f"hash-{session(c)}", RUN, c.key, c.attempt) for c in claims)
        )
        return claims

    def finish(self, claim: SampleClaim, *, version: int | None = 0) -> None:
        self.ledger.finish_sample(
            claim.key,
            claim.attempt,
            session=session(claim),
            prompt_tokens=10,
            completion_tokens=5,
            turns=2,
            min_version=version,
            max_version=version,
            output={"answer": claim.key.sample},
        )

    def score(self, claim: SampleClaim, reward: float, *, version: int | None = 0) -> None:
        self.finish(claim, version=version)
        self.ledger.score_sample(claim.key, claim.attempt, reward)

    def group(self, rewards: Sequence[float], *, version: int | None = 0) -> int:
        """One complete group with a shard, whose samples have these rewards; returns its ordinal."""
        claims = self.claim(len(rewards))
        assert len({claim.key.ordinal for claim in claims}) == 1
        for claim, reward in zip(claims, rewards, strict=True):
            self.score(claim, reward, version=version)
        ordinal = claims[0].key.ordinal
        self.ledger.commit_group(
            RUN, TRAIN, ordinal, f"shard-{ordinal}", f"sha-{ordinal}", {session(claim): 5 for claim in claims}
        )
        return ordinal

    def batch(
        self,
        step: int,
        groups: int,
        *,
        lineage: int = 0,
        min_version: int = 0,
        drop: bool = True,
        partial: bool = False,
    ) -> BatchClaim | None:
        return self.ledger.claim_batch(
            RUN, lineage, step, groups, drop_zero_variance=drop, min_version=min_version, take_partial=partial
        )

    def checkpoint(
        self,
        step: int,
        *,
        lineage: int = 0,
        digest: str = "checkpoint",
        dropped: Sequence[str] = (),
        critic: str | None = None,
    ) -> None:
        self.ledger.commit_checkpoint(
            RUN,
            lineage,
            step,
            version=step + 1,
            path=f"checkpoints/{step}",
            digest=digest,
            weights_path=f"weights/{step + 1}",
            weights_digest="weights",
            metrics={"loss": 0.5},
            dropped=dropped,
            critic_path=critic and f"checkpoints/critic/{lineage}.{step}",
            critic_digest=critic,
        )


def session(claim: SampleClaim) -> str:
    return f"s-{claim.key.stream}-{claim.key.ordinal}-{claim.key.sample}-{claim.attempt}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/test.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.database()
    yield url
    server.drop(url)


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    ledger = Ledger(database_url)
    ledger.create_run(RUN, {"run": RUN}, "digest")
    yield ledger
    ledger.close()


@pytest.fixture
def player(ledger: Ledger) -> Player:
    return Player(ledger)
