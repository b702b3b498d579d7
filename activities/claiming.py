"""How a step waits for its batch: a poll of the ledger with four ways to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from temporalio.exceptions import ApplicationError

from activities.layers import policy_for, selection_for
from storage.ledger import TRAIN, BatchClaim, Failure, Flow, Ledger, State, WaitingGroup
from workflows.messages import ClaimInput
from workflows.scheduling.decision import Decision
from workflows.scheduling.selection import preferring
from workflows.scheduling.switching import STAY, GroupFlow, gain_of_taking, seconds_to_next_batch, worth_switching
from workflows.scheduling.triggers import UPDATE, RolloutFacts

POLL_S, SLOW_POLL_S = 0.05, 0.5
POLL_SHARE = 0.01
"""Part of what a step has waited that passes until it looks again: a long wait need not be noticed as fast."""
TIDY_S = 1.0
"""How often stale groups are dropped and ended groups are replaced while a step waits."""
HOPELESS_BATCHES = 4
"""A step gives up when so many batches' worth of groups ended and none is left that can be trained."""
LONGEST_REASON = 300
END_OF_DATA = "EndOfData"


class Claimed(NamedTuple):
    """A claimed batch: what triggered it, why it was not put off, and what was on its way then."""

    batch: BatchClaim
    why: Decision
    switch: Decision | None
    pending: int
    length_bias: float | None
    age_bias: float | None


class ClaimWait:
    """Waits for the batch of one step.

    It is claimed when the pipeline's policy says so: enough groups are complete, or ``batch_time_limit_s`` has passed;
    at the end of the data with what is complete. Taking nodes from rollout for it may be put off while that pays. It
    fails with ``NoUsableGroups`` when group after group fails, and with ``EndOfData`` when nothing is left to train.

    ``since``: unix seconds when the step began to wait. ``data_end``: tasks there are, None: without end.
    """

    def __init__(self, ledger: Ledger, task: ClaimInput, since: float, data_end: int | None = None) -> None:
        self._ledger = ledger
        self._task = task
        self._policy = policy_for(task.spec)
        self._select = preferring(task.prefer, selection_for(task.spec))
        self._oldest = self._policy.min_version(task.step)
        self._since = since
        self._data_end = data_end
        self._tidied = 0.0
        self._ended_before: int | None = None

    @property
    def waited_s(self) -> float:
        return max(0.0, time.time() - self._since)

    async def wait(self) -> Claimed:
        """Poll until the batch is claimed; the caller bounds it by cancelling."""
        while True:
            claim = await asyncio.to_thread(self._look)
            if claim is not None:
                return claim
            await asyncio.sleep(pause_s(self.waited_s))

    def _look(self) -> Claimed | None:
        now = time.monotonic()
        ready = self._ledger.ready_groups(self._task.spec.run, min_version=self._oldest)
        tidy = now - self._tidied > TIDY_S
        why = self._trigger(ready)
        if why is None and not tidy:
            return None
        if self._data_end is None and self._task.spec.data.source is not None:
            self._data_end = self._ledger.data_end(self._task.spec.run)
        flow = self._ledger.flow(self._task.spec.run, min_version=self._oldest)
        why = why or self._last_batch(flow)
        switch = self._put_off(flow) if why is not None else None
        claim = None
        if switch is None or switch.what != STAY:
            pending = self._pending()
            claim = self._claim(partial=why is not None and ready < self._policy.groups_per_step)
        if claim is not None:
            why = why or Decision(what=UPDATE, why="an earlier attempt has claimed the batch")
            return Claimed(claim, why, switch, pending, *self._biases(claim))
        if tidy:
            self._tidied = now
            self._replace_ended()
        return None

    def _trigger(self, ready: int) -> Decision | None:
        facts = RolloutFacts(
            ready=ready,
            wanted=self._policy.groups_per_step,
            waited_s=self.waited_s,
            time_limit_s=self._task.spec.pipeline.batch_time_limit_s,
        )
        decision = self._policy.interrupt(facts)
        return decision if decision is not None and decision.what == UPDATE else None

    def _last_batch(self, flow: Flow) -> Decision | None:
        if self._data_end is not None and not flow.supply and flow.ready:
            return Decision(what=UPDATE, why=f"the data has ended: {flow.ready} groups are left")
        return None

    def _put_off(self, flow: Flow) -> Decision | None:
        """Whether to take the train nodes for this batch now, or with the next one; None: they are not taken."""
        cost = self._task.cost_s
        if cost is None:
            return None
        if self.waited_s > self._task.spec.pipeline.batch_time_limit_s:
            return worth_switching(float("inf"), cost, what_for="training after the time limit")
        groups = GroupFlow(flow.ready, self._policy.groups_per_step, flow.supply, flow.in_flight, flow.rate)
        later = GroupFlow(flow.ready, 2 * groups.wanted, flow.supply, flow.in_flight, flow.rate)
        expected = seconds_to_next_batch(later)
        return worth_switching(gain_of_taking(groups), cost, what_for="training now", batch_s=expected)

    def _claim(self, *, partial: bool) -> BatchClaim | None:
        """Claim what the trigger found; without one only stale groups are dropped."""
        spec = self._task.spec
        return self._ledger.claim_batch(
            spec.run,
            self._task.lineage,
            self._task.step,
            self._policy.groups_per_step,
            drop_zero_variance=spec.algorithm.drops_zero_variance,
            min_version=self._oldest,
            take_partial=partial,
            select=self._select,
            refill=spec.pipeline.refill,
        )

    def _biases(self, claim: BatchClaim) -> tuple[float | None, float | None]:
        """Of the chosen groups against those that are left: mean tokens a group, and mean place in the data.

        Above 0: the chosen ones are longer, and were started later.
        """
        left = self._ledger.waiting_groups(claim.run)
        behind = [*self._ledger.ordinals_under_way(claim.run), *(group.ordinal for group in left)]
        chosen = [group.ordinal for group in claim.groups]
        age = fmean(chosen) - fmean(behind) if chosen and behind else None
        return self._length_bias(chosen, left), age

    def _length_bias(self, chosen: Sequence[int], left: Sequence[WaitingGroup]) -> float | None:
        mine = {ordinal: 0 for ordinal in chosen}
        for row in self._ledger.samples(self._task.spec.run, TRAIN, state=State.CLAIMED):
            if row.key.ordinal in mine:
                mine[row.key.ordinal] += row.tokens or 0
        return fmean(mine.values()) - fmean(group.tokens for group in left) if mine and left else None

    def _replace_ended(self) -> None:
        """Admit one more task for each group that ended without entering a batch."""
        run = self._task.spec.run
        ended = self._ledger.ended_groups(run, refill=self._task.spec.pipeline.refill)
        before = self._ended_before = ended if self._ended_before is None else self._ended_before
        if ended - before > HOPELESS_BATCHES * self._policy.groups_per_step and not self._ledger.ready_groups(run):
            raise self._hopeless(f"{ended - before} groups in a row ended and none can be trained")
        wanted = self._policy.admit_until(self._task.step, ended=ended)
        wanted = wanted if self._data_end is None else min(wanted, self._data_end)
        now = self._ledger.admission(run, TRAIN)
        late = self.waited_s > self._task.spec.pipeline.batch_time_limit_s
        if now.admit_until < wanted:
            self._ledger.change_admission(run, TRAIN, admit_until=wanted)
        elif not self._ledger.ready_groups(run) and not self._pending():
            if self._data_end is not None and now.produced >= self._data_end * now.samples_per_task:
                raise self._hopeless(f"the data has ended after {self._data_end} tasks", kind=END_OF_DATA)
            if late:
                raise self._hopeless("the time limit has passed and nothing is running")

    def _pending(self) -> int:
        """Samples that no step has claimed and that have not ended."""
        pending = self._ledger.books(self._task.spec.run, TRAIN).pending
        return sum(n for state, n in pending.items() if state not in (State.CLAIMED, State.GROUPED))

    def _hopeless(self, why: str, *, kind: str = "NoUsableGroups") -> ApplicationError:
        books = self._ledger.books(self._task.spec.run, TRAIN)
        causes = {**books.failed, **books.filtered}
        failures = self._ledger.failures(self._task.spec.run, TRAIN)
        last = f"; {_what_happened(failures[0])}" if failures else ""
        return ApplicationError(
            f"step {self._task.step} of run {self._task.spec.run} has no groups to train on: {why}; "
            f"samples that ended so far, by cause: {causes or 'none'}{last}",
            type=kind,
            non_retryable=True,
        )


def pause_s(waited_s: float) -> float:
    """Until the ledger is looked at again.

    >>> pause_s(1), pause_s(20), pause_s(3600)
    (0.05, 0.2, 0.5)
    """
    return min(SLOW_POLL_S, max(POLL_S, POLL_SHARE * waited_s))


def _what_happened(failure: Failure) -> str:
    """One line: this text goes into Temporal's history, where no traceback and no prompt belongs."""
    line = failure.detail.rstrip().rpartition("\n")[2][:LONGEST_REASON]
    run = failure.key.run
    return f"the last {failure.cause}, of {failure.key}: {line} (`seamlessflow status {run}` shows all of it)"
