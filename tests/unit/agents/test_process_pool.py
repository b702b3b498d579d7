"""What becomes of a session when the agent's code misbehaves, and of the sessions beside it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from children import started

from storage.errors import ConfigError
from workers.agents.outcome import Outcome
from workers.agents.pool import ProcessPool, Setup

LLM = {"base_url": "http://127.0.0.1:9/v1", "api_key": "sfs_x", "model": "policy"}
LONG_S = 60.0

AGENTS = """
import asyncio, os, sys, time

async def work(task, llm, **options):
    if task["do"] == "answer":
        return {"task": task, "model": llm.model, "options": options, "pid": os.getpid()}
    if task["do"] == "raise":
        raise ValueError("the agent's own mistake")
    if task["do"] == "refuse":
        raise ConnectionRefusedError("no proxy there")
    if task["do"] == "leave":
        sys.exit(3)
    if task["do"] == "sleep":
        await asyncio.sleep(task["s"])
        return "slept"
    if task["do"] == "stay":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    if task["do"] == "block":
        await asyncio.gather(block_here())
    if task["do"] == "die":
        os._exit(9)
    if task["do"] == "object":
        return object()

async def block_here():
    time.sleep(3600)

def plain(task, llm):
    if task["do"] == "hang":
        time.sleep(3600)
    return "from a thread"

def printing(task, llm):
    print("on stdout")
    print("on stderr", file=sys.stderr)
    return "printed"
"""

WORKER = """
import asyncio, sys
from workers.agents.pool import ProcessPool, Setup

async def start(function, do):
    pool = ProcessPool(Setup("agent", f"their_agents:{function}", sys.argv[1]))
    payload = {"task": {"do": do}, "llm": {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "m"}}
    running = asyncio.create_task(pool.run("s1", payload, 3600))
    while not pool._children:
        await asyncio.sleep(0.01)
    print(pool._children[0]._process.pid, flush=True)
    return running

async def main():
    await asyncio.gather(await start("work", "block"), await start("plain", "hang"))

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Callable[..., ProcessPool]]:
    (tmp_path / "their_agents.py").write_text(AGENTS)
    made: list[ProcessPool] = []

    def make(function: str = "work", *, processes: int = 1, options: dict[str, object] | None = None) -> ProcessPool:
        setup = Setup("agent", f"their_agents:{function}", str(tmp_path), options or {})
        made.append(ProcessPool(setup, processes))
        return made[-1]

    yield make
    for one in made:
        await one.close()
    assert started(recursive=True) == []


def run(pool: ProcessPool, job: str, limit_s: float = LONG_S, **task: object) -> asyncio.Task[Outcome]:
    return asyncio.create_task(pool.run(job, {"task": task, "llm": LLM}, limit_s))


async def test_an_agent_gets_task_model_and_options_and_its_json_comes_back(pool: Callable[..., ProcessPool]) -> None:
    outcome = await run(pool(options={"depth": 2}), "s1", do="answer", question="7+41")
    assert outcome.status == "ok"
    assert outcome.value["task"] == {"do": "answer", "question": "7+41"}
    assert outcome.value["model"] == "policy"
    assert outcome.value["options"] == {"depth": 2}
    assert outcome.value["pid"] != os.getpid()


async def test_many_sessions_run_at_the_same_time_in_one_process(pool: Callable[..., ProcessPool]) -> None:
    agents = pool()
    sleeping = [run(agents, f"s{n}", do="sleep", s=0.5) for n in range(40)]
    outcomes = await asyncio.gather(*sleeping, run(agents, "last", do="answer"))
    assert {outcome.value for outcome in outcomes[:-1]} == {"slept"}
    assert len(started()) == 1


async def test_an_agent_that_raises_fails_with_its_traceback_and_harms_nobody(pool: Callable[..., ProcessPool]) -> None:
    agents = pool()
    beside = run(agents, "s2", do="sleep", s=0.3)
    outcome = await run(agents, "s1", do="raise")
    assert outcome.status == "error"
    assert "ValueError: the agent's own mistake" in outcome.detail
    assert "their_agents.py" in outcome.detail
    assert (await beside).status == "ok"


async def test_an_agent_that_calls_sys_exit_fails_and_its_process_goes_on(pool: Callable[..., ProcessPool]) -> None:
    agents = pool()
    before = (await run(agents, "s0", do="answer")).value["pid"]
    assert (await run(agents, "s1", do="leave")).status == "error"
    assert (await run(agents, "s2", do="answer")).value["pid"] == before


async def test_an_agent_that_cannot_reach_the_proxy_is_an_infrastructure_failure(
    pool: Callable[..., ProcessPool],
) -> None:
    assert (await run(pool(), "s1", do="refuse")).status == "infra"


async def test_an_output_that_is_no_json_is_the_agents_error(pool: Callable[..., ProcessPool]) -> None:
    outcome = await run(pool(), "s1", do="object")
    assert outcome.status == "error"
    assert "not JSON" in outcome.detail


async def test_a_waiting_agent_is_cancelled_at_its_limit_and_says_where_it_was(
    pool: Callable[..., ProcessPool],
) -> None:
    agents = pool()
    before = (await run(agents, "s0", do="answer")).value["pid"]
    outcome = await run(agents, "s1", 0.2, do="sleep", s=3600)
    assert outcome.status == "timeout"
    assert "asyncio.sleep(task" in outcome.detail
    assert (await run(agents, "s2", do="answer")).value["pid"] == before


async def test_an_agent_that_ignores_cancellation_costs_its_process_but_no_neighbour(
    pool: Callable[..., ProcessPool],
) -> None:
    agents = pool()
    before = (await run(agents, "s0", do="answer")).value["pid"]
    beside = run(agents, "s2", do="sleep", s=2.5)
    assert (await run(agents, "s1", 0.2, do="stay")).status == "timeout"
    assert (await run(agents, "s3", do="answer")).value["pid"] != before
    assert (await beside).status == "ok"
    assert not psutil.pid_exists(before)


async def test_a_thread_that_hangs_costs_its_process_but_no_neighbour(pool: Callable[..., ProcessPool]) -> None:
    agents = pool("plain")
    outcome = await run(agents, "s1", 0.2, do="hang")
    assert outcome.status == "timeout"
    assert "time.sleep(3600)" in outcome.detail
    assert (await run(agents, "s2", do="answer")).value == "from a thread"


async def test_an_agent_that_blocks_the_loop_is_found_and_its_neighbours_get_a_new_attempt(
    pool: Callable[..., ProcessPool],
) -> None:
    agents = pool()
    beside = run(agents, "s2", do="sleep", s=30)
    await run(agents, "s0", do="answer")
    outcome = await run(agents, "s1", 0.2, do="block")
    assert outcome.status == "timeout"
    assert "in block_here" in outcome.detail
    assert (await beside).status == "infra"
    assert (await run(agents, "s3", do="answer")).status == "ok"


async def test_a_process_that_dies_with_one_session_was_ended_by_it(pool: Callable[..., ProcessPool]) -> None:
    outcome = await run(pool(), "s1", do="die")
    assert outcome.status == "error"
    assert "exit code 9" in outcome.detail


async def test_a_process_that_dies_with_several_sessions_gives_all_of_them_a_new_attempt(
    pool: Callable[..., ProcessPool],
) -> None:
    agents = pool()
    beside = run(agents, "s2", do="sleep", s=30)
    await run(agents, "s0", do="answer")
    assert (await run(agents, "s1", do="die")).status == "infra"
    assert (await beside).status == "infra"
    assert (await run(agents, "s3", do="answer")).status == "ok"


async def test_no_process_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "their_agents.py").write_text(AGENTS)
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    pids = [int(await worker.stdout.readline()) for _ in range(2)]
    worker.kill()
    await worker.wait()
    async with asyncio.timeout(20):
        while any(map(alive, pids)):  # noqa: ASYNC110 (other processes set no event)
            await asyncio.sleep(0.02)


async def test_what_an_agent_prints_disturbs_nothing(pool: Callable[..., ProcessPool]) -> None:
    agents = pool("printing")
    assert [(await run(agents, f"s{n}", do="answer")).value for n in range(3)] == ["printed"] * 3


async def test_sessions_are_spread_over_the_processes(pool: Callable[..., ProcessPool]) -> None:
    agents = pool(processes=2)
    busy = run(agents, "s1", do="sleep", s=2.0)
    await asyncio.sleep(0)
    pids = {(await run(agents, f"a{n}", do="answer")).value["pid"] for n in range(3)}
    assert len(pids) == 1
    assert len(started()) == 2
    await busy


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("", "their_agents:absent", "has no function 'absent'"),
        ("", "no_such_module:run", "no module 'no_such_module'"),
        ("", "their_agents", "package.module:function"),
        ("raise RuntimeError('at import')", "broken:run", "RuntimeError: at import"),
        ("import os; os._exit(4)", "broken:run", "exit code 4"),
        ("run = 3", "broken:run", "is no function"),
    ],
)
async def test_code_that_cannot_be_loaded_is_a_mistake_in_the_run_file(
    tmp_path: Path, source: str, target: str, words: str
) -> None:
    (tmp_path / "their_agents.py").write_text(AGENTS)
    (tmp_path / "broken.py").write_text(source)
    agents = ProcessPool(Setup("agent", target, str(tmp_path)))
    with pytest.raises(ConfigError, match=words):
        await run(agents, "s1", do="answer")
    await agents.close()
    assert started(recursive=True) == []


async def test_a_module_of_the_user_cannot_hide_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "storage.py").write_text("raise RuntimeError('this must not be imported')")
    (tmp_path / "mine.py").write_text("import storage.errors\nasync def run(task, llm):\n    return storage.__name__")
    agents = ProcessPool(Setup("agent", "mine:run", str(tmp_path)))
    assert (await run(agents, "s1")).value == "storage"
    await agents.close()


async def test_an_agent_sees_its_code_folder_but_not_the_clusters_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEAMLESSFLOW_STATE", "/state")
    monkeypatch.setenv("SEAMLESSFLOW_S3_SECRET_KEY", "secret")
    (tmp_path / "mine.py").write_text(
        "import os\nasync def run(task, llm):\n    ours = [v for v in os.environ if v.startswith('SEAMLESSFLOW')]\n"
        "    return [os.getcwd(), ours]"
    )
    agents = ProcessPool(Setup("agent", "mine:run", str(tmp_path)))
    assert (await run(agents, "s1")).value == [str(tmp_path), []]
    await agents.close()
