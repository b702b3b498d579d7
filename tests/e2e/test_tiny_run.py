"""What a user may rely on after a run has ended (invariants I1, I2, I4 and the shape of a step)."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from benchmarks.learning.curves import group_rewards, staleness
from cli.metrics import OF_THE_BATCH
from storage.ledger import TRAIN, Ledger
from storage.objects import ObjectStore
from storage.shards import Shard, decode
from workers.trainer.messages import UpdateMetrics
from workflows.messages import RunStatus
from workflows.scheduling.switching import STAY

pytestmark = pytest.mark.e2e
Finished = tuple[Job, dict[str, Any]]


def shards(job: Job) -> list[Shard]:
    store = ObjectStore.from_state(job.state)
    keys = [key for key in store.list(f"runs/{job.run}/") if "/shards/" in key]
    return [decode(store.get(key)) for key in keys]


def engine_logs(job: Job) -> dict[str, dict[str, Any]]:
    """What the engines say they read and wrote, by request id."""
    requests: dict[str, dict[str, Any]] = defaultdict(lambda: {"ids": [], "logprobs": [], "versions": []})
    for path in job.state.root.glob("nodes/*/tokens.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            request = requests[event["rid"]]
            if "input_ids" in event:
                request["input_ids"] = event["input_ids"]
            if "ids" in event:
                request["ids"] += event["ids"]
                request["logprobs"] += event["logprobs"]
                request["versions"] += [int(event["version"])] * len(event["ids"])
    return requests


def test_the_json_line_tells_what_was_reached(finished: Finished) -> None:
    _, line = finished
    assert line["bench"] == "tiny-e2e"
    assert line["steps"] == 3
    assert line["ledger_balanced"] is True
    assert line["tokens_lost"] == 0
    assert line["forks"] == 0
    assert 0 <= line["reward_before"] <= 1
    assert 0 <= line["reward_after"] <= 1
    assert 0 <= line["overlap_fraction"] <= 1


def test_the_books_balance_and_nothing_is_pending_at_the_end(finished: Finished) -> None:
    job, _ = finished
    books = job.books()
    assert books.balanced
    assert sum(books.pending.values()) == 0
    assert books.produced == books.trained + sum(books.filtered.values()) + sum(books.failed.values())
    # Groups with equal rewards train nothing; the others of three steps of four groups of four samples are trained.
    assert books.trained + books.filtered.get("zero_variance", 0) >= 3 * 16


def test_the_learning_proof_finds_a_runs_curve_and_its_staleness_in_the_books(finished: Finished) -> None:
    job, line = finished
    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        rewards = group_rewards(ledger.samples(job.run, TRAIN), line["steps"])
        ages = staleness(ledger.steps(job.run))
        trained = ledger.books(job.run).trained
    finally:
        ledger.close()
    assert 4 * sum(len(groups) for groups in rewards) >= trained  # a group may lack a sample that failed
    assert all(0 <= mean <= 1 for groups in rewards for mean in groups)
    assert ages[0] == 0
    assert max(ages) <= 2


def test_engine_and_trainer_agree_on_tokens_of_the_same_weights_in_every_step(finished: Finished) -> None:
    job, _ = finished
    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        steps = [step.metrics for step in ledger.steps(job.run)]
    finally:
        ledger.close()
    assert len(steps) == 3
    assert steps[0]["tokens_on_policy"] == steps[0]["tokens"] > 0
    for metrics in steps:
        assert metrics["logprob_gap_mean"] <= 1e-3
        assert set(metrics) <= {*OF_THE_BATCH, *UpdateMetrics.model_fields}, "docs/metrics.md lacks a figure"


def test_every_token_logprob_and_version_in_every_shard_is_the_engines_own(finished: Finished) -> None:
    job, _ = finished
    logs = engine_logs(job)
    checked = 0
    for shard in shards(job):
        for generation in shard.generations:
            spans = [shard.spans[index] for index in generation.spans]
            ids = np.concatenate([span.ids for span in spans])
            logprobs = np.concatenate([span.logprobs for span in spans])
            versions = np.concatenate([np.repeat(*span.versions) for span in spans])
            prompt = _ids_above(shard, generation.spans[0])
            for segment in generation.segments:
                start, end = segment["start"], segment["end"]
                count = end - start
                if segment["rid"] not in logs:
                    assert count == 0, "only a request that was cut before the engine read it is not in its log"
                    continue
                log = logs[segment["rid"]]
                assert log["input_ids"] == [*prompt, *ids[:start].tolist()]
                assert log["ids"][:count] == ids[start:end].tolist()
                assert np.allclose(log["logprobs"][:count], logprobs[start:end], atol=1e-6)
                known = versions[start:end] >= 0
                assert np.array_equal(np.asarray(log["versions"][:count])[known], versions[start:end][known])
                assert known.all() or not generation.trainable
                checked += count
    sampled = sum(len(span.ids) for shard in shards(job) for span in shard.spans if span.kind == "completion")
    assert checked == sampled > 0


def _ids_above(shard: Shard, span: int) -> list[int]:
    parts = []
    parent = shard.spans[span].parent
    while parent >= 0:
        parts.append(shard.spans[parent].ids)
        parent = shard.spans[parent].parent
    return [int(i) for part in reversed(parts) for i in part]


def test_second_turns_reuse_the_recorded_ids_of_the_first(finished: Finished) -> None:
    job, _ = finished
    followed = 0
    for shard in shards(job):
        assert all(session.forks == 0 for session in shard.sessions)
        ends = {generation.spans[-1] for generation in shard.generations if generation.turn == 0}
        for generation in shard.generations:
            if generation.turn == 1:
                above = shard.spans[generation.spans[0]].parent
                assert shard.spans[above].kind == "prompt"
                assert shard.spans[above].parent in ends
                followed += 1
    assert followed > 10


async def test_history_shows_the_shared_node_roll_out_train_and_roll_out_while_the_other_never_stopped(
    finished: Finished,
) -> None:
    job, _ = finished
    cluster = job.state.cluster()
    client = await Client.connect(cluster.temporal, namespace=cluster.namespace, data_converter=pydantic_data_converter)
    roles: dict[str, list[tuple[datetime, str]]] = defaultdict(list)
    async for row in client.list_workflows("WorkflowType = 'Lease'"):
        history = await client.get_workflow_handle(row.id, run_id=row.run_id).fetch_history()
        for event in history.events:
            if event.HasField("activity_task_scheduled_event_attributes"):
                scheduled = event.activity_task_scheduled_event_attributes
                if scheduled.activity_type.name in ("engine_supervise", "trainer_supervise"):
                    node = scheduled.task_queue.name.removeprefix("sf-node-")
                    roles[node].append((event.event_time.ToDatetime(), scheduled.activity_type.name))
    shared = [role for _, role in sorted(roles["node-a"])]
    # It goes back to rollout after each of the three updates, but where the run decided that this would not pay.
    status = await client.get_workflow_handle(f"run/{job.run}").query("status", result_type=RunStatus)
    stays = sum(record.decision.what == STAY for record in status.switches)
    assert shared == ["engine_supervise", *["trainer_supervise", "engine_supervise"] * (3 - stays)]
    assert [role for _, role in sorted(roles["node-b"])] == ["engine_supervise"]


def test_no_prompt_token_or_secret_is_in_temporal_history(finished: Finished) -> None:
    job, _ = finished
    secrets = job.state.secrets()
    question = json.loads(Path(job.file.parent / "held_out.jsonl").read_text().splitlines()[0])["question"]
    database = b"".join(
        path.read_bytes() for path in sorted(job.state.root.glob("temporal.db*")) if path.suffix != ".db-shm"
    )
    for forbidden in (secrets.control_key, secrets.s3_secret_key, "sfs_", f'"{question}"'):
        assert forbidden.encode() not in database


def test_a_shard_can_be_printed(finished: Finished) -> None:
    job, _ = finished
    store = ObjectStore.from_state(job.state)
    key = next(key for key in store.list(f"runs/{job.run}/") if "/shards/" in key)
    done = subprocess.run(
        job.command("shards", "show", key, "--state", str(job.state.root)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "completion" in done.stdout


def test_the_same_command_again_prints_the_same_result_at_once(finished: Finished) -> None:
    job, line = finished
    done = subprocess.run(job.demo(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    again = json.loads(done.stdout.strip().splitlines()[-1])
    assert {**again, "seconds": 0} == {**line, "seconds": 0}
