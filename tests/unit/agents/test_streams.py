"""The streaming loader: it keeps agents fed, reports each sample once, and leaves nothing running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from children import started
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.streams import RewardStream, Stream, StreamActivities, TaskStream
from proxy.client import ClaimedSample, ClaimedScore, ControlClient
from storage.errors import DeadlineError, FencedError
from workers.agents.data import TaskSource
from workers.agents.outcome import Outcome
from workflows.messages import StreamInput
from workflows.spec import RunSpec

GIVEN = StreamInput(run="r", stream="train", worker_slot="slot-0")


@dataclass
class FakeControl:
    """The part of the control API that the streams use, over a list of samples."""

    spec: RunSpec
    samples: int = 0
    in_flight: int = 4
    scores: list[ClaimedScore] = field(default_factory=list)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    refuse: Exception | None = None
    most: int = 0
    claimed: int = 0

    async def run_status(self, run: str) -> dict[str, Any]:
        return {"spec": self.spec.model_dump(mode="json")}

    async def release_worker(self, run: str, stream: str, worker: str) -> None:
        self.log.append(("release", stream, worker, len(self.running)))
        self.running.clear()

    async def claim_samples(
        self, run: str, stream: str, worker: str, limit: int, *, holding: Iterable[str]
    ) -> list[ClaimedSample]:
        count = min(limit, self.in_flight - len(self.running), self.samples - self.claimed)
        names = [f"s{n}" for n in range(self.claimed, self.claimed + count)]
        self.claimed += count
        self.running |= set(names)
        self.most = max(self.most, len(self.running))
        return [ClaimedSample(int(n[1:]), 0, 0, n, f"key-{n}", "http://127.0.0.1:9/v1", "policy") for n in names]

    async def finish_sample(self, run: str, session: str, output: Any) -> str:
        return self._report(session, "finished", output)

    async def fail_sample(self, run: str, session: str, cause: str, detail: str, *, retry: bool) -> str:
        return self._report(session, cause, retry)

    async def claim_scores(self, run: str, worker: str, limit: int) -> list[ClaimedScore]:
        now, self.scores = self.scores[:limit], self.scores[limit:]
        return now

    async def commit_score(self, run: str, session: str, reward: float) -> None:
        self._report(session, "reward", reward)

    async def fail_score(self, run: str, session: str, cause: str, detail: str) -> None:
        self._report(session, cause, None)

    def _report(self, session: str, what: str, value: Any) -> str:
        self.running.discard(session)
        self.log.append((session, what, value))
        if self.refuse is not None:
            raise self.refuse
        return what

    def reports(self) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] != "release"]


class FakeRunner:
    """Gives each job what ``outcome`` makes of its payload; None hangs. Counts what runs."""

    def __init__(self, outcome: Callable[[str, dict[str, Any]], Outcome | None]) -> None:
        self._outcome = outcome
        self.payloads: dict[str, dict[str, Any]] = {}
        self.closed = False

    async def run(self, job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        self.payloads[job] = payload
        outcome = self._outcome(job, payload)
        if outcome is None:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)
        return cast(Outcome, outcome)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    return RunSpec.model_validate(
        {
            "run": "r",
            "code": str(tmp_path),
            "model": {"path": "/m"},
            "data": {"path": str(tmp_path / "tasks.jsonl"), "shuffle": False},
            "agent": {"kind": "python", "target": "mine:work"},
            "reward": {"target": "mine:reward"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
        }
    )


def task_stream(control: FakeControl, runner: FakeRunner) -> TaskStream:
    source = TaskSource(Path(control.spec.data.path), epochs=None)
    return TaskStream(cast(ControlClient, control), runner, source, control.spec, GIVEN)


def reward_stream(control: FakeControl, runner: FakeRunner) -> RewardStream:
    return RewardStream(cast(ControlClient, control), runner, control.spec, GIVEN)


async def run_until(stream: Stream, true: Callable[[], bool]) -> None:
    """Run the stream until something is so, then cancel it, as its activity is cancelled."""
    task = asyncio.create_task(stream.run())
    async with asyncio.timeout(20):
        while not true() and not task.done():  # noqa: ASYNC110 (the fake sets no event)
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_every_sample_runs_once_with_its_own_task_and_key(spec: RunSpec) -> None:
    control = FakeControl(spec, samples=12)
    runner = FakeRunner(lambda job, payload: Outcome("ok", job.upper()))
    await run_until(task_stream(control, runner), lambda: len(control.reports()) == 12)
    assert sorted(control.reports()) == sorted((f"s{n}", "finished", f"S{n}") for n in range(12))
    assert runner.payloads["s7"] == {
        "task": {"n": 2},
        "llm": {"base_url": "http://127.0.0.1:9/v1", "api_key": "key-s7", "model": "policy"},
    }


async def test_the_next_sample_starts_when_one_ends_and_does_not_wait_for_the_others(spec: RunSpec) -> None:
    control = FakeControl(spec, samples=30, in_flight=3)
    runner = FakeRunner(lambda job, payload: None if job == "s0" else Outcome("ok"))
    await run_until(task_stream(control, runner), lambda: len(control.reports()) == 29)
    assert control.most == 3
    assert "s0" not in {report[0] for report in control.reports()}


async def test_the_slot_is_cleared_before_the_first_claim_and_at_the_end(spec: RunSpec) -> None:
    control = FakeControl(spec, samples=5)
    runner = FakeRunner(lambda job, payload: None)
    await run_until(task_stream(control, runner), lambda: len(runner.payloads) == 4)
    assert control.log == [("release", "train", "slot-0", 0), ("release", "train", "slot-0", 4)]
    assert runner.closed


@pytest.mark.parametrize(
    ("status", "cause", "retry"),
    [("error", "agent_error", False), ("timeout", "agent_timeout", False), ("infra", "infra", True)],
)
async def test_only_infrastructure_failures_are_tried_again(
    spec: RunSpec, status: Any, cause: str, retry: bool
) -> None:
    control = FakeControl(spec, samples=1)
    runner = FakeRunner(lambda job, payload: Outcome(status, detail="why"))
    await run_until(task_stream(control, runner), lambda: bool(control.reports()))
    assert control.reports() == [("s0", cause, retry)]


async def test_a_report_of_a_stale_attempt_is_dropped(spec: RunSpec) -> None:
    control = FakeControl(spec, samples=3, refuse=FencedError("attempt 0 is over"))
    runner = FakeRunner(lambda job, payload: Outcome("ok"))
    await run_until(task_stream(control, runner), lambda: len(control.reports()) == 3)


async def test_38_a_report_that_no_proxy_takes_costs_its_own_session_only(spec: RunSpec) -> None:
    control = FakeControl(spec, samples=6, in_flight=2, refuse=DeadlineError("no answer from the proxy"))
    runner = FakeRunner(lambda job, payload: Outcome("ok"))
    await run_until(task_stream(control, runner), lambda: len(control.reports()) == 6)


async def test_38_sessions_go_on_while_the_proxy_hands_out_no_new_ones(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.streams.IDLE_S", 0.001)
    control = FakeControl(spec, samples=2, in_flight=2)
    claims = 0

    async def claim(*given: Any, **options: Any) -> list[ClaimedSample]:
        nonlocal claims
        claims += 1
        if 1 < claims < 5:
            raise DeadlineError("no answer from the proxy")
        return await FakeControl.claim_samples(control, *given, **options)

    monkeypatch.setattr(control, "claim_samples", claim)
    # They end only when the stream has asked in vain, and again.
    runner = FakeRunner(lambda job, payload: Outcome("ok"))
    slow = runner.run

    async def run(job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        while claims < 6:  # noqa: ASYNC110  # what the stream does is counted, not told
            await asyncio.sleep(0.001)
        return await slow(job, payload, limit_s)

    monkeypatch.setattr(runner, "run", run)
    await run_until(task_stream(control, runner), lambda: len(control.reports()) == 2)
    assert [report[1] for report in control.reports()] == ["finished", "finished"]


def score(session: str, stream: str = "train") -> ClaimedScore:
    return ClaimedScore(3, 1, 0, stream, session, "out", [{"request": {}, "response": {}}])


async def test_a_reward_sees_task_output_and_turns(spec: RunSpec) -> None:
    control = FakeControl(spec, scores=[score("s1")])
    runner = FakeRunner(lambda job, payload: Outcome("ok", 0.5))
    await run_until(reward_stream(control, runner), lambda: bool(control.reports()))
    assert runner.payloads["s1"] == {"task": {"n": 3}, "output": "out", "turns": [{"request": {}, "response": {}}]}
    assert control.reports() == [("s1", "reward", 0.5)]


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("missing", "reward_missing"),
        ("invalid", "reward_invalid"),
        ("timeout", "reward_timeout"),
        ("error", "reward_error"),
    ],
)
async def test_a_reward_that_does_not_come_is_reported_with_its_cause(spec: RunSpec, status: Any, cause: str) -> None:
    control = FakeControl(spec, scores=[score("s1")])
    runner = FakeRunner(lambda job, payload: Outcome(status, detail="why"))
    await run_until(reward_stream(control, runner), lambda: bool(control.reports()))
    assert control.reports() == [("s1", cause, None)]


async def test_a_reward_lost_with_its_process_is_called_again(spec: RunSpec) -> None:
    outcomes = [Outcome("infra"), Outcome("infra"), Outcome("ok", 1.0)]
    control = FakeControl(spec, scores=[score("s1")])
    runner = FakeRunner(lambda job, payload: outcomes.pop(0))
    await run_until(reward_stream(control, runner), lambda: bool(control.reports()))
    assert control.reports() == [("s1", "reward", 1.0)]


USER_CODE = """
async def work(task, llm):
    if task["n"] == 2:
        raise ValueError("cannot do two")
    return task["n"]

def reward(rollout):
    return None if rollout.task["n"] == 1 else rollout.output / 10
"""


async def in_activity(activity: Callable[[StreamInput], Any], true: Callable[[], bool]) -> list[Any]:
    """Run an activity until something is so, then cancel it; returns its heartbeats."""
    environment = ActivityEnvironment()
    beats: list[Any] = []
    environment.on_heartbeat = lambda *details: beats.append(details[0])
    running = asyncio.create_task(environment.run(activity, GIVEN))
    async with asyncio.timeout(30):
        while not true() and not running.done():  # noqa: ASYNC110 (the fake sets no event)
            await asyncio.sleep(0.01)
    if not running.done():
        environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return beats


async def test_the_activities_run_user_code_beat_and_leave_no_process(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_CODE)
    scores = [ClaimedScore(n, 0, 0, "train", f"s{n}", n, []) for n in (0, 1, 3)]
    control = FakeControl(spec, samples=5, scores=scores)
    activities = StreamActivities(cast(ControlClient, control))

    beats = await in_activity(activities.stream_tasks, lambda: len(control.reports()) == 5)
    outcomes = {session: (what, value) for session, what, value in control.reports()}
    assert outcomes["s4"] == ("finished", 4)
    assert outcomes["s2"] == ("agent_error", False)
    assert set(beats[0]) == {"running", "done"}

    control.log.clear()
    await in_activity(activities.stream_rewards, lambda: len(control.reports()) == 3)
    assert sorted(control.log) == [("s0", "reward", 0.0), ("s1", "reward_missing", None), ("s3", "reward", 0.3)]
    assert started(recursive=True) == []


@pytest.mark.parametrize("activity", ["stream_tasks", "stream_rewards"])
async def test_user_code_that_cannot_be_loaded_fails_the_activity_for_good(spec: RunSpec, activity: str) -> None:
    control = FakeControl(spec, samples=5, scores=[score("s1")])
    with pytest.raises(ApplicationError, match="no module 'mine'") as caught:
        await ActivityEnvironment().run(getattr(StreamActivities(cast(ControlClient, control)), activity), GIVEN)
    assert caught.value.non_retryable
    assert caught.value.type == "ConfigError"
    assert started(recursive=True) == []


async def test_data_that_is_not_there_fails_the_activity_for_good(spec: RunSpec) -> None:
    gone = spec.model_copy(update={"data": spec.data.model_copy(update={"path": "/no/such/tasks.jsonl"})})
    activities = StreamActivities(cast(ControlClient, FakeControl(gone, samples=1)))
    with pytest.raises(ApplicationError, match="cannot read the tasks"):
        await ActivityEnvironment().run(activities.stream_tasks, GIVEN)
