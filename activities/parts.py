"""Groups whose gradients are computed ahead of their batch (pipelines that accumulate)."""

from __future__ import annotations

import asyncio
import time

from activities.claiming import pause_s
from activities.layers import policy_for, selection_for
from storage.ledger import Ledger, WaitingGroup
from storage.manifests import Manifest, manifest_groups
from workflows.messages import PartInput
from workflows.scheduling.recall import part_of


async def next_part(ledger: Ledger, task: PartInput) -> Manifest:
    """Wait until a part of the step's groups is complete; the caller bounds it by cancelling."""
    began = time.monotonic()
    while True:
        part = await asyncio.to_thread(_look, ledger, task)
        if part is not None:
            return part
        await asyncio.sleep(pause_s(time.monotonic() - began))


def _look(ledger: Ledger, task: PartInput) -> Manifest | None:
    spec, rule = task.spec, policy_for(task.spec)
    oldest = rule.min_version(task.step)
    waiting = [g for g in ledger.waiting_groups(spec.run) if g.ordinal not in task.done and g.start_version >= oldest]
    useful = [g for g in waiting if not (spec.algorithm.drops_zero_variance and _teaches_nothing(g))]
    room = max(0, rule.groups_per_step - len(task.done))
    if len(useful) < (task.least or part_of(room)):
        return None
    chosen = selection_for(spec)(useful, min(room, len(useful)))
    refs = ledger.waiting_refs(spec.run, chosen)
    if not refs:
        return None
    return Manifest(spec.run, task.lineage, task.step, manifest_groups(refs), spec.sampling.temperature)


def _teaches_nothing(group: WaitingGroup) -> bool:
    return len(set(group.rewards)) == 1
