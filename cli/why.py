"""`seamlessflow why`: asks pool, lease and run, and says in one paragraph why a node or a run does what it does."""

from __future__ import annotations

import time

from cli.runs import Runs
from storage.errors import ConfigError, NotFoundError
from workers.cluster import StateFolder
from workflows.explain import why_node, why_run
from workflows.messages import NodeStatus, PoolStatus


async def why(state: StateFolder, name: str) -> str:
    """The paragraph. Raises :class:`ConfigError` where ``name`` is neither a node nor a run that lives."""
    runs = await Runs.connect(state.cluster(), deadline_s=20.0)
    pool = await runs.pool_status()
    node = pool.node(name)
    if node is not None:
        return await _node(runs, pool, node)
    try:
        status = await runs.status(name)
    except NotFoundError:
        known = ", ".join([*(n.node for n in pool.nodes), *(row.run for row in await runs.list())]) or "none"
        raise ConfigError(f"{name!r} is neither a node nor a run of this cluster; there are: {known}") from None
    return why_run(pool, status, step=await runs.step(status), switches=status.switches)


async def _node(runs: Runs, pool: PoolStatus, node: NodeStatus) -> str:
    run = next((one.run for one in pool.leases if node.node in one.members), None)
    lease = await runs.lease(node.lease) if node.lease else None
    status = await runs.status(run) if run else None
    step = await runs.step(status) if status else None
    switches = status.switches if status else ()
    return why_node(pool, node, lease=lease, run=status, step=step, switches=switches, now=time.time())
