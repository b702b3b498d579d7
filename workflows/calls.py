"""How workflows call activities and each other: names, time limits and retry policies in one place.

Activities are called by name, so that no workflow imports what an activity
needs. Infrastructure failures are retried without limit; errors that another
try cannot cure are listed in :data:`PERMANENT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.workflow import ActivityCancellationType, ActivityHandle, ExternalWorkflowHandle

from workflows.messages import (
    ColumnRef,
    ColumnsOutcome,
    ColumnsTask,
    CompanionView,
    GangProbe,
    GangRole,
    GangView,
    LeaseEvent,
    ManifestRef,
    StepInput,
    TrainerTask,
    TrainOutcome,
    TrainTask,
)
from workflows.queues import CONTROL_QUEUE, node_queue, nodectl_queue

T = TypeVar("T")

SF_RUN = SearchAttributeKey.for_keyword("SfRun")
SF_STEP = SearchAttributeKey.for_int("SfStep")
SF_PHASE = SearchAttributeKey.for_keyword("SfPhase")
SF_TAGS = SearchAttributeKey.for_keyword_list("SfTags")
SF_NODE = SearchAttributeKey.for_keyword("SfNode")

PERMANENT = [
    "ConfigError",
    "FencedError",
    "IntegrityError",
    "NotFoundError",
    "GangLost",
    "TrainerError",
    "BadBatch",
    "OutOfMemory",
    "NoUsableGroups",
    "EndOfData",
]
STOPS_THE_RUN = frozenset({"BadBatch", "OutOfMemory", "ConfigError"})
"""Failures of an update that a new gang would have again, with the same batch and the same settings."""
HEARTBEAT = timedelta(seconds=20)
"""Crash detection of a supervisor, and the longest outage of the server that it does not notice."""
FOREVER = timedelta(days=30)
CONTINUE_AS_NEW_EVENTS = 1500
POOL_TRIES = 30
POOL_PAUSE = timedelta(seconds=1)
"""Between two tries to find the pool, which the first node agent starts."""

_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=PERMANENT,
)


def run_id(run: str) -> str:
    return f"run/{run}"


def step_id(run: str, lineage: int, step: int) -> str:
    return f"run/{run}/step/{lineage}.{step}"


def data_id(run: str) -> str:
    return f"run/{run}/data"


def evaluation_id(run: str, version: int) -> str:
    return f"run/{run}/eval/{version}"


def lease_id(lease: str, epoch: int) -> str:
    return f"lease/{lease}/{epoch}"


def pool_id(cluster: str) -> str:
    return f"pool/{cluster}"


def supervise(name: str, arg: Any, *, node: str, summary: str) -> ActivityHandle[None]:
    """Start a long supervising activity on ``node``; cancelling it waits until the member is parked."""
    return workflow.start_activity(
        name,
        arg,
        task_queue=node_queue(node),
        result_type=type(None),
        start_to_close_timeout=FOREVER,
        schedule_to_start_timeout=timedelta(seconds=60),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=summary,
    )


def on_node(
    name: str,
    arg: Any,
    result: type[T],
    *,
    queue: str,
    limit_s: float,
    summary: str,
    attempts: int = 0,
    permanent: Sequence[str] = (),
) -> ActivityHandle[T]:
    """Start bounded work on a node; a cancel does not wait for it. ``permanent``: errors that end it beyond the usual
    ones."""
    return workflow.start_activity(
        name,
        arg,
        task_queue=queue,
        result_type=result,
        start_to_close_timeout=timedelta(seconds=limit_s),
        schedule_to_start_timeout=timedelta(seconds=60),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=100),
            maximum_interval=timedelta(seconds=10),
            maximum_attempts=attempts,
            non_retryable_error_types=[*PERMANENT, *permanent],
        ),
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=summary,
    )


def on_gang(
    name: str,
    step: StepInput,
    lease: LeaseEvent,
    manifest: ManifestRef,
    result: type[T],
    *,
    summary: str,
    columns: tuple[ColumnRef, ...] = (),
) -> list[ActivityHandle[T]]:
    """Have every member of a gang work on a manifest, one handle each, in the order of ``lease.members``.

    ``columns``: what models that the gang does not hold say of the manifest's tokens.
    """
    limit = step.spec.trainer.step_time_limit_s
    tasks = [
        TrainTask(
            run=step.spec.run,
            lease=lease.lease,
            epoch=lease.epoch,
            node=node,
            gang=lease.gang or "",
            lineage=step.lineage,
            manifest=manifest,
            time_limit_s=limit,
            columns=columns,
        )
        for node in lease.members
    ]
    return [
        on_node(
            name, task, result, queue=node_queue(task.node), limit_s=limit + 60, summary=f"{summary} on {task.node}"
        )
        for task in tasks
    ]


def compute_columns(
    step: StepInput, companion: CompanionView, manifest: ManifestRef, share: int, shares: int
) -> list[ActivityHandle[ColumnsOutcome]]:
    """Have the gang of a reference or critic say what it can of a share of a manifest, one handle a member."""
    tasks = [
        ColumnsTask(**_for_member(step, companion, node, manifest), share=share, shares=shares)
        for node in companion.members
    ]
    what = f"{companion.role} of step {manifest.step}, share {share + 1} of {shares}"
    return [_from_member("compute_columns", task, ColumnsOutcome, what) for task in tasks]


def train_critic(
    step: StepInput,
    companion: CompanionView,
    manifest: ManifestRef,
    columns: tuple[ColumnRef, ...],
    dropped: tuple[str, ...],
) -> list[ActivityHandle[TrainOutcome]]:
    """Have the gang of a critic learn from a manifest, values and returns among ``columns``; one handle a member."""
    tasks = [
        TrainTask(**_for_member(step, companion, node, manifest), columns=columns, dropped=dropped)
        for node in companion.members
    ]
    return [_from_member("train_step", task, TrainOutcome, f"critic of step {manifest.step}") for task in tasks]


def _for_member(step: StepInput, companion: CompanionView, node: str, manifest: ManifestRef) -> dict[str, Any]:
    return {
        "run": step.spec.run,
        "lease": companion.lease,
        "epoch": companion.epoch,
        "node": node,
        "gang": companion.gang,
        "lineage": step.lineage,
        "manifest": manifest,
        "time_limit_s": step.spec.trainer.step_time_limit_s,
        "role": companion.role,
    }


def _from_member(name: str, task: TrainTask, result: type[T], what: str) -> ActivityHandle[T]:
    limit = task.time_limit_s + 60
    return on_node(name, task, result, queue=node_queue(task.node), limit_s=limit, summary=f"{what} on {task.node}")


def gang_probe(run: str, node: str, role: GangRole = "trainer") -> ActivityHandle[GangView]:
    """Ask a node which ranks of a role live on it; waits for ranks that are starting."""
    return on_node(
        "gang_probe",
        GangProbe(run=run, node=node, role=role),
        GangView,
        queue=nodectl_queue(node),
        limit_s=900,
        summary=f"resident ranks on {node}",
    )


def warm_ranks(member: TrainerTask) -> ActivityHandle[None]:
    """Start a gang member ahead of its lease; nobody waits for it: the lease starts again what failed here."""
    return on_node(
        "warm_ranks",
        member,
        type(None),
        queue=nodectl_queue(member.node),
        limit_s=900,
        attempts=1,
        summary=f"{member.ranks} rank(s) of {member.run} on {member.node}, ahead of their first lease",
    )


def on_control(
    name: str, arg: Any, result: type[T], *, summary: str, limit: timedelta = timedelta(minutes=10)
) -> ActivityHandle[T]:
    """Start an activity of the control worker (ledger, object store)."""
    return workflow.start_activity(
        name,
        arg,
        task_queue=CONTROL_QUEUE,
        result_type=result,
        start_to_close_timeout=limit,
        heartbeat_timeout=HEARTBEAT,
        retry_policy=_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=summary,
    )


async def locally(name: str, arg: Any, result: type[T], *, summary: str) -> T:
    """Run a short idempotent activity inside the control worker (about 4 ms)."""
    answer: T = await workflow.execute_local_activity(
        name,
        arg,
        result_type=result,
        start_to_close_timeout=timedelta(seconds=30),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=50),
            maximum_interval=timedelta(seconds=2),
            non_retryable_error_types=PERMANENT,
        ),
        summary=summary,
    )
    return answer


async def tell(workflow_id: str, signal: str, *args: Any) -> bool:
    """Signal another workflow; False if it does not exist any more."""
    handle: ExternalWorkflowHandle[Any] = workflow.get_external_workflow_handle(workflow_id)
    try:
        await handle.signal(signal, args=args)
    except FailureError as error:
        workflow.logger.info("signal %s to %s was not delivered: %s", signal, workflow_id, error)
        return False
    return True


_SIGNAL_OF = {
    "granted": "granted",
    "ready": "lease_report",
    "down": "lease_report",
    "revoked": "revoked",
    "lost": "lease_lost",
}


async def tell_owner(owner: str, event: LeaseEvent) -> bool:
    """Send a lease event to the lease's owner, under the signal name of its state."""
    return await tell(owner, _SIGNAL_OF[event.state], event)


def call_off(handles: Iterable[ActivityHandle[Any]]) -> None:
    """Cancel those that have not ended. Nobody waits for them any more: how they end is no error that was missed."""
    for handle in handles:
        if not handle.done():
            handle.cancel()
        handle.add_done_callback(_seen)


def _seen(handle: ActivityHandle[Any]) -> None:
    if not handle.cancelled():
        handle.exception()


def reason_of(error: BaseException) -> str:
    """The innermost message of a failure, as a user should read it."""
    seen: BaseException = error
    while isinstance(seen, FailureError) and seen.cause is not None:
        seen = seen.cause
    if isinstance(seen, ApplicationError) and seen.type:
        return f"{seen.type}: {seen.message}"
    return f"{type(seen).__name__}: {seen}"


def must_continue_as_new() -> bool:
    """Whether a workflow at a safe point should start a new generation of itself."""
    info = workflow.info()
    return info.is_continue_as_new_suggested() or info.get_current_history_length() > CONTINUE_AS_NEW_EVENTS
