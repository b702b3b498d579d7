"""`seamlessflow export`: what was trained loads in transformers and in every engine, with the trainer's log-probs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from books import Books
from memory_store import MemoryStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.export import export
from storage.ports import free_port
from storage.shards import Generation, SessionRow, Shard, Span
from storage.weights import WeightsStore
from tests.contract.engines.driver import Bench, Checkpoints
from tests.contract.engines.models import logprobs, text
from tests.contract.engines.rigs.base import Rig
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.trainer.messages import UpdateMetrics, UpdateResult
from workflows.spec import RunSpec

TEXTS = ([1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 47], list(range(60)), [7] * 20)
"""Prompts; what an engine writes behind them is compared too."""
NEAR = 1e-3
"""Largest difference of a log-prob in float32."""
TRAINER = """
import json, sys
from pathlib import Path
from workers.profiling.train import _sequence
from workers.trainer.deepspeed_backend import DeepSpeedBackend
from workers.trainer.launch import Launch
from workers.trainer.objective import Objective

given = json.load(sys.stdin)
launch = Launch(**given["launch"], rank=0, world_size=1, control_port=1, token="x" * 16, epoch=1)
backend = DeepSpeedBackend(launch)
backend.initialize()
batch = _sequence(0, 40, 64, 1)
backend.accumulate([batch], Objective(launch.spec.algorithm, 1.0), 1.0)
backend.update(1.0)
backend.publish(Path(given["folder"]))
(found,) = backend.logprobs([batch], 1.0)
print("TRAINED" + json.dumps([*map(list, ([batch.ids_T[0].item()], batch.target_N.tolist(), found.tolist()))]))
"""


@dataclass(frozen=True)
class Exported:
    """A directory, and what the trainer says of a text: prompt, answer, log-probs of the answer."""

    folder: Path
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def exported(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """One real update of the tiny model, published, committed and exported as step 1."""
    root = tmp_path_factory.mktemp("exported")
    state, spec = StateFolder(root / "state"), run_file(checkpoints.first)
    where = {name: "unused" for name in ("temporal", "proxy", "s3", "journal_url")}
    state.write(
        ClusterConfig(ledger_url=f"sqlite:///{root}/ledger.db", **where),
        Secrets(control_key="k", s3_access_key="a", s3_secret_key="s"),
    )
    store = WeightsStore(state.weights(spec.run))
    temporary = store.begin(1)
    launch = {"spec": spec.model_dump(mode="json"), "state": str(state.root), "master_port": free_port()}
    given = json.dumps({"launch": launch, "folder": str(temporary)})
    done = subprocess.run([sys.executable, "-c", TRAINER], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    weights = store.commit(1, temporary)
    commit(Books(root / "ledger.db", MemoryStore(), spec.model_dump(mode="json")), weights.path, weights.digest)
    found = export(state, spec.run, root / "model", step=1)
    assert (found.version, found.digest) == (1, weights.digest)
    return Exported(Path(found.path), *json.loads(done.stdout.split("TRAINED")[1]))


def run_file(model: Path) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": Books.run,
            "model": {"path": str(model)},
            "data": {"path": "tasks.jsonl"},
            "reward": {"target": "module:function"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
            "trainer": {"learning_rate": 1e-2},
        }
    )


def commit(books: Books, path: str, digest: str) -> None:
    """One group is trained by step 0, which makes version 1."""
    ids = np.array([1, 2], np.int32)
    one, nothing = np.array([1], np.int32), np.array([], np.int32)
    spans = [Span(-1, "prompt", ids, np.array([], np.float32), (nothing, nothing), "")]
    generations, sessions = [], []
    for number, name in enumerate(("s0", "s1")):
        spans.append(Span(0, "completion", ids + number, -ids.astype(np.float32), (one * 0, one * 2), f"{name}/g"))
        generations.append(Generation(f"{name}/g", name, 0, 0, (number + 1,), "stop", 1.0, 1.0, True, ()))
        sessions.append(SessionRow(name, number, 1, float(number), "finished", turns=1, forks=0, leaves=(number + 1,)))
    books.produce([Shard(books.run, "train", 0, tuple(spans), tuple(generations), tuple(sessions))])
    books.claim(0)
    books.commit(
        UpdateResult(
            lineage=0,
            step=0,
            version=1,
            checkpoint_path="unused",
            checkpoint_digest="0" * 64,
            weights_path=path,
            weights_digest=digest,
            metrics=UpdateMetrics.model_validate({name: 0 for name in UpdateMetrics.model_fields}),
        )
    )
    books.ledger.close()


def test_it_loads_in_transformers_with_the_log_probs_of_the_trainer(
    exported: Exported, checkpoints: Checkpoints, record_property: Any
) -> None:
    found = logprobs(exported.folder, exported.prompt, exported.answer)
    gap = max(abs(mine - theirs) for mine, theirs in zip(found, exported.logprobs, strict=True))
    record_property("logprob_gap_max", gap)
    assert gap <= 1e-5
    before = logprobs(checkpoints.first, exported.prompt, exported.answer)
    assert max(abs(old - new) for old, new in zip(before, found, strict=True)) > 0.01, "an update was made"


def test_its_tokenizer_comes_along(exported: Exported) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(exported.folder)
    assert tokenizer("HELLO").input_ids == [7, 4, 11, 11, 14]
    model: Any = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert model.config.vocab_size == 64


async def test_every_engine_serves_it_with_the_log_probs_of_transformers(
    exported: Exported, rig: Rig, checkpoints: Checkpoints, tmp_path: Path, record_property: Any
) -> None:
    if "policy" not in rig.abilities:
        pytest.skip(f"{rig.kind} serves no model")
    record_property("engine", rig.kind)
    gap = 0.0
    with rig.start(exported.folder, tmp_path) as process:
        bench = Bench(rig, process, checkpoints, rig.connect(process.url))
        try:
            for prompt in TEXTS:
                generation = await bench.generate(prompt=prompt, tokens=48)
                expected = logprobs(exported.folder, prompt, generation.ids)
                assert len(generation.ids) == 48, text(generation.ids)
                gap = max(gap, *(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)))
        finally:
            await bench.engine.close()
    record_property("logprob_gap_max", gap)
    print(f"{rig.kind}: largest difference {gap:.2g}")
    assert gap <= NEAR
