"""What the control worker finds in the ledger when a run is started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.ledger import LedgerActivities
from storage.ledger import TRAIN, Ledger, Route
from workers.cluster import StateFolder
from workflows.messages import AdmissionPause, AdmissionRate, EvaluationInput
from workflows.spec import RunSpec


class NoProxy:
    """Registers runs nowhere: the ledger has them already."""

    async def create_run(self, run: str, spec: Any, digest: str) -> None:
        assert run == "r"


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "held.jsonl").write_text('{"prompt": "1"}\n')
    return RunSpec.model_validate(
        {
            "run": "r",
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": "/d", "held_out": str(tmp_path / "held.jsonl")},
            "reward": {"target": "x:y"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
        }
    )


@pytest.fixture
def ledger(tmp_path: Path, spec: RunSpec) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.create_run("r", spec.model_dump(mode="json"), spec.digest())
    yield ledger
    ledger.close()


@pytest.fixture
def activities(tmp_path: Path, ledger: Ledger) -> LedgerActivities:
    return LedgerActivities(StateFolder(tmp_path), ledger, cast(Any, None), cast(Any, NoProxy()))


def score_one(ledger: Ledger, stream: str, reward: float) -> None:
    (claim,) = ledger.claim_samples("r", stream, "w", 1)
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "turns": 1, "min_version": 0, "max_version": 0}
    ledger.finish_sample(claim.key, claim.attempt, session=f"s-{stream}", output=None, **counts)
    ledger.score_sample(claim.key, claim.attempt, reward)


async def test_a_run_that_is_started_again_knows_the_evaluations_it_had(
    activities: LedgerActivities, ledger: Ledger, spec: RunSpec
) -> None:
    world = ActivityEnvironment()
    first = await world.run(activities.prepare_run, spec)
    assert (first.lineage, first.evaluations) == (0, ())
    await world.run(activities.open_evaluation, EvaluationInput(spec=spec, version=0))
    assert not ledger.claim_samples("r", "eval/0", "w", 1), "no engine has a route"
    ledger.put_route(Route("e", "r", "a", "http://a", "embedded", 1, 0, "open"))
    score_one(ledger, "eval/0", 0.25)
    outcome = await world.run(activities.wait_evaluation, EvaluationInput(spec=spec, version=0))
    await world.run(activities.open_evaluation, EvaluationInput(spec=spec, version=10))
    again = await world.run(activities.prepare_run, spec)
    assert (again.lineage, again.evaluations) == (1, (outcome,)), "the one of version 10 has not ended"


async def test_those_who_change_different_limits_of_a_stream_do_not_undo_each_other(
    activities: LedgerActivities, ledger: Ledger
) -> None:
    world = ActivityEnvironment()
    pause = AdmissionPause(run="r", stream=TRAIN, paused=True)
    await world.run(activities.pause_admission, pause)  # nothing was admitted yet: nothing to pause
    ledger.set_admission("r", TRAIN, admit_until=2, target_in_flight=16, samples_per_task=2)
    await world.run(activities.pause_admission, pause)
    await world.run(activities.set_rate, AdmissionRate(run="r", stream=TRAIN, target_in_flight=3))
    ledger.change_admission("r", TRAIN, admit_until=5)
    found = ledger.admission("r", TRAIN)
    assert (found.admit_until, found.target_in_flight, found.paused) == (5, 3, True)
