"""How a step waits for its batch, on a real ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.claiming import ClaimWait
from activities.parts import next_part
from storage.ledger import TRAIN, Ledger, SampleClaim
from workflows.messages import ClaimInput, PartInput
from workflows.spec import RunSpec

DIGEST = "0" * 64


def spec(**pipeline: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "r",
            "model": {"path": "/m"},
            "data": {"path": "/d"},
            "reward": {"target": "x:y"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
            "algorithm": {"group_size": 2, "groups_per_step": 2},
            "pipeline": {"steps": 5, "max_staleness": 0, **pipeline},
        }
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.create_run("r", {}, "digest")
    ledger.set_admission("r", TRAIN, admit_until=2, target_in_flight=16, samples_per_task=2)
    yield ledger
    ledger.close()


def roll_out(ledger: Ledger, *, version: int = 0, limit: int = 100) -> list[int]:
    """Run what is admitted: groups with rewards 0 and 1. Returns their ordinals."""
    ordinals = set()
    for claim in ledger.claim_samples("r", TRAIN, "w", limit):
        finish(ledger, claim, version)
        ordinals.add(claim.key.ordinal)
    for group in ledger.complete_groups("r"):
        tokens = {row.session: 1 for row in group.scored if row.session}
        ledger.commit_group("r", TRAIN, group.ordinal, f"k{group.ordinal}", DIGEST, tokens)
    return sorted(ordinals)


def finish(ledger: Ledger, claim: SampleClaim, version: int) -> None:
    ledger.finish_sample(
        claim.key,
        claim.attempt,
        session=f"s{claim.key.ordinal}.{claim.key.sample}",
        prompt_tokens=1,
        completion_tokens=1,
        turns=1,
        min_version=version,
        max_version=version,
        output=None,
    )
    ledger.score_sample(claim.key, claim.attempt, float(claim.key.sample))


def fail_everything(ledger: Ledger) -> None:
    for claim in ledger.claim_samples("r", TRAIN, "w", 100):
        detail = f"Traceback of the user's code\n  in line 7\nKeyError: 'tool'{'!' * 1000}"
        ledger.fail_sample(claim.key, claim.attempt, "agent_error", detail, retry=False, max_attempts=1)


def wait(
    ledger: Ledger,
    run: RunSpec,
    *,
    step: int = 0,
    since: float | None = None,
    data_end: int | None = None,
    cost_s: float | None = None,
) -> ClaimWait:
    task = ClaimInput(spec=run, lineage=0, step=step, version=step, cost_s=cost_s)
    return ClaimWait(ledger, task, time.time() if since is None else since, data_end)


async def test_a_batch_is_claimed_as_soon_as_enough_groups_are_complete(ledger: Ledger) -> None:
    waiting = asyncio.create_task(wait(ledger, spec()).wait())
    await asyncio.to_thread(roll_out, ledger, limit=2)
    assert not waiting.done()
    await asyncio.to_thread(roll_out, ledger)
    found = await asyncio.wait_for(waiting, 10)
    assert [group.ordinal for group in found.batch.groups] == [0, 1]


async def test_groups_that_are_accumulated_already_go_into_the_batch_before_older_ones(ledger: Ledger) -> None:
    ledger.change_admission("r", TRAIN, admit_until=4)
    roll_out(ledger)
    ahead = await next_part(ledger, PartInput(spec=spec(), lineage=0, step=0, done=(3,), least=1))
    assert [group.ordinal for group in ahead.groups] == [0], "one more makes the batch, and the run selects it"
    task = ClaimInput(spec=spec(), lineage=0, step=0, version=0, prefer=(3,))
    found = await asyncio.wait_for(ClaimWait(ledger, task, time.time()).wait(), 10)
    assert sorted(group.ordinal for group in found.batch.groups) == [0, 3]


async def test_after_the_time_limit_a_step_takes_what_is_complete(ledger: Ledger) -> None:
    roll_out(ledger, limit=2)
    found = await asyncio.wait_for(wait(ledger, spec(batch_time_limit_s=5), since=time.time() - 60).wait(), 10)
    assert [group.ordinal for group in found.batch.groups] == [0]


async def test_groups_that_fail_or_grow_too_old_are_replaced_by_others(ledger: Ledger) -> None:
    roll_out(ledger, version=0)
    waiting = asyncio.create_task(wait(ledger, spec(), step=1).wait())
    while ledger.admission("r", TRAIN).admit_until < 6:  # noqa: ASYNC110 - the ledger is another thread's
        await asyncio.sleep(0.02)
    assert ledger.books("r").filtered == {"stale": 4}
    assert roll_out(ledger, version=1) == [2, 3, 4, 5]
    found = await asyncio.wait_for(waiting, 10)
    assert [group.ordinal for group in found.batch.groups] == [2, 3]


async def test_a_step_whose_groups_all_fail_gives_up_and_names_the_causes_and_the_last_error(ledger: Ledger) -> None:
    waiting = asyncio.create_task(wait(ledger, spec()).wait())
    while not waiting.done():
        await asyncio.to_thread(fail_everything, ledger)
        await asyncio.sleep(0.05)
    with pytest.raises(ApplicationError, match="agent_error") as failure:
        await waiting
    assert failure.value.type == "NoUsableGroups"
    said = failure.value.message
    assert "the last agent_error, of r/train/" in said
    assert "KeyError: 'tool'" in said
    assert "Traceback" not in said, "Temporal keeps it: traces stay in the ledger"
    assert len(said) < 800
    assert ledger.books("r").balanced


async def test_a_step_gives_up_when_the_data_has_ended_and_nothing_is_on_its_way(ledger: Ledger) -> None:
    with pytest.raises(ApplicationError, match="nothing is running"):
        await asyncio.wait_for(wait(ledger, spec(batch_time_limit_s=5), since=time.time() - 60).wait(), 10)


async def test_at_the_end_of_the_data_a_step_takes_what_is_left_and_the_next_one_says_so(ledger: Ledger) -> None:
    roll_out(ledger, limit=2)
    ledger.change_admission("r", TRAIN, admit_until=1)
    found = await asyncio.wait_for(wait(ledger, spec(), data_end=1).wait(), 10)
    assert [group.ordinal for group in found.batch.groups] == [0]
    assert found.why.why == "the data has ended: 1 groups are left"
    with pytest.raises(ApplicationError, match="the data has ended after 1 tasks") as failure:
        await asyncio.wait_for(wait(ledger, spec(), step=1, data_end=1).wait(), 10)
    assert failure.value.type == "EndOfData"


async def test_a_restarted_wait_finds_the_batch_that_was_claimed_before(ledger: Ledger) -> None:
    roll_out(ledger)
    first = await asyncio.wait_for(wait(ledger, spec()).wait(), 10)
    again = await asyncio.wait_for(wait(ledger, spec()).wait(), 10)
    assert again.batch == first.batch


async def test_a_batch_is_put_off_while_one_change_of_roles_for_two_updates_pays(ledger: Ledger) -> None:
    ledger.change_admission("r", TRAIN, admit_until=40)
    roll_out(ledger, limit=4)
    rule = spec(max_staleness=20)
    waiting = asyncio.create_task(wait(ledger, rule, cost_s=1000.0).wait())
    await asyncio.sleep(0.3)
    assert not waiting.done(), "much may still roll out, and a change costs much"
    roll_out(ledger, limit=4)
    found = await asyncio.wait_for(waiting, 10)
    assert found.switch is not None
    assert [group.ordinal for group in found.batch.groups] == [0, 1]


async def test_a_batch_is_taken_at_once_when_a_change_costs_next_to_nothing(ledger: Ledger) -> None:
    roll_out(ledger)
    found = await asyncio.wait_for(wait(ledger, spec(), cost_s=0.001).wait(), 10)
    assert found.switch is not None
    assert found.switch.what == "switch"


async def test_a_claim_tells_how_it_differs_from_what_is_left_behind(ledger: Ledger) -> None:
    ledger.change_admission("r", TRAIN, admit_until=6)
    roll_out(ledger, limit=8)
    ledger.claim_samples("r", TRAIN, "w", 2)
    found = await asyncio.wait_for(wait(ledger, spec()).wait(), 10)
    assert (found.pending, found.length_bias) == (2, 0.0)
    assert found.age_bias == 0.5 - 3.0, "groups 0 and 1 were taken; 2, 3 and the running 4 are left"
