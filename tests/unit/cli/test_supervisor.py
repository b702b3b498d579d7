"""The supervisor over small stand-in services: order, restarts, failure, and what a killed supervisor leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import addresses, stack
from cli.processes import wait_gone, write_json
from cli.servers import Probe, Service
from cli.supervisor import ServiceFailed, Supervisor, describe_exit
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.residency import ProcessRef

SERVE = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), {handler}).serve_forever()"
HANDLER = (
    "type('H', (http.server.BaseHTTPRequestHandler,), {'do_GET': lambda s: (s.send_response(200), s.end_headers()), "
    "'log_message': lambda *a: None})"
)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path)
    folder.logs.mkdir()
    ports = addresses.choose_ports({}, {})
    folder.write(
        ClusterConfig(
            temporal=f"127.0.0.1:{ports['temporal']}",
            proxy=f"http://127.0.0.1:{ports['proxy']}",
            s3=f"127.0.0.1:{ports['s3']}",
            ledger_url="sqlite://",
            journal_url="sqlite://",
        ),
        Secrets(control_key="c", s3_access_key="a", s3_secret_key="s"),
    )
    return folder


def server(name: str, stage: int = 0) -> Service:
    port = addresses.choose_ports({}, {})["proxy"]
    argv = (sys.executable, "-c", SERVE.format(handler=HANDLER), str(port))
    return Service(name, argv, Probe("http", f"http://127.0.0.1:{port}/", limit_s=60), stage, grace_s=5)


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is awaited happens in another process
            await asyncio.sleep(0.02)
    assert condition(), what


async def test_stages_start_one_after_the_other_and_everything_stops(state: StateFolder) -> None:
    supervisor = Supervisor(state, [server("first"), server("second", stage=1)])
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.status.phase == "running", "both are ready")
    first, second = (supervisor.status.services[name].process for name in ("first", "second"))
    assert first is not None
    assert second is not None
    assert first.start_time <= second.start_time
    supervisor.stopping.set()
    await running
    assert not first.alive()
    assert not second.alive()
    seen = stack.StackStatus.read(state)
    assert seen is not None
    assert (seen.phase, {row.state for row in seen.services.values()}) == ("stopped", {"stopped"})


async def test_a_service_that_is_killed_runs_again_and_the_status_says_how_it_ended(state: StateFolder) -> None:
    supervisor = Supervisor(state, [server("victim")])
    running = asyncio.create_task(supervisor.run())
    row = supervisor.status.services["victim"]
    await until(lambda: row.state == "ready", "ready")
    assert row.process is not None
    before = row.process
    os.kill(before.pid, signal.SIGKILL)
    await until(lambda: row.restarts == 1 and row.state == "ready", "ready again")
    assert row.process is not None
    assert row.process.pid != before.pid
    assert row.last_exit == "killed by SIGKILL"
    supervisor.stopping.set()
    await running


async def test_everything_stops_when_the_state_folder_is_removed(
    state: StateFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    resident = ProcessRef.of(engine.pid)
    state.node("n0").mkdir(parents=True)
    write_json(state.node("n0") / "engine.json", resident.model_dump())
    supervisor = Supervisor(state, [server("service")])
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.status.phase == "running", "ready")
    service = supervisor.status.services["service"].process
    assert service is not None
    state.root.rename(tmp_path_factory.mktemp("removed") / "state")
    state.root.mkdir()  # another cluster may be made there at once
    await asyncio.wait_for(running, 60)
    assert not service.alive()
    assert not resident.alive()
    assert list(state.root.iterdir()) == [], "the new folder is not ours"
    await engine.wait()


async def test_a_service_that_never_gets_ready_fails_the_cluster_and_leaves_nothing_running(state: StateFolder) -> None:
    broken = Service(
        "broken", (sys.executable, "-c", "raise SystemExit('no such model')"), Probe("http", "http://127.0.0.1:9/")
    )
    good = server("good")
    supervisor = Supervisor(state, [good, broken])
    with pytest.raises(ServiceFailed, match=r"broken ended 3 times before it was ready: exit code 1\n.*no such model"):
        await supervisor.run()
    seen = stack.StackStatus.read(state)
    assert seen is not None
    assert seen.phase == "failed"
    assert "no such model" in seen.error
    assert seen.services["good"].process is None


async def test_children_of_a_service_end_with_it(state: StateFolder, tmp_path: Path) -> None:
    note = tmp_path / "child.pid"
    child = (
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '600']); open({str(note)!r}, 'w').write(str(p.pid));"
    )
    port = addresses.choose_ports({}, {})["proxy"]
    service = Service(
        "parent",
        (sys.executable, "-c", child + "import http.server;" + SERVE.format(handler=HANDLER), str(port)),
        Probe("http", f"http://127.0.0.1:{port}/"),
    )
    supervisor = Supervisor(state, [service])
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.status.phase == "running", "ready")
    record = ProcessRef.of(int(note.read_text()))
    supervisor.stopping.set()
    await running
    assert wait_gone([record], 5)


async def test_what_a_killed_supervisor_left_is_stopped_before_new_services_start(state: StateFolder) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    record = ProcessRef.of(process.pid)
    left = stack.StackStatus(supervisor=ProcessRef(pid=2**22 - 1, start_time=0.0), phase="running")
    left.services["orphan"] = stack.ServiceStatus(state="ready", process=record)
    left.write(state)
    assert not stack.running(state)
    assert await asyncio.to_thread(stack.stop_leftovers, state) == 1
    assert not record.alive()
    await process.wait()


async def test_down_ends_resident_engines_and_ranks_but_no_stranger_that_got_the_pid(state: StateFolder) -> None:
    engine = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    stranger = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    engine_record, stranger_record = ProcessRef.of(engine.pid), ProcessRef.of(stranger.pid)
    folder = state.node("n0")
    folder.mkdir(parents=True)
    write_json(folder / "engine.json", {**engine_record.model_dump(), "port": 1, "epoch": 3})
    write_json(folder / "rank-0.json", {"pid": stranger.pid, "start_time": stranger_record.start_time - 1000})
    rank = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    rank_record = ProcessRef.of(rank.pid)
    write_json(folder / "gang.json", {"gang": "g1", "processes": [rank_record.model_dump()]})
    (folder / "torn.json").write_text('{"pid": ')
    assert await asyncio.to_thread(stack.down, state) == 2
    assert not engine_record.alive()
    assert not rank_record.alive()
    assert stranger_record.alive()
    stranger.kill()
    await asyncio.gather(engine.wait(), rank.wait(), stranger.wait())


def test_a_parked_engine_is_ended_although_it_is_stopped(state: StateFolder, tmp_path: Path) -> None:
    told = tmp_path / "got-sigterm"
    script = 'trap "touch $0; exit 0" TERM; echo ready; while :; do sleep 0.1; done'
    command = ["bash", "-c", script, str(told)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        reference = ProcessRef.of(engine.pid)
        os.kill(engine.pid, signal.SIGSTOP)
        state.node("n0").mkdir(parents=True)
        write_json(state.node("n0") / "engine.json", reference.model_dump())
        assert stack.stop_residents(state) == 1
        assert not reference.alive()
    assert told.exists(), "it was asked to end before it was killed"


def test_only_one_supervisor_can_hold_a_state_folder(state: StateFolder) -> None:
    assert not stack.running(state)
    with stack.locked(state, stack.LOCK):
        assert stack.running(state)
        with pytest.raises(BlockingIOError), stack.locked(state, stack.LOCK):
            pass
    assert not stack.running(state)


@pytest.mark.parametrize(("code", "text"), [(-9, "killed by SIGKILL"), (1, "exit code 1"), (0, "exit code 0")])
def test_exits_are_told_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
