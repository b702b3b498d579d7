"""Everything the workflows ask the world to do, played by one object that notes what was asked.

The workflows and the Temporal server are real. ``log`` holds one line an event, in order; hooks script failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, NoReturn

from temporalio import activity
from temporalio.client import Client, WithStartWorkflowOperation, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.beat import beating
from activities.layers import policy_for, policy_view
from storage.errors import FencedError, GangLost
from workers.control import control_worker
from workers.temporal import activity_worker
from workflows import calls
from workflows.messages import (
    AdmissionInput,
    AdmissionPause,
    AdmissionRate,
    AuditEntry,
    BooksView,
    CheckpointRef,
    ClaimInput,
    ClaimResult,
    ColumnRef,
    ColumnsOutcome,
    ColumnsTask,
    CommitInput,
    EndRun,
    EngineHold,
    EngineTask,
    EvaluationInput,
    EvaluationOutcome,
    FlowInput,
    FlowView,
    GangProbe,
    GangView,
    ManifestRef,
    MemberReport,
    NodeInfo,
    NodeProfiled,
    NodeRate,
    NodeRun,
    PartInput,
    PartResult,
    PolicyView,
    PoolStatus,
    ProfileTask,
    RewindInput,
    RouteInput,
    RunResult,
    RunStart,
    RunStatus,
    StreamInput,
    TrainerTask,
    TrainInterval,
    TrainOutcome,
    TrainTask,
    WeightsRef,
)
from workflows.queues import CONTROL_QUEUE, node_queue, nodectl_queue, tag_queue
from workflows.resource_pool import PoolState
from workflows.scheduling.devices import DEVICES
from workflows.scheduling.pool import Pool
from workflows.spec import RunSpec

NODES: dict[str, frozenset[str]] = {"a": frozenset({"rollout", "train"}), "b": frozenset({"rollout"})}
INITIAL = CheckpointRef(
    lineage=0, step=-1, version=0, path=None, digest="", weights=WeightsRef(version=0, path="/w0", digest="d0")
)
_names = itertools.count()


def _column(name: str, step: int) -> ColumnRef:
    return ColumnRef(name=name, key=f"{name} of {step}", digest="0" * 64)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fails with ``what`` it waited for."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited too long for {what}")


async def _no_load_fault(task: EngineTask) -> None:
    """Every load goes well."""


class FakeWorld:
    """See the module. Attributes that tests set: ``hold_claims``, ``on_train``, ``on_load``."""

    def __init__(self, client: Client, *, plays_nodes: bool = True) -> None:
        self.client = client
        self.plays_nodes = plays_nodes
        self.run = f"run{next(_names)}"
        self.log: list[str] = []
        self.routes: dict[str, str] = {}
        self.checkpoint = INITIAL
        self.claimed: dict[int, ManifestRef] = {}
        self.lineage = 0
        self.gang: tuple[str, int] | None = None
        self.engines: dict[str, WeightsRef] = {}
        self.rank_died = asyncio.Event()
        self.claims_open = asyncio.Event()
        self.claims_open.set()
        self.training_open = asyncio.Event()
        self.training_open.set()
        self.on_train: Callable[[TrainTask], None] = lambda _: None
        self.passes_open = asyncio.Event()
        self.passes_open.set()
        self.on_pass: Callable[[ColumnsTask], None] = lambda _: None
        self.columns: dict[str, tuple[ColumnRef, ...]] = {}
        """By manifest: what came with it to the trainer's ranks."""
        self.critic: tuple[str, int] | None = None
        """Gang and version of the critic's ranks."""
        self.on_critic: Callable[[TrainTask], None] = lambda _: None
        self.deaths: dict[str, asyncio.Event] = {}
        """By node with a reference or critic: set to have its ranks die."""
        self.on_load: Callable[[EngineTask], Awaitable[None]] = _no_load_fault
        self.unloadable: set[int] = set()
        """Versions in place of which an engine that starts serves what it had before."""
        self.dropped: tuple[str, ...] = ()
        """Sessions that updates leave out."""
        self.leftover = 0
        """Samples that still run when a batch is claimed."""
        self.evaluations_open = asyncio.Event()
        self.evaluations_open.set()
        self.data_end: int | None = None
        """Steps there is data for."""
        self.stream_error = ""
        self.paused = False
        self.admitted: list[int] = []
        self.parts_open = asyncio.Event()
        self.parts_open.set()
        self.accumulating_open = asyncio.Event()
        self.accumulating_open.set()
        self.least: list[int | None] = []
        """Groups that were asked for ahead of a batch."""
        self.preferred: dict[int, tuple[int, ...]] = {}
        """By step: groups that its batch was asked to hold."""
        self.flow = FlowView(ready=0, wanted=2, supply=2, in_flight=2, rate=0.001)
        self.epochs: Counter[str] = Counter()
        self.halt_at = ""
        """The line of the log at which the world stands still until ``go_on`` is set."""
        self.go_on = asyncio.Event()
        self._seq = itertools.count(1)

    # For tests

    def spec(self, **changes: Any) -> RunSpec:
        data: dict[str, Any] = {
            "run": self.run,
            "cluster": self.run,
            "model": {"path": "/model"},
            "data": {"path": "/tasks.jsonl", "held_out": "/held_out.jsonl"},
            "reward": {"target": "example:reward"},
            "nodes": [{"id": node, "tags": sorted(tags)} for node, tags in NODES.items()],
            "algorithm": {"group_size": 2, "groups_per_step": 2},
            "pipeline": {"steps": 1},
        }
        return RunSpec.model_validate({**data, **changes})

    async def start(self, spec: RunSpec | None = None) -> WorkflowHandle[Any, RunResult]:
        spec = spec or self.spec()
        return await self.client.start_workflow(
            "TrainingRun", spec, id=calls.run_id(spec.run), task_queue=CONTROL_QUEUE, result_type=RunResult
        )

    async def status(self) -> RunStatus:
        handle = self.client.get_workflow_handle(calls.run_id(self.run))
        return await handle.query("status", result_type=RunStatus)

    async def pool_status(self) -> PoolStatus:
        return await self.pool().query("status", result_type=PoolStatus)

    def pool(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(calls.pool_id(self.run))

    async def until(self, line: str) -> None:
        """Wait until the log has ``line``."""
        await eventually(lambda: line in self.log, f"{line!r}; what happened: {self.log}")

    async def until_free(self) -> None:
        """Wait until no node has a lease."""
        for _ in range(400):
            if all(node.activity == "free" for node in (await self.pool_status()).nodes):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"nodes are still leased: {await self.pool_status()}")

    async def reach(self, line: str) -> None:
        """Note that this is about to happen; waits if a test wants to change something just now."""
        self.log.append(line)
        if line == self.halt_at:
            await beating(self.go_on.wait())

    def position(self, line: str) -> int:
        assert line in self.log, f"{line!r} did not happen; what did: {self.log}"
        return self.log.index(line)

    async def add_node(
        self, node: str, *, epoch: int = 0, boot: str = "boot", tags: frozenset[str] | None = None
    ) -> None:
        start: WithStartWorkflowOperation[Any, None] = WithStartWorkflowOperation(
            "ResourcePool",
            PoolState(pool=Pool(cluster=self.run)),
            id=calls.pool_id(self.run),
            task_queue=CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        tags = tags or NODES.get(node, frozenset({"rollout"}))
        info = NodeInfo.model_validate({"id": node, "tags": tags, "boot_id": boot, "epoch": epoch})
        await self.client.execute_update_with_start_workflow("add_node", info, start_workflow_operation=start)

    @contextlib.asynccontextmanager
    async def playing(self, node: str) -> AsyncIterator[None]:
        """The node's activities are done as long as this is open."""
        work: list[Any] = [self.engine_supervise, self.trainer_supervise, self.train_step, self.accumulate]
        work += [self.compute_columns]
        control: list[Any] = [
            self.engine_load,
            self.engine_hold,
            self.gang_probe,
            self.warm_ranks,
            self.end_residency,
            self.profile_node,
        ]
        async with self._worker(node_queue(node), *work), self._worker(nodectl_queue(node), *control):
            yield

    @contextlib.asynccontextmanager
    async def joined(self, tag: str, *nodes: str) -> AsyncIterator[None]:
        """More nodes, which have one tag."""
        async with contextlib.AsyncExitStack() as stack:
            for node in nodes:
                await stack.enter_async_context(self.playing(node))
                await self.add_node(node, tags=frozenset({tag}))
            yield

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(control_worker(self.client, self._control()))
            for node in NODES if self.plays_nodes else ():
                await stack.enter_async_context(self.playing(node))
            await stack.enter_async_context(self._worker(tag_queue("agent"), self.stream_tasks))
            await stack.enter_async_context(self._worker(tag_queue("reward"), self.stream_rewards))
            for node in NODES if self.plays_nodes else ():
                await self.add_node(node)
            yield

    def _worker(self, queue: str, *activities: Any) -> Worker:
        """One that ends at once, whatever it does: nobody needs the end of an activity that waits for the test."""
        return activity_worker(self.client, queue, activities, grace=timedelta(0))

    def _control(self) -> list[Any]:
        names = (
            "pipeline_policy admit_step group_flow prepare_run rewind finish_run record_command "
            "pause_admission set_rate claim_batch next_part commit_step latest_checkpoint latest_weights "
            "open_evaluation wait_evaluation put_route close_route save_profile"
        )
        return [getattr(self, name) for name in names.split()]

    # Control activities

    @activity.defn
    async def prepare_run(self, spec: RunSpec) -> RunStart:
        if self.claimed:  # an earlier execution of the run stopped
            return await self.rewind(RewindInput(run=spec.run, from_lineage=self.lineage))
        return RunStart(lineage=0, step=0, checkpoint=self.checkpoint, replay=())

    @activity.defn
    async def rewind(self, task: RewindInput) -> RunStart:
        self.lineage = task.from_lineage + 1
        self.log.append(f"rewind to lineage {self.lineage}")
        step = self.checkpoint.version
        replay = tuple(m for s, m in sorted(self.claimed.items()) if s >= step)
        return RunStart(lineage=self.lineage, step=step, checkpoint=self.checkpoint, replay=replay)

    @activity.defn
    async def finish_run(self, task: EndRun) -> BooksView:
        self.log.append(f"finish {task.state}")
        return BooksView(balanced=True, produced=1, trained=1)

    @activity.defn
    async def record_command(self, entry: AuditEntry) -> None:
        self.log.append(f"audit {entry.what} by {entry.actor}")

    @activity.defn
    async def pipeline_policy(self, spec: RunSpec) -> PolicyView:
        return policy_view(spec)

    @activity.defn
    async def group_flow(self, task: FlowInput) -> FlowView:
        return self.flow

    @activity.defn
    async def admit_step(self, task: AdmissionInput) -> None:
        self.admitted.append(policy_for(task.spec).admit_until(task.step))
        self.paused = task.paused

    @activity.defn
    async def pause_admission(self, task: AdmissionPause) -> None:
        self.paused = task.paused
        self.log.append(f"admission paused={task.paused}")

    @activity.defn
    async def set_rate(self, task: AdmissionRate) -> None:
        self.log.append(f"rate {task.target_in_flight}")

    @activity.defn
    async def claim_batch(self, task: ClaimInput) -> ClaimResult:
        await self.reach(f"wait for batch {task.step}")
        self.preferred[task.step] = task.prefer
        await beating(self.claims_open.wait())
        if task.step == self.data_end:
            raise ApplicationError("the data has ended", type="EndOfData", non_retryable=True)
        self.log.append(f"claim {task.lineage}.{task.step}")
        manifest = ManifestRef(step=task.step, key=f"m{task.step}", digest=f"{task.step:064d}")
        self.claimed[task.step] = manifest
        return ClaimResult(
            manifest=manifest,
            groups=2,
            zero_variance=0,
            stale=0,
            reward_mean=0.5,
            reward_std=0.5,
            waited_s=0,
            pending=self.leftover,
        )

    @activity.defn
    async def commit_step(self, task: CommitInput) -> CheckpointRef:
        await self.reach(f"begin commit {task.lineage}.{task.step}")
        self.log.append(" without ".join([f"commit {task.lineage}.{task.step}", *task.dropped]))
        self.checkpoint = task.checkpoint
        return task.checkpoint

    @activity.defn
    async def latest_checkpoint(self, run: str) -> CheckpointRef:
        return self.checkpoint

    @activity.defn
    async def latest_weights(self, run: str) -> WeightsRef:
        return self.checkpoint.weights

    @activity.defn
    async def open_evaluation(self, task: EvaluationInput) -> int:
        return 4

    @activity.defn
    async def wait_evaluation(self, task: EvaluationInput) -> EvaluationOutcome:
        serving = sorted({int(route.split()[1]) for route in self.routes.values() if route.startswith("open")})
        self.log.append(f"evaluate {task.version} on {serving}")
        await beating(self.evaluations_open.wait())
        self.log.append(f"evaluated {task.version}")
        return EvaluationOutcome(version=task.version, mean=0.25 * task.version, samples=4)

    @activity.defn
    async def put_route(self, route: RouteInput) -> None:
        if route.epoch < self.epochs[route.node]:
            raise ApplicationError("an old epoch", type="FencedError")
        self.epochs[route.node] = route.epoch
        self.routes[route.node] = f"{route.state} {route.version}"
        self.log.append(f"route {route.node} {route.state} {route.version}")

    @activity.defn
    async def close_route(self, route: RouteInput) -> None:
        self.routes.pop(route.node, None)
        self.log.append(f"route {route.node} closed")

    @activity.defn
    async def save_profile(self, found: NodeProfiled) -> None:
        self.log.append(f"profile of {found.node} saved")

    # Node activities

    @activity.defn
    async def profile_node(self, task: ProfileTask) -> NodeProfiled:
        rates = (NodeRate(role="decode", predicted=900.0, error=0.1),)
        return NodeProfiled(node=task.node, model=task.model, device=DEVICES["CPU"], train_priority=2.5, rates=rates)

    @activity.defn
    async def engine_supervise(self, task: EngineTask) -> None:
        known = self.engines.get(task.node)
        if known is None or (known.version < task.weights.version and task.weights.version not in self.unloadable):
            self.engines[task.node] = task.weights
        await self._report(task, version=self.engines[task.node].version, url=f"http://{task.node}")
        await self._until_parked(f"engine {task.node}", asyncio.Event().wait())

    @activity.defn
    async def engine_load(self, task: EngineTask) -> int:
        await self.reach(f"begin load {task.weights.version} on {task.node}")
        await beating(self.on_load(task))
        self.engines[task.node] = task.weights
        self.log.append(f"load {task.weights.version} on {task.node}")
        return task.weights.version

    @activity.defn
    async def engine_hold(self, order: EngineHold) -> None:
        self.log.append(f"hold {order.node} {order.hold}")

    @activity.defn
    async def gang_probe(self, task: GangProbe) -> GangView:
        if task.role != "trainer":
            gang, version = (self.critic or (None, None)) if task.role == "critic" else (None, None)
            return GangView(node=task.node, gang=gang, ranks=1 if gang else 0, version=version, free_port=1)
        gang, version = self.gang or (None, None)
        return GangView(node=task.node, gang=gang, ranks=1 if gang else 0, version=version, free_port=1)

    @activity.defn
    async def warm_ranks(self, task: TrainerTask) -> None:
        self.log.append("warm ranks")
        if self.gang is None:
            self.gang = (task.gang, task.checkpoint.version)

    @activity.defn
    async def trainer_supervise(self, task: TrainerTask) -> None:
        if task.role != "trainer":
            await self._companion(task)
        attached = self.gang is not None and self.gang[0] == task.gang
        await self.reach(f"{'attach' if attached else 'start'} ranks at {task.checkpoint.version}")
        self.gang = (task.gang, task.checkpoint.version)
        self.rank_died.clear()
        await self._report(task, gang=task.gang)
        await self._until_parked(f"ranks {task.node}", self.rank_died.wait())
        self.gang = None
        raise GangLost("rank 0 has died")

    async def _companion(self, task: TrainerTask) -> NoReturn:
        if task.role == "critic":
            attached = self.critic is not None and self.critic[0] == task.gang
            verb = "attach" if attached else "start"
            await self.reach(f"{verb} critic on {task.node} at {task.checkpoint.version} from {task.checkpoint.path}")
            self.critic = (task.gang, task.checkpoint.version)
        else:
            await self.reach(f"start {task.role} on {task.node}")
        died = self.deaths[task.node] = asyncio.Event()
        await self._report(task, gang=task.gang)
        await self._until_parked(f"{task.role} {task.node}", died.wait())
        if task.role == "critic":
            self.critic = None
        raise GangLost(f"rank 0 of the {task.role} on {task.node} has died")

    @activity.defn
    async def compute_columns(self, task: ColumnsTask) -> ColumnsOutcome:
        step, share = task.manifest.step, f"{task.share + 1}/{task.shares}"
        await self.reach(f"{task.role} of {task.lineage}.{step} on {task.node}")
        if task.role == "critic" and (self.critic is None or self.critic[1] != step):
            raise FencedError(f"the critic holds {self.critic}, values of step {step} are asked for")
        await beating(self.passes_open.wait())
        self.on_pass(task)
        self.log.append(f"{task.role} wrote {share} of {task.manifest.key}")
        column = ColumnRef(name=task.role, key=f"{task.manifest.key} {share}", digest="0" * 64)
        busy = TrainInterval.model_validate({"node": task.node, "start": 0.5, "end": 0.75, "kind": task.role})
        return ColumnsOutcome(column=column, busy=busy)

    @activity.defn
    async def accumulate(self, task: TrainTask) -> TrainInterval:
        self.columns[task.manifest.key] = task.columns
        self.log.append(f"accumulate {task.manifest.key}")
        await beating(self.accumulating_open.wait())
        return TrainInterval(node=task.node, start=0.5, end=0.75)

    @activity.defn
    async def next_part(self, task: PartInput) -> PartResult:
        self.least.append(task.least)
        self.log.append(f"look for a part of {task.step} beside {list(task.done)}")
        await beating((asyncio.Event() if task.done else self.parts_open).wait())
        manifest = ManifestRef(step=task.step, key=f"part of {task.step}", digest=f"{task.step:064d}")
        return PartResult(manifest=manifest, ordinals=(0,))

    @activity.defn
    async def train_step(self, task: TrainTask) -> TrainOutcome:
        step = task.manifest.step
        if task.role == "critic":
            return await self._critic_learns(task)
        self.columns[task.manifest.key] = task.columns
        await self.reach(f"train {task.lineage}.{step} on {task.manifest.key}")
        await beating(self.training_open.wait())
        self.on_train(task)
        weights = WeightsRef(version=step + 1, path=f"/w{step + 1}", digest=f"d{step + 1}")
        self.gang = (task.gang, step + 1)
        checkpoint = CheckpointRef(
            lineage=task.lineage, step=step, version=step + 1, path=f"/c{step}", digest="c", weights=weights
        )
        return TrainOutcome(
            node=task.node,
            start=1.0,
            end=2.0,
            checkpoint=checkpoint,
            metrics={"loss": 0.5},
            dropped=self.dropped,
            returns=_column("return", step) if any(c.name == "critic" for c in task.columns) else None,
        )

    async def _critic_learns(self, task: TrainTask) -> TrainOutcome:
        step = task.manifest.step
        await self.reach(f"critic learns {task.lineage}.{step} from {', '.join(c.name for c in task.columns)}")
        self.on_critic(task)
        self.critic = (task.gang, step + 1)
        nothing = WeightsRef(version=step + 1, path="", digest="")
        checkpoint = CheckpointRef(
            lineage=task.lineage, step=step, version=step + 1, path=f"/critic{step}", digest="cc", weights=nothing
        )
        metrics = {"value_loss": 0.25}
        return TrainOutcome(node=task.node, start=2.0, end=2.5, checkpoint=checkpoint, metrics=metrics)

    @activity.defn
    async def end_residency(self, task: NodeRun) -> None:
        self.log.append(f"end processes on {task.node}")

    # Streams

    @activity.defn
    async def stream_tasks(self, task: StreamInput) -> None:
        if self.stream_error:
            raise ApplicationError(self.stream_error, type="ConfigError")
        self.log.append(f"stream {task.stream}")
        await self._until_parked(f"stream {task.stream}", asyncio.Event().wait())

    @activity.defn
    async def stream_rewards(self, task: StreamInput) -> None:
        await self._until_parked("rewards", asyncio.Event().wait())

    async def _until_parked(self, what: str, work: Any) -> None:
        try:
            await beating(work)
        except asyncio.CancelledError:
            details = activity.cancellation_details()
            if details is not None and details.cancel_requested:
                self.log.append(f"park {what}")
            raise

    async def _report(self, task: EngineTask | TrainerTask, **facts: Any) -> None:
        report = MemberReport(node=task.node, state="ready", seq=float(next(self._seq)), **facts)
        await self.client.get_workflow_handle(calls.lease_id(task.lease, task.epoch)).signal("member_report", report)
