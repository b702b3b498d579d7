"""The lease of a gang: the trainer's, a reference's or a critic's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workflows import calls
from workflows.messages import CheckpointRef, GangRole, GangView, TrainerTask, WeightsRef
from workflows.scheduling.gang import GangPlan, plan_gang
from workflows.spec import RunSpec

if TYPE_CHECKING:
    from workflows.lease import Lease


UNCHANGING = CheckpointRef(
    lineage=0, step=-1, version=0, path=None, digest="", weights=WeightsRef(version=0, path="", digest="")
)
"""Where a model that is never trained stands."""
PHASE = {"trainer": "training", "reference": "computing", "critic": "training"}


class GangLease:
    """Brings one gang up, or finds it still there, and watches it until the lease ends."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    async def serve(self) -> None:
        lease = self.lease
        task = lease.task
        views = await self._probe()
        newest = await self._stands_at()
        ranks = {member: task.spec.node(member).ranks for member in task.members}
        plan = plan_gang(f"{task.lease}/{task.epoch}", ranks, views, newest.version)
        lease.set_phase(f"{'attaching to' if plan.attached else 'starting'} gang {plan.gang}")
        for member in task.members:
            lease.supervisors[member] = calls.supervise(
                "trainer_supervise",
                trainer_task(
                    task.spec, plan, member, newest, lease=task.lease, epoch=task.epoch, role=self._gang_role()
                ),
                node=member,
                summary=f"{plan.ranks[member]} rank(s) of {task.run} on {member}",
            )
        while not lease.ending() and not self._all_ready():
            lease.dirty = False
            await lease.change("the ranks to be ready")
        if not lease.ending():
            lease.set_phase(PHASE[task.role])
            await lease.report("ready")
        while not lease.ending():
            lease.dirty = False
            await lease.change("the end of the lease")
        lease.raise_if_lost()

    async def quiesce(self) -> None:
        """Nothing to do before the cancel: a supervisor lets a running update end."""

    async def _probe(self) -> list[GangView]:
        task = self.lease.task
        handles = [calls.gang_probe(task.run, member, self._gang_role()) for member in task.members]
        for handle in handles:
            await self.lease.until("the members to say which ranks they have", handle)
        return [await handle for handle in handles]

    async def _stands_at(self) -> CheckpointRef:
        task = self.lease.task
        if task.role == "reference":
            return UNCHANGING
        newest = await calls.locally("latest_checkpoint", task.run, CheckpointRef, summary="newest checkpoint")
        if task.role == "critic":
            state = newest.critic
            return newest.model_copy(update={"path": state and state.path, "digest": state.digest if state else ""})
        return newest

    def _gang_role(self) -> GangRole:
        role = self.lease.task.role
        assert role != "engine"  # noqa: S101 - an engine's lease is another's
        return role

    def _all_ready(self) -> bool:
        reports = self.lease.reports
        return all(m in reports and reports[m].state == "ready" for m in self.lease.task.members)


def trainer_task(
    spec: RunSpec,
    plan: GangPlan,
    node: str,
    newest: CheckpointRef,
    *,
    lease: str,
    epoch: int,
    role: GangRole = "trainer",
) -> TrainerTask:
    """One member's share of a gang; ``epoch`` 0 starts ranks ahead of any lease."""
    return TrainerTask(
        run=spec.run,
        lease=lease,
        epoch=epoch,
        node=node,
        gang=plan.gang,
        first_rank=plan.first_rank[node],
        ranks=plan.ranks[node],
        world_size=plan.world_size,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        checkpoint=newest,
        spec=spec,
        role=role,
    )
