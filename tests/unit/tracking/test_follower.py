"""Trackers are told every figure of every run, in order, and can stop nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from storage.ledger import Ledger, SessionRecord
from workers.tracking import follower
from workers.tracking.follower import Follower
from workers.tracking.trackers import TensorBoard, TrackerKind
from workflows.spec import RunSpec

RUN = "demo"
SPEC = RunSpec.model_validate(
    {
        "run": RUN,
        "model": {"path": "/m"},
        "data": {"path": "/d", "held_out": "/h"},
        "reward": {"target": "m:f"},
        "nodes": [{"id": "n0", "tags": ["rollout", "train"]}],
        "evaluation": {"pass_at": [1], "pass_reward": 0.5},
    }
)


@dataclass
class Shown:
    """A tracker that keeps what it was told, and fails while ``broken``."""

    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    broken: bool = False
    closed: int = 0

    def log(self, figures: Mapping[str, float], *, step: int, at: float) -> None:
        if self.broken:
            raise ConnectionError("the tracker's server is away")
        self.steps.append((step, dict(figures)))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    opened.create_run(RUN, SPEC.model_dump(mode="json"), SPEC.digest())
    yield opened
    opened.close()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    tracker = Shown()
    monkeypatch.setattr(follower, "trackers_of", lambda spec: (TrackerKind("shown", lambda folder: tracker),))
    return tracker


@pytest.fixture
def trackers(ledger: Ledger, shown: Shown, tmp_path: Path) -> Iterator[Follower]:
    told = Follower(ledger, tmp_path / "tracking")
    yield told
    told.close()


def evaluate(ledger: Ledger, version: int, reward: float | None) -> None:
    """One held-out sample that ends with ``reward`` (None: it fails)."""
    stream = f"eval/{version}"
    ledger.set_admission(RUN, stream, admit_until=1, target_in_flight=1, samples_per_task=1)
    (claim,) = ledger.claim_samples(RUN, stream, "w", 1)
    ledger.put_session(SessionRecord(f"s{version}", f"hash{version}", RUN, claim.key, claim.attempt))
    if reward is None:
        ledger.fail_sample(claim.key, claim.attempt, "agent_error", "", retry=False, max_attempts=1)
        return
    ledger.finish_sample(
        claim.key,
        claim.attempt,
        session=f"s{version}",
        prompt_tokens=1,
        completion_tokens=1,
        turns=1,
        min_version=version,
        max_version=version,
        output=None,
    )
    ledger.score_sample(claim.key, claim.attempt, reward)


def test_every_step_is_told_once_in_the_order_it_was_made(ledger: Ledger, shown: Shown, trackers: Follower) -> None:
    ledger.record_step(RUN, 0, 0, {"loss": 0.5})
    trackers.look()
    ledger.record_step(RUN, 0, 1, {"loss": 0.25, "groups": 4})
    trackers.look()
    trackers.look()
    assert shown.steps == [(0, {"train/loss": 0.5}), (1, {"train/loss": 0.25, "train/groups": 4.0})]


def test_a_step_that_is_made_again_after_a_rewind_is_told_again(
    ledger: Ledger, shown: Shown, trackers: Follower
) -> None:
    for lineage, loss in ((0, 0.5), (1, 0.75)):
        ledger.record_step(RUN, lineage, 0, {"loss": loss})
        trackers.look()
    assert [figures["train/loss"] for _, figures in shown.steps] == [0.5, 0.75]


def test_a_process_that_starts_again_goes_on_where_the_last_one_was(
    ledger: Ledger, shown: Shown, tmp_path: Path
) -> None:
    for step in range(3):
        ledger.record_step(RUN, 0, step, {"loss": float(step)})
        trackers = Follower(ledger, tmp_path / "tracking")
        trackers.look()
        trackers.close()
    assert [step for step, _ in shown.steps] == [0, 1, 2]


def test_an_evaluation_is_told_with_its_weight_version_once_all_its_samples_ended(
    ledger: Ledger, shown: Shown, trackers: Follower
) -> None:
    ledger.set_admission(RUN, "eval/3", admit_until=1, target_in_flight=1, samples_per_task=1)
    trackers.look()
    assert shown.steps == []
    evaluate(ledger, 3, 0.5)
    evaluate(ledger, 4, None)
    trackers.look()
    trackers.look()
    assert shown.steps == [
        (3, {"eval/reward_mean": 0.5, "eval/samples": 1.0, "eval/failed": 0.0, "eval/pass_at_1": 1.0}),
        (4, {"eval/samples": 0.0, "eval/failed": 1.0}),  # no reward is no mean of 0
    ]


def test_a_tracker_that_fails_is_told_everything_later(
    ledger: Ledger, shown: Shown, trackers: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    shown.broken = True
    for step in range(2):
        ledger.record_step(RUN, 0, step, {"loss": float(step)})
        trackers.look()
    assert caplog.text.count("the tracker's server is away") == 1
    shown.broken = False
    trackers.look()
    assert [step for step, _ in shown.steps] == [0, 1]


def test_a_run_that_has_ended_is_closed_and_opened_again_if_it_goes_on(
    ledger: Ledger, shown: Shown, trackers: Follower
) -> None:
    ledger.record_step(RUN, 0, 0, {"loss": 0.0})
    ledger.set_run_state(RUN, "finished", stopped=True)
    trackers.look()
    assert shown.closed == 1
    ledger.set_run_state(RUN, "running")
    ledger.record_step(RUN, 0, 1, {"loss": 1.0})
    trackers.look()
    assert [step for step, _ in shown.steps] == [0, 1]


def test_of_two_control_workers_one_tells(ledger: Ledger, shown: Shown, tmp_path: Path) -> None:
    first, second = (Follower(ledger, tmp_path / "tracking") for _ in range(2))
    ledger.record_step(RUN, 0, 0, {"loss": 0.0})
    first.look()
    ledger.record_step(RUN, 0, 1, {"loss": 1.0})
    second.look()
    assert len(shown.steps) == 1
    first.close()
    second.look()
    second.close()
    assert [step for step, _ in shown.steps] == [0, 1]


def test_a_run_whose_record_cannot_be_read_stops_no_control_worker(
    ledger: Ledger, trackers: Follower, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tracking" / RUN / "shown").mkdir(parents=True)
    (tmp_path / "tracking" / RUN / "shown" / "position.json").write_text("{")
    ledger.record_step(RUN, 0, 0, {"loss": 0.0})
    trackers.look()
    assert "trackers are told later" in caplog.text


def test_tensorboard_reads_what_was_told(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for step in range(3):
        board.log({"train/loss": 1.0 / 2**step}, step=step, at=1000.0 + step)
    board.close()
    told = [(e.wall_time, e.step, v.tag, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert told == [(1000.0 + step, step, "train/loss", 1.0 / 2**step) for step in range(3)]


def events(folder: Path) -> Iterator[Event]:
    """Records of the event files: length u64, its CRC u32, the event, its CRC u32."""
    for path in sorted(folder.glob("events.out.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_the_default_is_tensorboard_alone() -> None:
    assert [kind.name for kind in follower.trackers_of(SPEC)] == ["tensorboard"]
