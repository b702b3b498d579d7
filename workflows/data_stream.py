"""``DataStream``: keeps a run's agents and rewards fed; owns the two long stream activities.

Positions are ledger facts, so nothing is carried. It outlives generations of
the run workflow (a continue-as-new would cancel its activities and with them
every running session).
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError
from temporalio.workflow import ActivityCancellationType, ActivityHandle

from workflows import calls
from workflows.messages import AdmissionRate, DataInput, StreamInput, StreamRate, Wake
from workflows.queues import tag_queue

STOP_LIMIT = timedelta(seconds=20)


def start_stream(name: str, queue: str, task: StreamInput) -> ActivityHandle[None]:
    """Start one long stream activity; it runs until it is cancelled."""
    return workflow.start_activity(
        name,
        task,
        task_queue=queue,
        result_type=type(None),
        start_to_close_timeout=calls.FOREVER,
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            maximum_interval=timedelta(seconds=10),
            non_retryable_error_types=calls.PERMANENT,
        ),
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=f"{name} of {task.run}/{task.stream}",
    )


async def stop_streams(handles: list[ActivityHandle[None]]) -> None:
    """Cancel stream activities and wait, within a limit, until they have put their sessions down."""
    for handle in handles:
        handle.cancel()
    try:
        await workflow.wait_condition(lambda: all(h.done() for h in handles), timeout=STOP_LIMIT)
    except TimeoutError:
        workflow.logger.warning("stream activities did not stop within %s; going on", STOP_LIMIT)


@workflow.defn(name="DataStream", failure_exception_types=[Exception])
class DataStream:
    """See the module. Id ``run/<run>/data``."""

    @workflow.init
    def __init__(self, task: DataInput) -> None:
        self.rate_now = task.target_in_flight
        self.rate_set = task.target_in_flight
        self.stopping = False

    @workflow.signal(description='Keep so many sessions running: {"target_in_flight": 64}')
    def rate(self, rate: StreamRate) -> None:
        self.rate_now = rate.target_in_flight

    @workflow.signal(description="End the stream; running sessions are given back.")
    def stop(self) -> None:
        self.stopping = True

    @workflow.query(description="Sessions kept running.")
    def status(self) -> int:
        return self.rate_now

    @workflow.run
    async def run(self, task: DataInput) -> None:
        workflow.upsert_search_attributes([calls.SF_RUN.value_set(task.run)])
        handles = [
            start_stream(
                "stream_tasks", tag_queue("agent"), StreamInput(run=task.run, stream="train", worker_slot="agent-0")
            ),
            start_stream(
                "stream_rewards", tag_queue("reward"), StreamInput(run=task.run, stream="train", worker_slot="reward-0")
            ),
        ]
        while not self.stopping and not any(h.done() for h in handles):
            await workflow.wait_condition(
                lambda: self.stopping or self.rate_now != self.rate_set or any(h.done() for h in handles)
            )
            if self.rate_now != self.rate_set:
                self.rate_set = self.rate_now
                rate = AdmissionRate(run=task.run, stream="train", target_in_flight=self.rate_set)
                await calls.locally("set_rate", rate, type(None), summary=f"{self.rate_set} sessions in flight")
        problem = await self._problem(handles)
        await stop_streams([h for h in handles if not h.done()])
        wake = Wake(what="data_failed", detail=problem) if problem else Wake(what="data_stopped")
        await calls.tell(task.owner, "wake", wake)

    async def _problem(self, handles: list[ActivityHandle[None]]) -> str:
        """Why a stream ended by itself; empty if none did."""
        for handle in handles:
            if handle.done() and not self.stopping:
                try:
                    await handle
                except ActivityError as error:
                    return calls.reason_of(error)
                return "a stream activity ended although nobody stopped it"
        return ""
