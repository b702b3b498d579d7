"""Activities of a node agent: supervise an engine or a gang member, load weights, train a step, probe, end.

Supervisors are thin: the processes are detached and live on when a worker, the
agent or the Temporal server dies (I9). A supervisor parks its process only when
its activity is *cancelled by request*; in every other case (shutdown, time-out,
server away) it leaves the process alone and the next attempt finds it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.beat import beating
from storage.errors import ConfigError, EngineError, FencedError, GangLost, SeamlessFlowError
from workers.node_agent.engine import EngineHost
from workers.node_agent.meter import RateMeter
from workers.node_agent.profiler import measure
from workers.node_agent.tokens import TaskTokens
from workers.node_agent.trainer import TrainerHost
from workers.residency import EngineResidency, EpochMemory
from workflows import calls
from workflows.messages import (
    ColumnsOutcome,
    ColumnsTask,
    EngineHold,
    EngineTask,
    GangProbe,
    GangRole,
    GangView,
    MemberReport,
    NodeProfiled,
    NodeRun,
    ProfileTask,
    TrainerTask,
    TrainInterval,
    TrainOutcome,
    TrainTask,
)

START_TRIES = 3
"""An engine that never served under a lease is given up after so many starts: the reason will not go away."""
RESTART_PAUSE_S = (0.1, 0.5, 2.0, 5.0)
SIGNAL_PAUSE_S = 0.5
QUIESCE_LIMIT_S = 60.0


class NodeActivities:
    """All activities of one node."""

    def __init__(
        self,
        client: Client,
        node: str,
        engine: EngineHost,
        gangs: Mapping[GangRole, TrainerHost],
        epochs: EpochMemory,
        tokens: TaskTokens,
        meter: RateMeter,
    ) -> None:
        self._client = client
        self._node = node
        self._engine = engine
        self._gangs = gangs
        self._epochs = epochs
        self._tokens = tokens
        self._meter = meter

    # Engine

    @activity.defn(name="engine_supervise")
    async def engine_supervise(self, task: EngineTask) -> None:
        """Keep the node's engine alive on its last good version until cancelled; then park it."""
        self._epochs.admit(task.epoch)
        with self._tokens.kept():
            try:
                await beating(self._keep_engine(task))
            except asyncio.CancelledError:
                if self._cancelled_by_request() and task.epoch == self._epochs.epoch:
                    await beating(self._park_engine())
                raise

    @activity.defn(name="engine_load")
    async def engine_load(self, task: EngineTask) -> int:
        """Load a published version; returns it once the engine has confirmed the published checksum."""
        self._epochs.admit(task.epoch)
        return await beating(self._engine.load(task))

    @activity.defn(name="engine_hold")
    async def engine_hold(self, order: EngineHold) -> None:
        """Pause or resume the engine."""
        self._epochs.admit(order.epoch)
        await beating(self._engine.hold(order.hold))

    async def _keep_engine(self, task: EngineTask) -> None:
        failures, served = 0, False
        while True:
            found: EngineResidency | None = None
            try:
                found = await self._engine.ensure(task)
                failures, served = 0, True
                await self._report(task, _ready_engine(self._node, found))
                why = await self._engine.until_dead(found)
            except EngineError as error:
                failures += 1
                why = str(error)
                if failures >= START_TRIES and not served:
                    raise ConfigError(f"tried {failures} times: {why}") from error
            activity.logger.warning("%s", why)
            await self._report(task, _down(self._node, why, found or self._engine.resident()))
            await asyncio.sleep(RESTART_PAUSE_S[min(failures, len(RESTART_PAUSE_S) - 1)])

    async def _park_engine(self) -> None:
        try:
            await self._engine.park()
        except EngineError as error:  # it is dead or hangs: nothing to park; the next lease starts it again
            activity.logger.warning("the engine could not be parked and is ended: %s", error)
            found = self._engine.resident()
            if found is not None:
                await found.process.end()

    # Gangs

    @activity.defn(name="gang_probe")
    async def gang_probe(self, task: GangProbe) -> GangView:
        """Which gang lives on this node, whole and idle; ranks that are starting are waited for."""
        return await beating(self._gangs[task.role].probe(task.run))

    @activity.defn(name="warm_ranks")
    async def warm_ranks(self, task: TrainerTask) -> None:
        """Start this node's ranks ahead of their first lease; until then its device is others'."""
        await beating(self._gangs[task.role].ensure(task, parked=True))

    @activity.defn(name="trainer_supervise")
    async def trainer_supervise(self, task: TrainerTask) -> None:
        """Start or find this node's ranks and watch them until cancelled. A dead rank is ``GangLost``."""
        self._epochs.admit(task.epoch)
        with self._tokens.kept():
            try:
                await beating(self._keep_ranks(task))
            except asyncio.CancelledError:
                if self._cancelled_by_request():
                    await beating(self._park_ranks(task))
                raise

    @activity.defn(name="train_step")
    async def train_step(self, task: TrainTask) -> TrainOutcome:
        """Send one batch to the node's ranks; a repeated call joins the running update or gets its result."""
        self._epochs.admit(task.epoch)
        with self._tokens.kept():
            outcome = await beating(self._gangs[task.role].update(task))
            return self._meter.noted(outcome) if task.role == "trainer" else outcome

    @activity.defn(name="accumulate")
    async def accumulate(self, task: TrainTask) -> TrainInterval:
        """Have the node's ranks compute the gradients of groups that are complete ahead of their batch."""
        self._epochs.admit(task.epoch)
        with self._tokens.kept():
            return await beating(self._gangs["trainer"].accumulate(task))

    @activity.defn(name="compute_columns")
    async def compute_columns(self, task: ColumnsTask) -> ColumnsOutcome:
        """Have a reference or critic say what it can of a share of a batch; a repeated call finds what was written."""
        self._epochs.admit(task.epoch)
        with self._tokens.kept():
            return await beating(self._gangs[task.role].columns(task))

    async def _keep_ranks(self, task: TrainerTask) -> None:
        gang = self._gangs[task.role]
        await gang.ensure(task)
        ready = MemberReport(node=self._node, state="ready", seq=time.time(), gang=task.gang)
        await self._report(task, ready)
        why = await gang.until_dead(task.gang)
        await gang.end(task.run)
        raise GangLost(why)

    async def _park_ranks(self, task: TrainerTask) -> None:
        gang = self._gangs[task.role]
        try:
            await gang.quiesce(task.gang, limit_s=QUIESCE_LIMIT_S)
            await gang.park(task)
        except FencedError as error:
            activity.logger.warning("the ranks are not parked, a newer lease has them: %s", error)
        except SeamlessFlowError as error:  # the next lease probes the ranks and starts a new gang
            activity.logger.warning("the ranks could not be parked and are ended: %s", error)
            await gang.end(task.run)

    # All

    @activity.defn(name="end_residency")
    async def end_residency(self, task: NodeRun) -> None:
        """End the processes of a run on this node."""
        gangs = (gang.end(task.run) for gang in self._gangs.values())
        await beating(asyncio.gather(self._engine.end(task.run), *gangs))

    @activity.defn(name="profile_node")
    async def profile_node(self, task: ProfileTask) -> NodeProfiled:
        """Measure the node, beside whatever it does."""
        found = await beating(measure(task))
        self._meter.learn(found)
        return found

    def _cancelled_by_request(self) -> bool:
        details = activity.cancellation_details()
        return details is not None and details.cancel_requested

    async def _report(self, task: EngineTask | TrainerTask, report: MemberReport) -> None:
        """Tell the lease; waits for a server that is away."""
        handle = self._client.get_workflow_handle(calls.lease_id(task.lease, task.epoch))
        while True:
            try:
                await handle.signal("member_report", report)
                return
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:  # the lease has ended; the cancel is on its way
                    return
                await asyncio.sleep(SIGNAL_PAUSE_S)


def _ready_engine(node: str, found: EngineResidency) -> MemberReport:
    version = found.serving.version if found.serving else None
    return MemberReport(node=node, state="ready", seq=found.start_time, version=version, url=found.url)


def _down(node: str, why: str, found: EngineResidency | None) -> MemberReport:
    seq = found.start_time if found is not None else time.time()
    return MemberReport(node=node, state="down", seq=seq, detail=why[-2000:])
