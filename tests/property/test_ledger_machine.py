"""Whatever agents, rewards, steps, crashes and rewinds do in whatever order: the books balance (I2, I4, I5)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from postgres import PostgresServer

from storage.books.records import TERMINAL
from storage.errors import FencedError, NotFoundError
from storage.ledger import TRAIN, BatchClaim, Ledger, SampleClaim, SampleKey, SampleRow, State

RUN = "demo"
EVAL = "eval/0"
GROUP = 2
MAX_ATTEMPTS = 2
WORKERS = st.sampled_from(["w0", "w1"])
STREAMS = st.sampled_from([TRAIN, TRAIN, TRAIN, EVAL])


class LedgerMachine(RuleBasedStateMachine):
    """Rules are what processes do; claims stay in their bundle after use, so stale and repeated calls happen."""

    claims = Bundle("claims")
    batches = Bundle("batches")

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.ledger = Ledger(url)
        self.ended: dict[SampleKey, SampleRow] = {}
        self.step_of_session: dict[str, int] = {}
        self.lineage = 0
        self.steps = 0

    def teardown(self) -> None:
        self.ledger.close()

    @initialize(rounds=st.integers(0, 3))
    def create(self, rounds: int) -> None:
        self.ledger.create_run(RUN, {}, "digest")
        for stream in (TRAIN, EVAL):
            self.admit(stream, 2, 8, False)
        for _ in range(rounds):
            self.roll_out()

    @rule(stream=STREAMS, until=st.integers(0, 8), in_flight=st.integers(1, 8), paused=st.booleans())
    def admit(self, stream: str, until: int, in_flight: int, paused: bool) -> None:
        self.ledger.set_admission(
            RUN, stream, admit_until=until, target_in_flight=in_flight, samples_per_task=GROUP, paused=paused
        )

    @rule(target=claims, stream=STREAMS, worker=WORKERS, limit=st.integers(1, 6))
    def claim(self, stream: str, worker: str, limit: int) -> Any:
        claims = self.ledger.claim_samples(RUN, stream, worker, limit)
        running = self.ledger.samples(RUN, stream, state=State.RUNNING)
        assert not claims or len(running) <= self.ledger.admission(RUN, stream).target_in_flight
        return multiple(*claims)

    @rule(claim=claims)
    def finish(self, claim: SampleClaim) -> None:
        before = self.ledger.sample(claim.key)
        try:
            self.ledger.finish_sample(
                claim.key,
                claim.attempt,
                session=f"{claim.key}/{claim.attempt}",
                prompt_tokens=1,
                completion_tokens=1,
                turns=1,
                min_version=self.steps,
                max_version=self.steps,
                output=None,
            )
        except FencedError:
            assert self.ledger.sample(claim.key) == before
            assert (before.attempt, before.state) != (claim.attempt, State.RUNNING)
        else:
            assert before.attempt == claim.attempt

    @rule(claim=claims, reward=st.sampled_from([0.0, 1.0]))
    def score(self, claim: SampleClaim, reward: float) -> None:
        before = self.ledger.sample(claim.key)
        try:
            self.ledger.score_sample(claim.key, claim.attempt, reward)
        except FencedError:
            assert self.ledger.sample(claim.key) == before
            assert (before.attempt, before.state) != (claim.attempt, State.FINISHED)
        else:
            assert self.ledger.sample(claim.key).reward == reward

    @rule(claim=claims, retry=st.booleans())
    def fail(self, claim: SampleClaim, retry: bool) -> None:
        before = self.ledger.sample(claim.key)
        try:
            self.ledger.fail_sample(claim.key, claim.attempt, "infra", "", retry=retry, max_attempts=MAX_ATTEMPTS)
        except FencedError:
            assert self.ledger.sample(claim.key) == before

    @rule(stream=STREAMS, worker=WORKERS)
    def lose_worker(self, stream: str, worker: str) -> None:
        self.ledger.release_worker(RUN, stream, worker, max_attempts=MAX_ATTEMPTS)
        assert not [r for r in self.ledger.samples(RUN, stream, state=State.RUNNING) if r.worker == worker]

    @rule()
    def roll_out(self) -> None:
        """Two more groups all the way to their shards: without it few interleavings get as far as a step."""
        started = self.ledger.admission(RUN, TRAIN).produced
        self.admit(TRAIN, started // GROUP + 2, 8, False)
        self.ledger.claim_samples(RUN, TRAIN, "w0", 8)
        for row in self.ledger.samples(RUN, TRAIN, state=State.RUNNING):
            self.finish(SampleClaim(row.key, row.attempt))
        for claim in self.ledger.claim_scores(RUN, "judge", 100, lease_s=0):
            self.ledger.score_sample(claim.key, claim.attempt, float((claim.key.ordinal + claim.key.sample) % 3 == 0))
        self.write_shards()

    @rule()
    def write_shards(self) -> None:
        for group in self.ledger.complete_groups(RUN):
            if len(group.scored) < 2:
                self.ledger.filter_group(RUN, TRAIN, group.ordinal, "group_too_small")
                continue
            sessions = {str(row.session): 1 for row in group.scored}
            self.ledger.commit_group(RUN, TRAIN, group.ordinal, f"k{group.ordinal}", f"d{group.ordinal}", sessions)

    @rule(
        target=batches,
        groups=st.integers(1, 2),
        partial=st.booleans(),
        drop=st.booleans(),
        staleness=st.integers(0, 2),
        old_lineage=st.booleans(),
    )
    def claim_batch(self, groups: int, partial: bool, drop: bool, staleness: int, old_lineage: bool) -> Any:
        lineage = self.lineage - 1 if old_lineage else self.lineage
        arguments: dict[str, Any] = {
            "drop_zero_variance": drop,
            "take_partial": partial,
            "min_version": self.steps - staleness,
        }
        if lineage < self.lineage:
            with pytest.raises(FencedError):
                self.ledger.claim_batch(RUN, lineage, self.steps, groups, **arguments)
            return multiple()
        claim = self.ledger.claim_batch(RUN, lineage, self.steps, groups, **arguments)
        if claim is None:
            return multiple()
        assert self.ledger.claim_batch(RUN, lineage, self.steps, groups, **arguments) == claim
        self.steps += 1
        for group in claim.groups:
            for session in group.sessions:
                assert self.step_of_session.setdefault(session, claim.step) == claim.step
        return claim

    @rule(committed=st.booleans())
    def update(self, committed: bool) -> None:
        batch = self.claim_batch(groups=1, partial=True, drop=True, staleness=2, old_lineage=False)
        if committed and isinstance(batch, BatchClaim):
            self.commit_checkpoint(batch, in_its_lineage=True, leaves_out=False)

    @rule(batch=consumes(batches), in_its_lineage=st.booleans(), leaves_out=st.booleans())
    def commit_checkpoint(self, batch: BatchClaim, in_its_lineage: bool, leaves_out: bool) -> None:
        dropped = [group.sessions[0] for group in batch.groups] if leaves_out else []
        lineage = batch.lineage if in_its_lineage else self.lineage
        before = self.ledger.books(RUN).trained
        refs = {"path": "p", "digest": f"{batch.step}", "weights_path": "w", "weights_digest": "d"}
        try:
            self.ledger.commit_checkpoint(
                RUN, lineage, batch.step, version=batch.step + 1, metrics={}, dropped=dropped, **refs
            )
        except (FencedError, NotFoundError):
            assert self.ledger.books(RUN).trained == before

    @rule()
    def rewind(self) -> None:
        trained = self.ledger.books(RUN).trained
        lost = self.ledger.rewind(RUN, self.lineage)
        self.lineage += 1
        assert self.ledger.rewind(RUN, self.lineage - 1) == lost
        assert [entry.step for entry in lost] == sorted({entry.step for entry in lost})
        assert self.ledger.books(RUN).trained == trained

    @rule()
    def finish_evaluation(self) -> None:
        self.ledger.finish_evaluation(RUN, EVAL)

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.url)

    @invariant()
    def books_balance(self) -> None:
        if not self.ledger.runs():
            return
        books = self.ledger.books(RUN)
        assert books.problems == ()
        placed = books.trained + sum((*books.filtered.values(), *books.failed.values(), *books.pending.values()))
        assert books.produced == placed

    @invariant()
    def terminal_is_terminal(self) -> None:
        rows = [row for stream in (TRAIN, EVAL) for row in self.ledger.samples(RUN, stream)]
        for row in rows:
            if row.key in self.ended:
                assert row == self.ended[row.key]
            elif row.state in TERMINAL:
                self.ended[row.key] = row
            if row.state is State.TRAINED:
                assert self.step_of_session[str(row.session)] == row.step


SETTINGS = settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_the_books_balance_on_sqlite(tmp_path: Path) -> None:
    names = itertools.count()
    run_state_machine_as_test(lambda: LedgerMachine(f"sqlite:///{tmp_path}/{next(names)}.db"), settings=SETTINGS)


def test_the_books_balance_on_postgresql(postgres: PostgresServer) -> None:
    run_state_machine_as_test(lambda: LedgerMachine(postgres.database()), settings=SETTINGS)
