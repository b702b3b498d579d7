"""Why a node or a run does what it does now, in one paragraph made of what pool, lease and run say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workflows.messages import LeaseView, NodeRate, NodeStatus, PoolStatus, RunStatus, StepStatus, SwitchRecord

DOES = {
    "free": "does nothing",
    "rollout": "rolls out",
    "train": "trains",
    "critic": "trains the critic",
    "reference": "computes reference log-probs",
    "reward": "scores",
    "agent": "runs agents",
}


def why_node(
    pool: PoolStatus,
    node: NodeStatus,
    *,
    lease: LeaseView | None = None,
    run: RunStatus | None = None,
    step: StepStatus | None = None,
    switches: Sequence[SwitchRecord] = (),
    now: float | None = None,
) -> str:
    """What the node does and why, what it waits for, and what the last switch gained. ``now``: unix seconds."""
    held = next((one for one in pool.leases if f"{one.lease}/{one.epoch}" == node.lease), None)
    of = f" for run {held.run}" if held else ""
    can = " and ".join(node.tags)
    parts = [f"{node.node} can {can}, is {node.health}, and {DOES[node.activity]}{of}{_since(node, now)}: {node.why}"]
    if held is not None and held.state == "revoking":
        parts.append("Its lease was asked back, and ends once its work is parked")
    if lease is not None:
        waits = f", and waits for {lease.waiting_for}" if lease.waiting_for else ""
        parts.append(f"Its lease is {lease.phase}{waits}")
    parts += [f"Beside that it {DOES[tag]} for every run that needs it" for tag in node.shares]
    parts += _wanted(pool, node)
    parts += [_rate(rate) for rate in node.rates]
    if run is not None:
        parts += [*_run(run, step), *_last_switch(switches)]
    return _paragraph(parts)


def why_run(
    pool: PoolStatus, run: RunStatus, *, step: StepStatus | None = None, switches: Sequence[SwitchRecord] = ()
) -> str:
    """Where the run and its ``step`` in work stand, which nodes it has for what, what is waited for, and what the last
    switch gained."""
    members = {node: lease for lease in pool.leases if lease.run == run.run for node in lease.members}
    work = [f"{n.node} {DOES[n.activity]}" for n in pool.nodes if n.node in members]
    parts = [*_run(run, step), "It has no node" if not work else f"Of its nodes {', '.join(work)}"]
    share = next((one for one in pool.shares if one.run == run.run), None)
    if share is not None and (share.priority or share.quota is not None):
        parts.append(f"Its priority is {share.priority}, its quota {share.quota or 'none'}, and it holds {share.holds}")
    parts += [f"Its {r.role} waits for {r.waiting_for}" for r in pool.requests if r.run == run.run and r.waiting_for]
    mine = [d for d in pool.decisions if f"{run.run}-" in d.what or f"run {run.run} " in d.why]
    parts += [f"The pool last {mine[-1].line()}"] if mine else []
    parts += _last_switch(switches)
    parts += [f"Last failure: {run.last_failure}"] if run.last_failure else []
    return _paragraph(parts)


def waits_for(run: RunStatus, step: StepStatus | None) -> str:
    """What is waited for: by the step in work, if it is known, since all that the run itself waits for is that step."""
    if step is None:
        return run.waiting_for
    return "; ".join(filter(None, [step.waiting_for, run.queue_notice]))


def _run(run: RunStatus, step: StepStatus | None) -> list[str]:
    paused = f", paused ({run.paused})" if run.paused else ""
    stands = f"Run {run.run} is {run.phase}{paused}, {run.step} of {run.steps} steps done, with weights {run.version}"
    waits = f" and waits for {what}" if (what := waits_for(run, step)) else ""
    return [stands + waits] if step is None else [stands, f"Step {step.step} is {step.phase}{waits}"]


def _since(node: NodeStatus, now: float | None) -> str:
    return "" if now is None or not node.since else f" since {max(0.0, now - node.since):.0f} s"


def _wanted(pool: PoolStatus, node: NodeStatus) -> list[str]:
    """Who else waits for something that this node may be in the way of."""
    waiting = [r for r in pool.requests if r.waiting_for and node.node in r.waiting_for.replace(",", " ").split()]
    return [f"{r.role} of run {r.run} waits for {r.waiting_for}" for r in waiting]


def _rate(rate: NodeRate) -> str:
    verb = {"decode": "decodes", "train": "trains"}[rate.role]
    off = "" if rate.error is None else f", off by {rate.error:.0%} on average"
    if rate.measured is None:
        return f"By its profile it {verb} {rate.predicted or 0:.0f} tokens/s"
    return f"It {verb} {rate.measured:.0f} tokens/s, {rate.predicted or 0:.0f} were predicted{off}"


def _last_switch(switches: Sequence[SwitchRecord]) -> list[str]:
    if not switches:
        return []
    last = switches[-1]
    decision = last.decision.model_copy(update={"predicted_gain_s": None})
    predicted, gained = last.decision.predicted_gain_s, last.measured_gain_s
    text = f"The last switch, at step {last.step}, was to {decision.line()}"
    if predicted is not None:
        text += f"; it was predicted to gain {predicted:.1f} s"
        text += ", which is not known yet" if gained is None else f" and gained {gained:.1f} s"
    return [text]


def _paragraph(sentences: Iterable[str]) -> str:
    return " ".join(
        f"{sentence[:1].upper()}{sentence[1:]}." if i else f"{sentence}." for i, sentence in enumerate(sentences)
    )
