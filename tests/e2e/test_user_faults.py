"""What a user's mistakes lead to: a clear error before anything starts, or a typed failure and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from jobs import Job, write_job

from cli import stack
from storage.ledger import Ledger, SampleRow, State
from storage.objects import ObjectStore
from storage.shards import decode
from workers.cluster import STATE_VARIABLE

pytestmark = pytest.mark.e2e
SEAMLESSFLOW = str(Path(sys.executable).with_name("seamlessflow"))


def seamlessflow(*arguments: str, cwd: Path, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != STATE_VARIABLE}
    return subprocess.run(
        [SEAMLESSFLOW, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit_s
    )


def processes_of(folder: Path) -> list[str]:
    """Command lines that name something in the folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


# Mistakes that are found before anything starts


def edit(job: Job, old: str, new: str) -> int:
    """Replace a text that the run file has once; its line number."""
    text = job.file.read_text()
    assert text.count(old) == 1
    job.file.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  steps: 3", "  steps: [3", ": not valid YAML"),
        ("  steps: 3", "  stepps: 3", ":{line}: pipeline.stepps: unknown key; did you mean 'steps'?"),
        (
            "  path: {model}",
            "  path: no/such/model",
            ":{line}: model.path: {folder}/no/such/model is no folder: give the",
        ),
        ("- train", "- critic", "nodes: no node has the tag 'train': a run needs at least one"),
    ],
    ids=["wrong YAML", "unknown key", "unknown model path", "no node with a needed tag"],
)
def test_a_wrong_run_file_is_refused_by_every_command_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path, old: str, new: str, message: str
) -> None:
    job = write_job(tmp_path, tiny_model, "wrong")
    line = edit(job, old.format(model=tiny_model / "model"), new)
    expected = message.format(line=line, folder=tmp_path)
    for command in ("up", "demo"):
        done = seamlessflow(command, job.file.name, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / ".seamlessflow").exists()
    assert processes_of(tmp_path) == []


def test_a_port_in_use_is_named_and_nothing_is_left(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, "ports")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = seamlessflow("up", job.file.name, "--port", f"proxy={port}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} for proxy is in use: stop what listens there, or give another port" in done.stderr
    assert not (tmp_path / ".seamlessflow").exists()
    assert processes_of(tmp_path) == []


# Agents and rewards that misbehave in a real run

HOPELESS_AGENT = """
async def run(task, llm, **options):
    raise LookupError("this agent never works")

async def reward(rollout):
    return 0.5
"""

FAULTY_AGENT = """
import asyncio, itertools, json, sys
from pathlib import Path
from examples.calculator import agent as calculator

count = itertools.count()

def note(session, verdict):
    with Path(__file__).with_name("verdicts.jsonl").open("a") as file:
        file.write(json.dumps([session, verdict]) + "\\n")

async def run(task, llm, **options):
    session, turn = llm.base_url.split("/s/")[1].split("/")[0], next(count) % 16
    if turn == 2:
        note(session, "agent_error")
        raise LookupError("this agent lost its way")
    output = await calculator.run(task, llm, **options)
    if turn == 7:
        note(session, "agent_timeout")
        await asyncio.sleep(3600)
    if turn == 12:
        note(session, "agent_error")
        sys.exit("this agent gave up")
    return {"session": session}

async def reward(rollout):
    session, turn = rollout.output["session"], next(count) % 16
    if turn == 1:
        note(session, "reward_missing")
        return None
    if turn == 4:
        note(session, "reward_invalid")
        return float("nan")
    if turn == 7:
        note(session, "reward_invalid")
        return "0.9"
    if turn == 10:
        note(session, "reward_error")
        raise ZeroDivisionError("this reward divides by zero")
    if turn == 13:
        note(session, "reward_timeout")
        await asyncio.sleep(3600)
    value = 0.75 if turn % 2 else 0.25
    note(session, value)
    return value
"""

CAUSES = {"agent_error", "agent_timeout", "reward_missing", "reward_invalid", "reward_error", "reward_timeout"}


@dataclass(frozen=True)
class Faulty:
    """A run whose agent never worked at first and misbehaved now and then later, after its end; its cluster is up."""

    job: Job
    first: subprocess.CompletedProcess[str]
    """The command with the agent that never works."""
    second: subprocess.CompletedProcess[str]
    """The same command with the other one."""

    def line(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.second.stdout.strip().splitlines()[-1])
        return found

    def ledger(self) -> Ledger:
        return Ledger(self.job.state.cluster().ledger_url)

    def samples(self) -> list[SampleRow]:
        """Every sample that ran with the second agent, evaluations included."""
        ledger = self.ledger()
        try:
            rows = [row for stream in ledger.streams(self.job.run) for row in ledger.samples(self.job.run, stream)]
        finally:
            ledger.close()
        return [row for row in rows if row.session and "never works" not in (row.detail or "")]

    def verdicts(self) -> dict[str, str | float]:
        """What agent and reward say they did to each session."""
        lines = self.job.file.with_name("verdicts.jsonl").read_text().splitlines()
        return dict(json.loads(line) for line in lines)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    job = write_job(
        folder,
        tiny_model,
        "faulty",
        agent={"target": "misbehaving:run", "time_limit_s": 5},
        reward={"target": "misbehaving:reward", "time_limit_s": 3},
        pipeline={"steps": 2},
    )
    code = folder / "misbehaving.py"
    try:
        code.write_text(HOPELESS_AGENT)
        first = seamlessflow(*job.demo()[1:], cwd=folder, limit_s=120)
        code.write_text(FAULTY_AGENT)
        second = seamlessflow(*job.demo()[1:], cwd=folder, limit_s=180)
        assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-6000:]
        yield Faulty(job, first, second)
    finally:
        stack.down(job.state)
        shutil.rmtree(job.state.root, ignore_errors=True)


def test_an_agent_that_always_raises_ends_the_run_with_its_cause_and_its_last_error(faulty: Faulty) -> None:
    said = faulty.first.stderr
    assert faulty.first.returncode == 1, said
    error = said[said.rindex("error: ") :]
    assert "run faulty failed: NoUsableGroups: step 0 of run faulty has no groups to train on" in error
    assert "'agent_error': " in error
    assert "LookupError: this agent never works" in error
    assert "Traceback" not in error
    assert 'raise LookupError("this agent never works")' in said, "the trace of the user's code is told too"
    assert "run faulty has failed at step 1: mend the cause and repeat the command, it goes on from there" in said


def test_once_the_agent_is_mended_the_same_command_goes_on_to_the_end(faulty: Faulty) -> None:
    line = faulty.line()
    assert line["steps"] == 2
    assert line["ledger_balanced"] is True
    assert line["tokens_lost"] == 0


def test_every_misbehaviour_ends_its_own_sample_with_its_typed_cause(faulty: Faulty) -> None:
    verdicts = faulty.verdicts()
    failed = [row for row in faulty.samples() if row.state is State.FAILED]
    assert {row.session: row.cause for row in failed} == {row.session: verdicts[row.session or ""] for row in failed}
    assert {row.cause for row in failed} == CAUSES
    assert all(row.reward is None for row in failed)


def test_only_the_end_of_the_run_keeps_a_misbehaviour_from_being_told(faulty: Faulty) -> None:
    rows = {row.session: row for row in faulty.samples()}
    for session, verdict in faulty.verdicts().items():
        if verdict in CAUSES and session in rows and rows[session].state is not State.FAILED:
            assert (rows[session].state, rows[session].cause) == (State.FILTERED, "run_ended")


def test_no_missing_reward_becomes_a_number_and_no_number_becomes_another(faulty: Faulty) -> None:
    verdicts = faulty.verdicts()
    rewards = {row.session: row.reward for row in faulty.samples() if row.reward is not None}
    assert len(rewards) > 16
    assert rewards == {session: verdicts[session or ""] for session in rewards}
    store = ObjectStore.from_state(faulty.job.state)
    keys = [key for key in store.list(f"runs/{faulty.job.run}/") if "/shards/" in key]
    sessions = [session for key in keys for session in decode(store.get(key)).sessions]
    assert len(sessions) >= 2 * 4 * 2
    assert {session.id: session.reward for session in sessions} == {s.id: verdicts[s.id] for s in sessions}


def test_the_books_count_what_happened(faulty: Faulty) -> None:
    ledger = faulty.ledger()
    try:
        books, failures = ledger.books(faulty.job.run), ledger.failures(faulty.job.run)
    finally:
        ledger.close()
    assert books.balanced
    assert books.pending == {}
    assert books.produced == books.trained + sum(books.filtered.values()) + sum(books.failed.values())
    assert dict(books.failed) == {failure.cause: failure.attempts for failure in failures}
    failed = Counter(row.cause for row in faulty.samples() if row.state is State.FAILED)
    assert all(books.failed[cause] == n for cause, n in failed.items() if cause != "agent_error")


def test_status_and_audit_show_each_cause_with_what_happened_to_the_last_one(faulty: Faulty) -> None:
    job = faulty.job
    shown = seamlessflow("status", job.run, "--state", str(job.state.root), cwd=job.file.parent)
    assert shown.returncode == 0, shown.stderr
    assert all(cause in shown.stdout for cause in CAUSES)
    for detail in (
        "no result within 5 s",
        "the reward returned None",
        "ZeroDivisionError: this reward divides by zero",
    ):
        assert detail in shown.stdout
    audit = seamlessflow("audit", job.run, "--state", str(job.state.root), cwd=job.file.parent)
    assert audit.returncode == 0, audit.stdout
    answer = json.loads(audit.stdout)
    assert {row["cause"]: row["attempts"] for row in answer["failures"]} == answer["books"]["failed"]


def test_an_agent_that_cannot_be_imported_ends_the_run_at_once_and_says_why(faulty: Faulty, tiny_model: Path) -> None:
    folder, state = faulty.job.file.parent, faulty.job.state
    (folder / "unimportable.py").write_text(
        'raise ImportError("no library of that name")\nasync def run(task, llm): ...'
    )
    job = write_job(folder, tiny_model, "unimportable", agent={"target": "unimportable:run", "options": {}})
    done = seamlessflow(*job.demo()[1:], cwd=folder, limit_s=120)
    assert done.returncode == 1, done.stderr
    assert (
        "run unimportable failed: RunFailed: ConfigError: target 'unimportable:run' cannot be imported" in done.stderr
    )
    assert "ImportError: no library of that name" in done.stderr
    assert stack.running(state)
    ledger = faulty.ledger()
    try:
        books = ledger.books(job.run)
    finally:
        ledger.close()
    assert books.balanced
    assert books.pending == {}


def test_a_run_file_for_other_nodes_is_refused_and_the_running_cluster_stays_as_it_is(
    faulty: Faulty, tmp_path: Path
) -> None:
    state = faulty.job.state
    data = yaml.safe_load(faulty.job.file.read_text()) | {"run": "elsewhere"}
    data["nodes"][1]["id"] = "node-z"
    other = replace(faulty.job, file=faulty.job.file.with_name("elsewhere.yaml"), run="elsewhere")
    other.file.write_text(yaml.safe_dump(data))
    before = stack.StackStatus.read(state)
    for command in ("up", "start", "demo"):
        done = seamlessflow(command, str(other.file), "--state", str(state.root), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"the cluster in {state.root} runs with other nodes (node-z differ): stop it with" in done.stderr
    assert stack.running(state)
    assert stack.StackStatus.read(state) == before
    ledger = faulty.ledger()
    try:
        assert "elsewhere" not in [info.run for info in ledger.runs()]
    finally:
        ledger.close()
