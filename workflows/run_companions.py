"""The leases of models beside the policy that have nodes of their own: what a run asks for, has and loses.

A reference's request stands as long as the run wants its nodes: one lease on every node with the tag, renewed whenever
one comes back. A critic is trained, so its nodes are one gang, asked for again when it ends. A step is told of each
change, and has its batch computed by whoever is ready.
"""

from __future__ import annotations

from temporalio import workflow

from workflows import calls
from workflows.algorithm import Companion
from workflows.messages import CompanionView, LeaseEvent, LeaseRequest, QueueNotice, WithdrawRequest
from workflows.run_base import RunBase
from workflows.scheduling import pipeline

MAX_COMPANION_LOSSES = 5
"""Leases of one node that may be lost without a step between them."""


class Companions(RunBase):
    """Reference and critic, as far as the algorithm has them apart."""

    async def want_companions(self) -> None:
        """Ask the pool for every node that has the tag of a model apart."""
        for role in self.spec.algorithm.companions_apart:
            await self._want(role)

    async def _want(self, role: Companion) -> None:
        request = LeaseRequest(
            request_id=f"{self.spec.run}/{role}/{workflow.uuid4().hex[:8]}",
            run=self.spec.run,
            role=role,
            tag=role,
            candidates=self._companion_candidates(),
            count=sum("critic" in node.tags for node in self.spec.nodes) if role == "critic" else None,
            priority=pipeline.COMPANION_PRIORITY,
            owner=calls.run_id(self.spec.run),
            spec=self.spec,
        )
        self.state.companion_requests[role] = request.request_id
        await self.ask_pool(request)

    def _companion_candidates(self) -> tuple[str, ...]:
        """Nodes of the run that do not train, whatever tags they get later; empty: every node that can."""
        if self.spec.pool.nodes == "any":
            return ()
        return tuple(sorted(node.id for node in self.spec.nodes if "train" not in node.tags))

    async def give_companions_back(self, reason: str) -> None:
        for role, request in sorted(self.state.companion_requests.items()):
            await calls.tell(self.pool, "withdraw", WithdrawRequest(request_id=request, reason=reason))
            self.state.companion_notices.pop(role, None)
        self.state.companion_requests = {}

    async def companion_is(self, event: LeaseEvent) -> None:
        """A lease is granted or ready; a late word of an older one changes nothing."""
        known = self.state.companions.get(event.lease)
        if known is not None and (event.epoch, event.state == "ready") < (known.epoch, known.state == "ready"):
            return
        self.state.companions[event.lease] = CompanionView.model_validate(
            {
                **event.model_dump(include={"lease", "epoch", "role", "members"}),
                "state": "ready" if event.state == "ready" else "granted",
                "gang": event.gang or "",
            }
        )
        known_nodes = {*self.state.guests, *(named.id for named in self.spec.nodes)}
        self.state.guests += tuple(node for node in event.members if node not in known_nodes)
        await self._tell_step_of_companions()

    async def companion_over(self, event: LeaseEvent) -> None:
        """A lease has ended; one that is lost again and again, or by a mistake in the run file, fails the run."""
        known = self.state.companions.get(event.lease)
        mine = known is not None and known.epoch <= event.epoch  # not one of an earlier execution of the run
        if mine:
            del self.state.companions[event.lease]
        if event.state == "lost":
            self.state.last_failure = f"{event.lease}/{event.epoch}: {event.reason}"
            self.state.companion_losses += 1
            nodes = len(self.spec.nodes) + len(self.state.guests)
            if any(kind in event.reason for kind in calls.STOPS_THE_RUN):
                self.fatal = self.state.last_failure
            elif self.state.companion_losses > MAX_COMPANION_LOSSES * nodes:
                self.fatal = (
                    f"the {event.role} was lost {self.state.companion_losses} times in a row; the last: {event.reason}"
                )
            self.dirty = True
        if event.role == "critic" and mine and event.role in self.state.companion_requests:
            await self._want("critic")  # the demand of a gang ends with its lease
        await self._tell_step_of_companions()

    def companion_queued(self, notice: QueueNotice) -> bool:
        """Note what a request waits for; False if it is none of these."""
        role = next((r for r, i in self.state.companion_requests.items() if i == notice.request_id), None)
        if role is not None:
            self.state.companion_notices[role] = notice.waiting_for
            self.show()
        return role is not None

    async def _tell_step_of_companions(self) -> None:
        if self.step_running:
            views = [self.state.companions[lease] for lease in sorted(self.state.companions)]
            await calls.tell(self.step_running, "companions", views)
        self.show()
