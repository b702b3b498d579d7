"""How a step waits for its batch: a poll of the ledger with three ways to end."""

from __future__ import annotations

import asyncio
import time

from temporalio.exceptions import ApplicationError

from storage.ledger import TRAIN, BatchClaim, Failure, Ledger, State
from workflows.messages import ClaimInput
from workflows.scheduling import pipeline

POLL_S = 0.05
TIDY_S = 1.0
"""How often stale groups are dropped and ended groups are replaced while a step waits."""
HOPELESS_BATCHES = 4
"""A step gives up when so many batches' worth of groups ended and none is left that can be trained."""
LONGEST_REASON = 300


class ClaimWait:
    """Waits for the batch of one step.

    It is claimed when enough groups are complete; after ``batch_time_limit_s``
    with what is complete; and it fails with ``NoUsableGroups`` when nothing is
    on its way any more or group after group fails.

    ``since``: unix seconds when the step began to wait.
    """

    def __init__(self, ledger: Ledger, task: ClaimInput, since: float) -> None:
        self._ledger = ledger
        self._task = task
        self._policy = pipeline.policy_of(task.spec)
        self._since = since
        self._tidied = 0.0
        self._ended_before: int | None = None

    @property
    def waited_s(self) -> float:
        return max(0.0, time.time() - self._since)

    async def wait(self) -> BatchClaim:
        """Poll until the batch is claimed; the caller bounds it by cancelling."""
        while True:
            claim = await asyncio.to_thread(self._look)
            if claim is not None:
                return claim
            await asyncio.sleep(POLL_S)

    def _look(self) -> BatchClaim | None:
        spec, now = self._task.spec, time.monotonic()
        late = self.waited_s > spec.pipeline.batch_time_limit_s
        ready = self._ledger.ready_groups(spec.run, min_version=self._policy.min_version(self._task.step))
        tidy = now - self._tidied > TIDY_S
        if not tidy and ready < (1 if late else self._policy.groups_per_step):
            return None
        claim = self._ledger.claim_batch(
            spec.run,
            self._task.lineage,
            self._task.step,
            self._policy.groups_per_step,
            drop_zero_variance=spec.algorithm.drops_zero_variance,
            min_version=self._policy.min_version(self._task.step),
            take_partial=late,
        )
        if claim is None and tidy:
            self._tidied = now
            self._replace_ended(late)
        return claim

    def _replace_ended(self, late: bool) -> None:
        """Admit one more task for each group that ended without entering a batch."""
        run = self._task.spec.run
        ended = self._ledger.ended_groups(run)
        before = self._ended_before = ended if self._ended_before is None else self._ended_before
        if ended - before > HOPELESS_BATCHES * self._policy.groups_per_step and not self._ledger.ready_groups(run):
            raise self._hopeless(f"{ended - before} groups in a row ended and none can be trained")
        wanted = self._policy.admit_until(self._task.step, ended=ended)
        now = self._ledger.admission(run, TRAIN)
        if now.admit_until < wanted:
            self._ledger.change_admission(run, TRAIN, admit_until=wanted)
        elif late and not self._ledger.ready_groups(run) and not self._on_the_way(run):
            raise self._hopeless("the time limit has passed and nothing is running: is the data at its end?")

    def _on_the_way(self, run: str) -> int:
        pending = self._ledger.books(run, TRAIN).pending
        return sum(n for state, n in pending.items() if state != State.CLAIMED)

    def _hopeless(self, why: str) -> ApplicationError:
        books = self._ledger.books(self._task.spec.run, TRAIN)
        causes = {**books.failed, **books.filtered}
        failures = self._ledger.failures(self._task.spec.run, TRAIN)
        last = f"; {_what_happened(failures[0])}" if failures else ""
        return ApplicationError(
            f"step {self._task.step} of run {self._task.spec.run} has no groups to train on: {why}; "
            f"samples that ended so far, by cause: {causes or 'none'}{last}",
            type="NoUsableGroups",
            non_retryable=True,
        )


def _what_happened(failure: Failure) -> str:
    """One line: this text goes into Temporal's history, where no traceback and no prompt belongs."""
    line = failure.detail.rstrip().rpartition("\n")[2][:LONGEST_REASON]
    run = failure.key.run
    return f"the last {failure.cause}, of {failure.key}: {line} (`seamlessflow status {run}` shows all of it)"
