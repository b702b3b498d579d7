"""What `seamlessflow why` says, from a pool and a run."""

from __future__ import annotations

from workflows.explain import why_node, why_run
from workflows.messages import LeaseView, NodeRate, NodeStatus, PoolStatus, RunStatus, StepStatus, SwitchRecord
from workflows.pool_page import pool_page, pool_status
from workflows.scheduling import pool as pools
from workflows.scheduling.decision import Decision
from workflows.scheduling.pool import Demand, Node, Pool, Share

NODES = (("a", {"rollout", "train"}), ("b", {"rollout"}))


def switch(step: int, decision: Decision, measured_gain_s: float | None = None) -> SwitchRecord:
    return SwitchRecord(step=step, decision=decision, at=100.0, measured_gain_s=measured_gain_s)


def shared_pool() -> Pool:
    pool = Pool(now=100.0)
    for name, tags in NODES:
        pool = pools.add_node(pool, Node(id=name, tags=frozenset(tags)), now=100.0).pool
    for run in ("first", "second"):
        demand = Demand(request_id=f"{run}-engines", run=run, role="engine", tag="rollout", priority=10)
        pool = pools.request(pool, demand, Share(quota=2)).pool
    return pool


def run_status(run: str = "first") -> RunStatus:
    return RunStatus.model_validate(
        {
            "run": run,
            "phase": "training",
            "lineage": 0,
            "step": 3,
            "steps": 10,
            "version": 3,
            "paused": None,
            "stopping": None,
            "waiting_for": "step 3",
            "engines": (),
            "evaluations": (),
            "metrics": {},
            "last_failure": "",
        }
    )


def node_of(status: PoolStatus, name: str) -> NodeStatus:
    node = status.node(name)
    assert node is not None
    return node


def test_a_working_node_tells_for_whom_why_since_when_and_who_else_wants_it() -> None:
    rates = {"a": {"decode": NodeRate(role="decode", predicted=950, measured=1000, error=0.05)}}
    status = pool_status(shared_pool(), rates)
    lease = LeaseView(
        lease="first-engine-a",
        epoch=1,
        phase="serving version 3",
        version=3,
        route="",
        waiting_for="a command",
        last_failure="",
    )
    gang = Decision(what="train", why="16 of 16 groups are complete", facts={"groups": 16}, predicted_gain_s=4.0)
    text = why_node(
        status, node_of(status, "a"), lease=lease, run=run_status(), switches=[switch(2, gang, 3.5)], now=112.0
    )
    assert text.startswith(
        "a can rollout and train, is up, and rolls out for run first since 12 s: granted first-engine-a/1"
    )
    assert "Its lease is serving version 3, and waits for a command." in text
    assert "Engine of run second waits for a node tagged 'rollout': a, b are" not in text
    assert "which is ahead" in text
    assert "It decodes 1000 tokens/s, 950 were predicted, off by 5% on average." in text
    assert "Run first is training, 3 of 10 steps done, with weights 3 and waits for step 3." in text
    assert "The last switch, at step 2, was to train: 16 of 16 groups are complete (groups 16); " in text
    assert text.endswith("it was predicted to gain 4.0 s and gained 3.5 s.")


def test_a_drained_node_tells_who_took_it_away() -> None:
    pool = pools.drain(shared_pool(), "b", "asked for by ann: new fans").pool
    lease = pool.lease_of("b")
    assert lease is not None
    status = pool_status(pool)
    assert "Its lease was asked back" in why_node(status, node_of(status, "b"))
    status = pool_status(pools.released(pool, lease.id, lease.epoch).pool)
    text = why_node(status, node_of(status, "b"))
    assert text.startswith("b can rollout, is draining, and does nothing: ")
    assert "asked for by ann: new fans" in text


def test_a_run_that_waits_tells_for_which_nodes_and_who_has_them() -> None:
    text = why_run(pool_status(shared_pool()), run_status("second"))
    assert "It has no node." in text
    assert "Its priority is 0, its quota 2, and it holds 0." in text
    assert "a is held by run first (engine, which is ahead); b is held by run first (engine, which is ahead)" in text


def test_a_run_that_works_tells_what_its_nodes_do_and_a_gain_that_is_not_known_yet() -> None:
    decision = Decision(what="return the nodes", why="it pays", predicted_gain_s=2.0)
    text = why_run(pool_status(shared_pool()), run_status(), switches=[switch(3, decision)])
    assert "Of its nodes a rolls out, b rolls out." in text
    assert "predicted to gain 2.0 s, which is not known yet." in text


def test_a_run_whose_step_is_known_tells_what_the_step_waits_for() -> None:
    step = StepStatus(lineage=0, step=3, phase="claiming", waiting_for="enough groups", manifest=None, lease=None)
    text = why_run(pool_status(shared_pool()), run_status(), step=step)
    assert text.startswith(
        "Run first is training, 3 of 10 steps done, with weights 3. Step 3 is claiming and waits for enough groups. "
    )
    queued = run_status().model_copy(update={"queue_notice": "a node tagged 'rollout'"})
    assert "waits for enough groups; a node tagged 'rollout'." in why_run(pool_status(shared_pool()), queued, step=step)
    committing = step.model_copy(update={"phase": "committing", "waiting_for": ""})
    assert "Step 3 is committing. " in why_run(pool_status(shared_pool()), run_status(), step=committing)


def test_the_pools_page_says_why_of_each_node_and_who_waits() -> None:
    page = pool_page(pool_status(shared_pool()), "default")
    assert "* a can rollout and train, is up, and rolls out for run first" in page
    assert "* engine of run second waits for a node tagged 'rollout'" in page
