"""`seamlessflow node`: look at nodes and steer them, by the same updates of the pool that the Temporal UI sends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.shell import StateOption, Why, show, state_folder, tell_pool, wait

node_app = typer.Typer(help="Look at nodes, and give them, take them, re-tag them.", no_args_is_help=True)

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.", show_default=False)]


@node_app.command("list")
def list_nodes(
    state: StateOption = None,
    tag: Annotated[str | None, typer.Option(help="Only nodes that can do this.")] = None,
    activity: Annotated[str | None, typer.Option(help="Only nodes that do this now, or are `free`.")] = None,
) -> None:
    """List nodes: what they can do, what they do now, and why."""
    from cli.runs import Runs

    async def ask() -> list[str]:
        status = await (await Runs.connect(state_folder(state).cluster())).pool_status()
        found = status.tagged(tag, activity)
        return [f"{n.node}  can {','.join(n.tags)}  does {n.does}  is {n.health}  because {n.why}" for n in found]

    for line in wait(ask()):
        print(line)


@node_app.command()
def tag(
    node: NodeId,
    tags: Annotated[str, typer.Argument(help="All it can do, e.g. rollout,train.", show_default=False)],
    state: StateOption = None,
    why: Why = "",
) -> None:
    """Replace what a node can do; a lease that needs a tag it loses ends."""
    from cli.runs import actor
    from workflows.messages import SetTags

    wanted = [name for name in tags.split(",") if name]
    order = SetTags.model_validate({"node": node, "tags": wanted, "actor": actor(), "why": why})
    tell_pool(state, "set_tags", order)


@node_app.command()
def preempt(
    node: NodeId,
    state: StateOption = None,
    hold: Annotated[bool, typer.Option(help="Keep the node free until `node drain --undo` or new tags.")] = False,
    why: Why = "",
) -> None:
    """Take a node away from what holds it now."""
    from cli.runs import actor
    from workflows.messages import PreemptNode

    reason = why or f"asked by {actor()}"
    tell_pool(state, "preempt", PreemptNode(node=node, reason=reason, hold=hold, actor=actor(), why=why))


@node_app.command()
def drain(
    node: NodeId,
    state: StateOption = None,
    undo: Annotated[bool, typer.Option(help="Take it back into service, also after `preempt --hold`.")] = False,
    why: Why = "",
) -> None:
    """End a node's lease and give it no other one, for instance before maintenance."""
    from cli.runs import actor
    from workflows.messages import DrainNode

    tell_pool(state, "drain", DrainNode(node=node, undo=undo, actor=actor(), why=why))


@node_app.command()
def remove(node: NodeId, state: StateOption = None, why: Why = "") -> None:
    """End a node's lease and forget the node; its agent may register it again."""
    from cli.runs import actor
    from workflows.messages import NodeName

    tell_pool(state, "remove_node", NodeName(node=node, actor=actor(), why=why))


@node_app.command()
def lose(node: NodeId, state: StateOption = None, why: Why = "") -> None:
    """Declare a node dead: its lease is fenced, not waited for. It is back when its agent is heard of."""
    from cli.runs import actor
    from workflows.messages import NodeName

    tell_pool(state, "lose_node", NodeName(node=node, actor=actor(), why=why))


@node_app.command()
def share(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.", show_default=False)],
    state: StateOption = None,
    priority: Annotated[int, typer.Option(help="Runs with a higher one come first.")] = 0,
    quota: Annotated[int | None, typer.Option(min=1, help="Nodes it may claim while others want them.")] = None,
    why: Why = "",
) -> None:
    """Set what a run may have of the nodes, whatever its run file says."""
    from cli.runs import Runs, actor
    from workflows.messages import SetShare

    order = SetShare(run=run, priority=priority, quota=quota, actor=actor(), why=why)

    async def ask() -> list[str]:
        await (runs := await Runs.connect(state_folder(state).cluster())).tell_pool("set_share", order)
        return [f"run {s.run} holds {s.holds} of quota {s.quota or 'none'}" for s in (await runs.pool_status()).shares]

    show("\n".join(wait(ask())))


@node_app.command()
def profile(
    state: StateOption = None,
    node: Annotated[str | None, typer.Option(help="Only this node; default: all.", show_default=False)] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model; default: that of the runs in work.", show_default=False)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: the node's.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a node.")] = False,
) -> None:
    """Measure nodes and fit the roofline to them: speed in each role, and how far predictions are off."""
    from cli import profile as profiling
    from cli import stack

    folder = state_folder(state, create=True)
    found = wait(profiling.profile(folder if stack.running(folder) else None, node, model and model.resolve(), threads))
    print("\n".join(one.model_dump_json() for one in found) if as_json else profiling.table(found))
