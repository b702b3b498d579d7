"""The `seamlessflow` command: one small function per verb; the work is done elsewhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from cli import stack
from cli.node import node_app
from cli.shell import StateOption, Why, say, show, state_folder, tell, wait
from storage.errors import ConfigError, IntegrityError, SeamlessFlowError
from workers.cluster import ClusterConfig

app = typer.Typer(
    help="Reinforcement learning for LLM agents on Temporal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
shards_app = typer.Typer(help="Look into trajectory shards.", no_args_is_help=True)
app.add_typer(shards_app, name="shards")
trace_app = typer.Typer(help="Runs as input of the simulator.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(node_app, name="node")

RunFile = Annotated[Path, typer.Argument(help="Run file (YAML).", show_default=False)]
RunName = Annotated[str, typer.Argument(help="Name of the run.", show_default=False)]
Ports = Annotated[
    list[str] | None, typer.Option("--port", help="Fixed port, e.g. --port ui=8233; also temporal, proxy, s3, proxy-2.")
]


@app.command()
def up(
    run_file: Annotated[
        Path | None, typer.Argument(help="Run file that names the nodes; default: those of the last time.")
    ] = None,
    state: StateOption = None,
    port: Ports = None,
    proxies: Annotated[
        int | None, typer.Option(min=1, help="Proxies side by side; more than one needs --database.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="postgresql://user:password@host/database for ledger and journal.")
    ] = None,
) -> None:
    """Start the cluster of this machine and wait until every service is ready."""
    from cli.check import require_run

    folder = state_folder(state, create=True)
    nodes = require_run(run_file).nodes if run_file else None
    stack.up(folder, nodes, ports=_ports(port), proxies=proxies, database=database, say=say)
    say(f"Temporal UI: {folder.cluster().temporal_ui}")
    say(f"logs: {folder.logs}")


@app.command()
def join(
    temporal: Annotated[str, typer.Option(help="host:port of the Temporal front end.")],
    proxy: Annotated[str, typer.Option(help="URL of the proxy.")],
    s3: Annotated[str, typer.Option(help="host:port of the object store.")],
    state: StateOption = None,
    temporal_ui: Annotated[str | None, typer.Option(help="URL of the Temporal UI.")] = None,
    s3_secure: Annotated[bool, typer.Option(help="The object store speaks TLS.")] = False,
    bucket: Annotated[str, typer.Option(help="Bucket of this cluster.")] = "seamlessflow",
    prepare: Annotated[bool, typer.Option(help="Register namespace and search attributes with Temporal.")] = False,
) -> None:
    """Make this machine part of a cluster whose services run elsewhere; keys come from the environment."""
    from cli.join import join as write_files
    from cli.join import prepare_namespace

    folder = state_folder(state, create=True)
    config = ClusterConfig(
        temporal=temporal,
        temporal_ui=temporal_ui,
        proxy=proxy,
        s3=s3,
        s3_secure=s3_secure,
        bucket=bucket,
        ledger_url=f"sqlite:///{folder.root / 'ledger.db'}",
        journal_url=f"sqlite:///{folder.root / 'journal.db'}",
    )
    write_files(folder, config)
    if prepare:
        wait(prepare_namespace(config))
    say(f"{folder.root} belongs to the cluster at {temporal}")


@app.command()
def down(state: StateOption = None) -> None:
    """Stop the cluster, resident engines and trainer ranks included. Its state stays on disk."""
    folder = state_folder(state)
    say(f"stopped {stack.down(folder)} processes; state kept in {folder.root}")


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="Only this run, in detail.")] = None,
    state: StateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show services, nodes and runs."""
    from cli.overview import collect, render

    view = wait(collect(state_folder(state), run))
    print(json.dumps(view, indent=2) if as_json else render(view))


@app.command()
def why(
    name: Annotated[
        str, typer.Argument(metavar="NODE|RUN", help="Id of a node, or name of a run.", show_default=False)
    ],
    state: StateOption = None,
) -> None:
    """Say in one paragraph why a node or a run does what it does now, and what it waits for."""
    from cli.why import why as explain

    print(wait(explain(state_folder(state), name)))


@app.command()
def logs(
    service: Annotated[str | None, typer.Argument(help="Name of a log; without it, all are listed.")] = None,
    state: StateOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines from the end.")] = 50,
) -> None:
    """Show the end of a service's log."""
    folder = state_folder(state).logs
    names = sorted(path.name.removesuffix(".log") for path in folder.glob("*.log"))
    if service is None:
        for name in names:
            print(folder / f"{name}.log")
    elif service not in names:
        raise ConfigError(f"no log {service!r} in {folder}; there are: {', '.join(names) or 'none'}")
    else:
        print(stack.log_tail(folder / f"{service}.log", lines))


@app.command()
def check(
    run_file: RunFile,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the run as one JSON object: what the Temporal UI starts a run with.")
    ] = False,
) -> None:
    """Say all that is wrong with a run file, before anything starts."""
    from cli.check import check_run

    checked = check_run(run_file)
    for problem in checked.problems:
        print(problem.text(run_file))
    if checked.spec is None:
        raise typer.Exit(2)
    print(checked.spec.model_dump_json(indent=2, exclude_unset=True) if as_json else f"{run_file}: good")


@app.command()
def start(run_file: RunFile, state: StateOption = None) -> None:
    """Start a run on the running cluster, or find it running."""
    from cli.check import require_run
    from cli.runs import Runs

    folder = state_folder(state)
    spec = require_run(run_file)
    if stack.running(folder):  # elsewhere the nodes are other machines', which join when they please
        stack.require_nodes(folder, spec.nodes)

    async def begin() -> bool:
        return await (await Runs.connect(folder.cluster())).start(spec)

    started = wait(begin())
    say(
        f"run {spec.run} {'started' if started else 'exists already'}; look at it with `seamlessflow status {spec.run}`"
    )


@app.command()
def demo(
    run_file: RunFile,
    state: StateOption = None,
    build: Annotated[
        list[str] | None, typer.Option(help="Module that makes model or tasks if they are missing; repeatable.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Leave the cluster running at the end.")] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds until it gives up.")] = 3600.0,
    engine: Annotated[str | None, typer.Option(help="In place of the run file's engine.kind.")] = None,
    steps: Annotated[int | None, typer.Option(help="In place of the run file's pipeline.steps.")] = None,
) -> None:
    """Run a run file from nothing to the end; repeated after an interruption, go on. The last line is JSON."""
    from cli.demo import DemoOptions, Interrupted
    from cli.demo import demo as run_demo

    folder = state_folder(state, create=True)
    try:
        figures = run_demo(DemoOptions(run_file, folder, tuple(build or ()), keep, time_limit, engine, steps), say)
    except Interrupted as error:
        say(str(error))
        raise typer.Exit(130) from None
    say(f"everything is kept: seamlessflow up --state {folder.root}, then status, logs, shards")
    print(json.dumps(figures.line), flush=True)
    if not figures.balanced:
        raise IntegrityError("samples or tokens are unaccounted for: `seamlessflow audit` tells which")


@app.command()
def pause(
    run: RunName,
    state: StateOption = None,
    now: Annotated[bool, typer.Option(help="Cut running sessions; they continue after resume.")] = False,
    give_back: Annotated[bool, typer.Option(help="Give the nodes back meanwhile.")] = False,
    why: Why = "",
) -> None:
    """Pause a run."""
    from cli.runs import actor
    from workflows.messages import Pause

    tell(state, run, "pause", Pause(mode="now" if now else "drain", give_back=give_back, actor=actor(), why=why))


@app.command()
def resume(run: RunName, state: StateOption = None, why: Why = "") -> None:
    """Go on with a paused run."""
    from cli.runs import actor
    from workflows.messages import Command

    tell(state, run, "resume", Command(actor=actor(), why=why))


@app.command()
def checkpoint(run: RunName, state: StateOption = None, why: Why = "") -> None:
    """Say where the newest checkpoint is, once the current step has committed it."""
    from cli.runs import actor
    from workflows.messages import Command

    tell(state, run, "checkpoint_now", Command(actor=actor(), why=why))


@app.command()
def stop(
    run: RunName,
    state: StateOption = None,
    now: Annotated[bool, typer.Option(help="End at once; without it, finish the step and evaluate.")] = False,
    why: Why = "",
) -> None:
    """End a run before its last step."""
    from cli.runs import actor
    from workflows.messages import Stop

    tell(state, run, "stop", Stop(mode="now" if now else "drain", actor=actor(), why=why))


@trace_app.command("export")
def trace_export(
    run: RunName,
    out: Annotated[Path | None, typer.Option(help="File to write; default: <run>.jsonl.")] = None,
    state: StateOption = None,
) -> None:
    """Write what a run's sessions were like and how fast its nodes were: counts and seconds, no text."""
    from cli.trace import export

    path = out or Path(f"{run}.jsonl")
    export(state_folder(state), run).write(path)
    say(f"{path}: simulate with `seamlessflow simulate run.yaml --cluster cluster.yaml --workload {path}`")


@app.command()
def simulate(
    run_file: RunFile,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (YAML); default: the nodes of the trace.")] = None,
    workload: Annotated[
        str, typer.Option(help="Preset, workload file (YAML), or trace of a run (.jsonl).")
    ] = "math-20k-thinking",
    pipelines: Annotated[
        list[str] | None, typer.Option("--pipeline", help="Also this pipeline, at its best; repeatable. Default: all.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates to simulate.")] = 10,
    seed: Annotated[int, typer.Option(help="Of lengths, times and failures.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for pictures and figures.")] = None,
) -> None:
    """Simulate a run on a cluster, and say which tags its nodes should have. The last line is JSON."""
    from cli.runfile import load_run
    from cli.simulate import PIPELINES, Options, simulate_run

    spec = load_run(run_file)
    unknown = sorted(set(pipelines or ()) - set(PIPELINES))
    if unknown:
        raise ConfigError(f"--pipeline {unknown[0]!r} is unknown; there are: {', '.join(PIPELINES)}")
    options = Options(cluster, workload, tuple(pipelines or PIPELINES), steps, seed, out)
    print(json.dumps(simulate_run(spec, options, say)))


@shards_app.command("list")
def shards_list(run: RunName, state: StateOption = None) -> None:
    """List the shards of a run."""
    from cli.shards import list_shards

    for key in list_shards(state_folder(state), run):
        print(key)


@shards_app.command("show")
def shards_show(
    key: Annotated[str, typer.Argument(help="Key of the shard.", show_default=False)], state: StateOption = None
) -> None:
    """Show a shard's sessions and prefix tree."""
    from cli.shards import show_shard

    print(show_shard(state_folder(state), key))


@app.command()
def export(
    run: RunName,
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, help="Updates made; 0: the initial model; default: all.")] = None,
    state: StateOption = None,
) -> None:
    """Write a run's weights as a Hugging Face directory; needs no running cluster."""
    from cli.export import export as write

    written = write(state_folder(state), run, out, step)
    print(f"{out}: step {written.version}, weights {written.digest}")


@app.command()
def audit(run: RunName, state: StateOption = None) -> None:
    """Compare a run's journal, shards and books; exit code 1 if anything is unaccounted for."""
    from cli.demo import control_client
    from cli.reach import advised

    folder = state_folder(state)

    async def ask() -> dict[str, Any]:
        async with control_client(folder) as client:
            status = await client.run_status(run)
            return {"books": status["books"], "failures": status["failures"], **await client.audit(run)}

    with advised(folder):
        answer = wait(ask())
    show(answer)
    if not answer["books"]["balanced"] or answer["tokens_lost"] or answer["mismatches"]:
        raise typer.Exit(1)


def main() -> NoReturn:
    """Entry point: errors raised on purpose are shown without a trace; exit code 2 for a wrong configuration."""
    code = _run()
    sys.stdout.flush()
    sys.stderr.flush()
    # The threads of Temporal's client can touch an interpreter that is being taken down, which aborts the process.
    os._exit(code)


def _run() -> int:
    try:
        app(standalone_mode=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except SeamlessFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _ports(given: list[str] | None) -> dict[str, int]:
    ports = {}
    for item in given or []:
        name, _, port = item.partition("=")
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--port {item!r} is not of the form name=number, as in ui=8233")
        ports[name] = int(port)
    return ports
