"""``Evaluation``: the mean reward of the held-out tasks at one weight version.

Its samples are a stream of their own (``eval/<version>``) in the ledger, run
by the same agents and rewards as the training stream and never trained on.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from workflows import calls
from workflows.data_stream import start_stream, stop_streams
from workflows.messages import EvaluationInput, EvaluationOutcome, StreamInput
from workflows.queues import tag_queue

LIMIT = timedelta(hours=6)


@workflow.defn(name="Evaluation", failure_exception_types=[Exception])
class Evaluation:
    """See the module. Id ``run/<run>/eval/<version>``."""

    @workflow.init
    def __init__(self, task: EvaluationInput) -> None:
        self.task = task
        self.phase = "opening"

    @workflow.query(description="Phase of the evaluation.")
    def status(self) -> str:
        return self.phase

    @workflow.run
    async def run(self, task: EvaluationInput) -> EvaluationOutcome:
        workflow.upsert_search_attributes([calls.SF_RUN.value_set(task.run), calls.SF_PHASE.value_set("evaluating")])
        stream = f"eval/{task.version}"
        count = await calls.on_control("open_evaluation", task, int, summary=f"admit held-out tasks of {stream}")
        self.phase = f"running {count} held-out tasks"
        tasks = start_stream(
            "stream_tasks", tag_queue("agent"), StreamInput(run=task.run, stream=stream, worker_slot=f"agent-{stream}")
        )
        wait = calls.on_control(
            "wait_evaluation", task, EvaluationOutcome, limit=LIMIT, summary=f"rewards of {count} held-out tasks"
        )
        await workflow.wait_condition(lambda: wait.done() or tasks.done())
        if not wait.done():  # the stream gave up: say why
            await tasks
        outcome = await wait
        await stop_streams([tasks])
        self.phase = f"mean reward {outcome.mean}"
        return outcome
