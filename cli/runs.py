"""What a human asks of runs and of the pool: start, steer and look, through Temporal.

Nothing here needs this machine's state beyond addresses: the same messages can be sent from the Temporal UI.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import BaseModel
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from storage.errors import ConfigError, DeadlineError, NotFoundError, SeamlessFlowError
from workers.cluster import ClusterConfig
from workflows.messages import LeaseView, NodeProfiled, PoolStatus, ProfileTask, RunResult, RunStatus, StepStatus
from workflows.profile_node import ProfileInput
from workflows.queues import CONTROL_QUEUE
from workflows.spec import RunSpec

Answer = TypeVar("Answer")
DIGEST_MEMO = "spec_digest"
RESUMABLE_MEMO = "resumable"
TASK_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RunRow:
    """One line of the list of runs."""

    run: str
    state: str
    """*Example*: ``RUNNING``, ``COMPLETED``, ``FAILED``."""


class Runs:
    """Messages to the workflows of one cluster. Each call has a deadline (:class:`DeadlineError`)."""

    def __init__(self, client: Client, cluster: ClusterConfig, *, deadline_s: float = 60.0) -> None:
        self._client = client
        self._pool = f"pool/{cluster.cluster}"
        self._deadline_s = deadline_s

    @classmethod
    async def connect(cls, cluster: ClusterConfig, *, deadline_s: float = 60.0) -> Runs:
        """Raises :class:`ConfigError` if no Temporal server answers."""
        try:
            client = await Client.connect(
                cluster.temporal, namespace=cluster.namespace, data_converter=pydantic_data_converter
            )
        except (RPCError, RuntimeError) as error:
            raise ConfigError(
                f"no Temporal server answers at {cluster.temporal} ({error}): start the cluster with `seamlessflow up`"
            ) from error
        return cls(client, cluster, deadline_s=deadline_s)

    async def start(self, spec: RunSpec) -> bool:
        """Start the run, or find it; whether it was started now. One that failed or was terminated goes on.

        Raises :class:`ConfigError` if a run of this name exists with another run file.
        """
        memo = {DIGEST_MEMO: spec.digest(), RESUMABLE_MEMO: spec.resumable()}
        with contextlib.suppress(NotFoundError):  # a failed run goes on only with the run file it had
            await self._same_spec(spec.run, memo)
        try:
            await self._call(
                "start of the run",
                self._client.start_workflow(
                    "TrainingRun",
                    spec,
                    id=run_id(spec.run),
                    task_queue=CONTROL_QUEUE,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
                    task_timeout=TASK_TIMEOUT,
                    memo=memo,
                    static_summary=f"training run {spec.run}",
                ),
            )
        except WorkflowAlreadyStartedError:
            return False
        return True

    async def tell(self, run: str, update: str, message: BaseModel) -> Any:
        """Send an update to a run; its answer. Raises :class:`SeamlessFlowError` with the reason if it is refused."""
        return await self._update(run_id(run), update, message)

    async def tell_pool(self, update: str, message: BaseModel) -> Any:
        """Send an update to the resource pool; its answer."""
        return await self._update(self._pool, update, message)

    async def status(self, run: str) -> RunStatus:
        handle = self._client.get_workflow_handle(run_id(run))
        return await self._call("status of the run", handle.query("status", result_type=RunStatus))

    async def step(self, status: RunStatus) -> StepStatus | None:
        """How the step in work of a run stands; None: there is none."""
        if status.step_running is None:
            return None
        handle = self._client.get_workflow_handle(status.step_running)
        try:
            return await self._call("status of the step", handle.query("status", result_type=StepStatus))
        except NotFoundError:  # the run has named it, and is about to start it
            return None

    async def pool_status(self) -> PoolStatus:
        handle = self._client.get_workflow_handle(self._pool)
        return await self._call("status of the pool", handle.query("status", result_type=PoolStatus))

    async def models(self) -> dict[str, str]:
        """By run: the folder of the model that it trains."""
        found: dict[str, str] = await self._call(
            "models of the runs",
            self._client.get_workflow_handle(self._pool).query("models", result_type=dict[str, str]),
        )
        return found

    async def profile(self, task: ProfileTask) -> NodeProfiled:
        """Measure one node; waits for it. A measurement of the node in work is joined."""
        handle: WorkflowHandle[Any, NodeProfiled] = await self._client.start_workflow(
            "ProfileNode",
            ProfileInput(**task.model_dump(), pool=self._pool),
            id=f"node/{task.node}/profile",
            task_queue=CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            result_type=NodeProfiled,
            static_summary=f"measure {task.node}",
        )
        try:
            return await handle.result()
        except WorkflowFailureError as error:
            raise SeamlessFlowError(f"node {task.node} could not be measured: {_reason(error)}") from error

    async def lease(self, lease: str) -> LeaseView | None:
        """How a lease is; None once it has ended. ``lease``: id/epoch."""
        handle = self._client.get_workflow_handle(f"lease/{lease}")
        try:
            return await self._call("status of the lease", handle.query("status", result_type=LeaseView))
        except NotFoundError:
            return None

    async def state(self, run: str) -> WorkflowExecutionStatus | None:
        """How Temporal sees the run. Raises :class:`NotFoundError` if there is none."""
        handle = self._client.get_workflow_handle(run_id(run))
        return (await self._call("state of the run", handle.describe())).status

    async def result(self, run: str) -> RunResult:
        """Result of a run that has ended. Raises :class:`SeamlessFlowError` with the cause if it failed."""
        handle = self._client.get_workflow_handle(run_id(run), result_type=RunResult)
        try:
            return await self._call("result of the run", handle.result())
        except WorkflowFailureError as error:
            raise SeamlessFlowError(f"run {run} failed: {_reason(error)}") from error

    async def list(self) -> list[RunRow]:
        """Every run that Temporal remembers, newest first; continued runs count once."""
        rows: dict[str, RunRow] = {}

        async def collect() -> None:
            async for item in self._client.list_workflows("WorkflowType = 'TrainingRun'"):
                name = item.id.removeprefix("run/")
                rows.setdefault(name, RunRow(name, item.status.name if item.status else "UNKNOWN"))

        await self._call("list of runs", collect())
        return list(rows.values())

    async def _update(self, workflow: str, update: str, message: BaseModel) -> Any:
        handle = self._client.get_workflow_handle(workflow)
        try:
            return await self._call(f"update {update!r} of {workflow}", handle.execute_update(update, message))
        except WorkflowUpdateFailedError as error:
            raise SeamlessFlowError(f"{workflow} refused {update!r}: {_reason(error)}") from error

    async def _same_spec(self, run: str, memo: dict[str, Any]) -> None:
        handle = self._client.get_workflow_handle(run_id(run))
        description = await self._call("state of the run", handle.describe())
        # A run that was started from the Temporal UI has no memo: the ledger compares it.
        known = {**memo, **await description.memo()}
        lives = description.status == WorkflowExecutionStatus.RUNNING
        has, asked = known[RESUMABLE_MEMO], memo[RESUMABLE_MEMO]
        if lives and (other := sorted(key for key in asked if has.get(key) != asked[key])):
            raise ConfigError(
                f"run {run!r} is running and would not take notice of what the run file says now: "
                + "; ".join(f"{key}: {asked[key]}, not {has.get(key)}" for key in other)
                + ": let it end, or terminate it in the Temporal UI and start it again"
            )
        if known[DIGEST_MEMO] != memo[DIGEST_MEMO]:
            raise ConfigError(
                f"run {run!r} exists already with another run file: "
                "change the name behind `run:`, or use a new --state folder"
            )

    async def _call(self, what: str, call: Awaitable[Answer]) -> Answer:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except TimeoutError:
            raise DeadlineError(f"{what}: no answer within {self._deadline_s:.0f} s") from None
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                raise NotFoundError(f"{what}: nothing of that name runs in this cluster; it may have ended") from error
            raise SeamlessFlowError(f"{what}: {error}") from error
        except WorkflowQueryFailedError as error:
            raise SeamlessFlowError(f"{what}: {error}") from error


def run_id(run: str) -> str:
    """Workflow id of a run."""
    return f"run/{run}"


def actor() -> str:
    """Who is recorded in the audit for a command from this shell."""
    return f"{getpass.getuser()} (cli)"


def _reason(error: BaseException) -> str:
    """The innermost cause that Temporal carries."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ApplicationError):
        return f"{error.type}: {error.message}" if error.type else error.message
    return str(error) or type(error).__name__
