"""The leases of a run: engines brought to the newest weights and to what a pause asks for, the trainer gang, and models
apart."""

from __future__ import annotations

from temporalio import workflow

from workflows import calls
from workflows.messages import (
    EngineView,
    HoldLease,
    LeaseEvent,
    LeaseRequest,
    QueueNotice,
    Revoke,
    StepUpdating,
    WithdrawRequest,
)
from workflows.run_companions import Companions
from workflows.scheduling import pipeline

MAX_LOSSES = 5


class Leases(Companions):
    """Signals of leases, and what the run does about them."""

    # Events

    @workflow.signal(description="Sent by the pool: a lease of this run exists.")
    async def granted(self, event: LeaseEvent) -> None:
        if event.role == "trainer":
            await self._gang_is(event)
        elif event.role == "engine":
            self._engine_granted(event)
        else:
            await self.companion_is(event)

    @workflow.signal(description="Sent by a lease: ready, an engine with a version, or down.")
    async def lease_report(self, event: LeaseEvent) -> None:
        if event.role == "trainer":
            await self._gang_is(event)
            return
        if event.role != "engine":
            await self.companion_is(event)
            return
        self._engine_granted(event)
        known = self.state.engines.get(event.lease)
        if known is not None and known.epoch == event.epoch:
            state = "ready" if event.state == "ready" else "down"
            self.state.engines[event.lease] = known.model_copy(update={"state": state, "version": event.version})
            self.state.last_failure = event.reason or self.state.last_failure
            self.state.engine_losses = 0 if state == "ready" else self.state.engine_losses
            self.dirty = True
            self._measure_return()

    @workflow.signal(description="Sent by a lease: it was revoked and its members are parked.")
    async def revoked(self, event: LeaseEvent) -> None:
        await self._lease_over(event)

    @workflow.signal(description="Sent by a lease: a process or a node of it is lost.")
    async def lease_lost(self, event: LeaseEvent) -> None:
        if event.role == "engine":
            self.state.last_failure = f"{event.lease}/{event.epoch}: {event.reason}"
            self.state.engine_losses += 1
            if event.reason.startswith("ConfigError"):
                self.fatal = self.state.last_failure
            elif self.state.engine_losses > MAX_LOSSES * (len(self.spec.nodes) + len(self.state.guests)):
                self.fatal = f"engines were lost {self.state.engine_losses} times in a row; the last: {event.reason}"
        await self._lease_over(event)

    @workflow.signal(description="Sent by the pool: what a request of the run waits for; empty: nothing.")
    async def queued(self, notice: QueueNotice) -> None:
        if notice.request_id == self.state.engine_request:
            self.state.queue_notice = notice.waiting_for
            self.show()
        elif not self.companion_queued(notice) and self.step_running:
            await calls.tell(self.step_running, "queued", notice)

    @workflow.signal(description="Sent by a step: it has its batch and makes its update.")
    def updating(self, order: StepUpdating) -> None:
        if order.step == self.state.step:
            self.state.updating, self.state.leftover = True, order.leftover
            self.dirty = True

    # Gang

    async def _gang_is(self, event: LeaseEvent) -> None:
        known = self.state.gang
        if known is not None and (event.epoch, event.state != "granted") < (known.epoch, known.state != "granted"):
            return  # a grant may come after the lease's own report
        if self.step_running is None and known is None:
            await self._revoke(event, "nobody waits for it any more")
            return
        self.state.gang = event
        await self._tell_step(event)

    async def _lease_over(self, event: LeaseEvent) -> None:
        known = self.state.gang
        if event.role in ("reference", "critic"):
            await self.companion_over(event)
        elif event.role == "engine":
            self._forget(event)
            await self._free_a_gang_that_waits_in_vain()
        elif known is None or known.epoch <= event.epoch:
            self.state.gang = None
            await self._tell_step(event)

    async def _free_a_gang_that_waits_in_vain(self) -> None:
        """One that was called before its batch is complete rolls out itself if nobody else does any more."""
        ahead = self.policy().accumulates and self.policy().trainers == "preempt"
        if ahead and self.state.gang is not None and not self.state.engines and not self.state.updating:
            await self.let_gang_go("no other node rolls out")

    async def _tell_step(self, event: LeaseEvent) -> None:
        if self.step_running:
            await calls.tell(self.step_running, "gang", event)

    async def let_gang_go(self, reason: str) -> None:
        """End the trainer lease, if there is one; its nodes are granted to whoever wants them."""
        gang, self.state.gang = self.state.gang, None
        if gang is not None:
            if self._shared_nodes():
                self.state.returned_at = workflow.now().timestamp()
            await self._revoke(gang, reason)

    async def _revoke(self, lease: LeaseEvent, reason: str) -> None:
        await calls.tell(calls.lease_id(lease.lease, lease.epoch), "revoke", Revoke(reason=reason))

    def _measure_return(self) -> None:
        """The train nodes serve again: that is what giving them back took."""
        began = self.state.returned_at
        serving = {e.node for e in self.serving() if e.version == self.version()}
        if began is not None and self._shared_nodes() <= serving:
            now = workflow.now().timestamp()
            self.state.cost = self.state.cost.with_measured("weights", now - began)
            self.state.returned_at, self.state.serving_at = None, now

    def _shared_nodes(self) -> set[str]:
        """Nodes that train and roll out in turn."""
        return set(self.train_nodes()) & set(pipeline.rollout_nodes(self.spec, self.policy().trainers))

    # Engines

    async def want_engines(self) -> None:
        """Ask the pool for every node that may roll out."""
        self.state.engine_request = f"{self.spec.run}/engines/{workflow.uuid4().hex[:8]}"
        self.state.engines_wanted = True
        request = LeaseRequest(
            request_id=self.state.engine_request,
            run=self.spec.run,
            role="engine",
            tag="rollout",
            candidates=self._rollout_nodes(),
            count=None,
            priority=pipeline.ENGINE_PRIORITY,
            owner=calls.run_id(self.spec.run),
            spec=self.spec,
        )
        await self.ask_pool(request)

    def _rollout_nodes(self) -> tuple[str, ...]:
        """Which nodes may roll out; empty: every node that can."""
        if self.spec.pool.nodes == "any":
            return ()
        return pipeline.rollout_nodes(self.spec, self.policy().trainers)

    def rollers(self) -> set[str]:
        """Nodes that roll out between two updates: those the run file names for it, and guests that have an engine."""
        named = pipeline.rollout_nodes(self.spec, self.policy().trainers)
        return {*named, *(engine.node for engine in self.state.engines.values())}

    async def give_back(self, reason: str) -> None:
        """Give all nodes back; a gang in the midst of an update ends it first."""
        self.state.engines_wanted = False
        order = WithdrawRequest(request_id=self.state.engine_request, reason=reason)
        await calls.tell(self.pool, "withdraw", order)
        await self.give_companions_back(reason)
        if not self.state.updating:
            await self.let_gang_go(reason)

    async def bring_up(self, engine: EngineView) -> None:
        """Bring one engine lease to the newest weights, and to the hold that a pause or an update asks for."""
        paused = self.state.paused is not None and self.state.paused.mode == "now"
        hold = paused or (self.state.updating and self.state.leftover > 0 and self.policy().holds_rollout)
        told = max(engine.told or 0, engine.version or 0)
        lease = calls.lease_id(engine.lease, engine.epoch)
        alive = True
        if hold != engine.held:
            alive = await calls.tell(lease, "hold", HoldLease(hold=hold))
        newest = self.state.checkpoint and self.state.checkpoint.weights
        if engine.lease == self.state.spared:
            newest = self.state.spared_for
        knows = engine.state == "granted"  # it reads the newest version itself before it first reports
        if alive and not knows and newest is not None and told < newest.version:
            alive = await calls.tell(lease, "load_weights", newest)
            told = newest.version
        known = self.state.engines.get(engine.lease)
        if known is None or known.epoch != engine.epoch:
            return
        if alive:
            self.state.engines[engine.lease] = known.model_copy(update={"held": hold, "told": told})
        else:
            del self.state.engines[engine.lease]

    def synced(self) -> bool:
        """At least one engine serves, and none serves anything but the newest weights."""
        ready = self.serving()
        return bool(ready) and all(e.version == self.version() for e in ready)

    def serving(self) -> list[EngineView]:
        """Engines that serve some weights."""
        return [e for e in self.state.engines.values() if e.state == "ready"]

    def serves(self) -> bool:
        """Whether any engine does."""
        return bool(self.serving())

    def _engine_granted(self, event: LeaseEvent) -> None:
        known = self.state.engines.get(event.lease)
        if event.role == "engine" and (known is None or known.epoch < event.epoch):
            node = event.members[0]
            self.state.engines[event.lease] = EngineView(lease=event.lease, epoch=event.epoch, node=node)
            if node not in {*self.state.guests, *(named.id for named in self.spec.nodes)}:
                self.state.guests += (node,)
            self.dirty = True

    def _forget(self, event: LeaseEvent) -> None:
        known = self.state.engines.get(event.lease)
        if known is not None and known.epoch <= event.epoch:
            del self.state.engines[event.lease]
            self.dirty = True
