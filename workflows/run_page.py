"""A run as a page of Markdown for the Temporal UI (*User Metadata*, *Current Details*).

Pure: from what :class:`~workflows.training_run.TrainingRun` knows to text. Somebody who has only the UI must learn
here what the run does, what it waits for, what each node is doing, how well it learns and what went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from workflows import calls
from workflows.alarms import alarms
from workflows.markdown import link, page, table
from workflows.messages import CompanionView, EngineView, EvaluationOutcome, RunState
from workflows.spec import NodeSpec, RunSpec

ENDED = ("ending", "finished", "stopped", "failed")
FIGURES = (
    ("reward", "{reward_mean:.3g}, deviation {reward_std:.3g}"),
    ("groups", "{groups_claimed:.0f} trained, {groups_zero_variance:.0f} with equal rewards, {groups_stale:.0f} stale"),
    ("staleness in updates", "{staleness_mean:.3g}, at most {staleness_max:.0f}"),
    ("loss", "{loss:.4g}"),
    ("entropy", "{entropy:.4g}"),
    ("gradient norm", "{grad_norm:.4g}"),
    ("clipped tokens", "{clip_fraction:.2%}"),
    (
        "engine's log-prob gap",
        "{logprob_gap_mean:.2g}, at most {logprob_gap_max:.2g}, over {tokens_on_policy:.0f} tokens of the same weights",
    ),
    ("ratio of older tokens", "{off_policy_ratio_mean:.3g}"),
    ("tokens trained", "{tokens:.0f} in {rows:.0f} rows"),
    ("seconds", "{seconds_claim:.1f} for the batch, {seconds_acquire:.1f} for the nodes, {seconds:.1f} for the update"),
)
"""What the page says of the last step; a line whose metrics are missing is left out."""


@dataclass(frozen=True)
class RunView:
    """Everything the page is made of."""

    spec: RunSpec
    state: RunState
    waiting_for: str = ""
    step: str | None = None
    """Workflow id of the step in work."""
    namespace: str = "default"


def run_page(view: RunView) -> str:
    """The page."""
    lines = [
        *_headline(view),
        *table(("node", "can", "does"), (_node_row(view, node) for node in _nodes(view))),
        *_rewards(view.state),
        *_last_step(view.state),
        *_links(view),
    ]
    return page(lines)


def _headline(view: RunView) -> list[str]:
    state = view.state
    step, steps = state.step, view.spec.pipeline.steps
    paused = " (paused)" if state.paused and state.phase != "paused" else ""
    lines = [f"### {view.spec.run}: {state.phase}{paused}, {step} of {steps} steps done", ""]
    if view.waiting_for:
        lines += [f"Waits for {view.waiting_for}.", ""]
    if state.paused:
        by = f"by {state.paused.actor}{_why(state.paused.why)}"
        lines += [f"**Paused** ({state.paused.mode}) {by}. The update `resume` lets it go on.", ""]
    if state.stopping:
        lines += [f"**Stopping** ({state.stopping.mode}) for {state.stopping.actor}{_why(state.stopping.why)}.", ""]
    odd = "; ".join(alarms(state.last_metrics, view.spec.alarms))
    if odd:
        lines += [f"**Warning:** {odd}", ""]
    return [*lines, f"Last failure: {state.last_failure or 'none'}", ""]


def _why(why: str) -> str:
    return f": {why}" if why else ""


def _nodes(view: RunView) -> list[NodeSpec]:
    return [*view.spec.nodes, *(view.spec.node(guest) for guest in view.state.guests)]


def _node_row(view: RunView, node: NodeSpec) -> tuple[str, str, str]:
    engine = next((e for e in view.state.engines.values() if e.node == node.id), None)
    return node.id, ", ".join(sorted(node.tags)), _activity(view, node, engine)


def _activity(view: RunView, node: NodeSpec, engine: EngineView | None) -> str:
    if engine is not None:
        lease = calls.lease_id(engine.lease, engine.epoch)
        return f"{_engine(view, engine)} ({_link('lease', view, lease)})"
    if (companion := _companion(view, node)) is not None:
        lease = calls.lease_id(companion.lease, companion.epoch)
        state = "serves steps" if companion.state == "ready" else "starts"
        return f"{companion.role} {state} ({_link('lease', view, lease)})"
    if view.state.phase in ENDED:
        return "given back"
    if view.step and "train" in node.tags:
        return "trains, or changes over"
    return "no lease of this run"


def _companion(view: RunView, node: NodeSpec) -> CompanionView | None:
    return next((one for one in view.state.companions.values() if node.id in one.members), None)


def _engine(view: RunView, engine: EngineView) -> str:
    newest = view.state.checkpoint.version if view.state.checkpoint else 0
    if engine.state == "granted":
        return "engine starts"
    if engine.state == "down":
        return "engine is down, and is started again"
    if engine.held:
        return f"is held, with weights {engine.version}"
    behind = engine.version is not None and engine.version < newest
    if engine.lease == view.state.spared:
        return f"serves weights {engine.version}, and keeps them for their evaluation"
    return f"serves weights {engine.version}" + (f", loads {newest}" if behind else "")


def _rewards(state: RunState) -> list[str]:
    rows = [
        (str(e.version), "no sample was scored" if e.mean is None else f"{e.mean:.3g}", str(e.samples), _passes(e))
        for e in state.evaluations
    ]
    width = 4 if any(e.pass_at for e in state.evaluations) else 3
    if not rows:
        return ["Held-out reward: not evaluated yet", ""]
    return table(("weights", "held-out reward", "samples", "pass@k")[:width], (row[:width] for row in rows))


def _passes(evaluation: EvaluationOutcome) -> str:
    return ", ".join(f"{chance:.3g} at {k}" for k, chance in sorted(evaluation.pass_at.items()))


def _last_step(state: RunState) -> list[str]:
    if not state.last_metrics:
        return []
    rows = []
    for name, text in FIGURES:
        try:
            rows.append((name, text.format(**state.last_metrics)))
        except KeyError:  # a replayed batch has no figures of its claim
            continue
    return table((f"step {state.step - 1}", ""), rows)


def _links(view: RunView) -> list[str]:
    run, state = view.spec.run, view.state
    links = [
        *([_link("step in work", view, view.step)] if view.step else []),
        _link("agents and rewards", view, calls.data_id(run)),
        _link("pool of nodes", view, calls.pool_id(view.spec.cluster)),
    ]
    lines = [f"* open: {', '.join(links)}"]
    if state.checkpoint and state.checkpoint.path:
        lines.append(f"* checkpoint of step {state.checkpoint.step}: `{state.checkpoint.path}`")
    lines.append(f"* trajectories: `runs/{run}/` in the object store; lineage {state.lineage}")
    if state.phase not in ENDED:
        lines.append("* steer: More Actions, Send an Update: `pause`, `resume`, `set_params`, `checkpoint_now`, `stop`")
    return lines


def _link(text: str, view: RunView, workflow: str) -> str:
    return link(text, view.namespace, workflow)
