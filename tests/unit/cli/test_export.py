"""`seamlessflow export`: what was published for a step, as a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.export import export
from storage.errors import ConfigError, IntegrityError, NotFoundError
from storage.ledger import TRAIN, Ledger, SessionRecord
from storage.weights import WeightsRef, WeightsStore, folder_digest
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workflows.spec import RunSpec

RUN = "demo"


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    folder = StateFolder(tmp_path / "state")
    where = {"temporal": "x", "proxy": "x", "s3": "x", "journal_url": url}
    folder.write(ClusterConfig(ledger_url=url, **where), Secrets(control_key="k", s3_access_key="a", s3_secret_key="s"))
    return folder


@pytest.fixture
def ledger(state: StateFolder, tmp_path: Path) -> Iterator[Ledger]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("initial")
    spec = RunSpec.model_validate(
        {
            "run": RUN,
            "model": {"path": str(model)},
            "data": {"path": "/d"},
            "reward": {"target": "m:f"},
            "nodes": [{"id": "n0", "tags": ["rollout", "train"]}],
        }
    )
    opened = Ledger(state.cluster().ledger_url)
    opened.create_run(RUN, spec.model_dump(mode="json"), spec.digest())
    yield opened
    opened.close()


def finish_group(ledger: Ledger, ordinal: int) -> None:
    """One group of two samples with a shard."""
    ledger.set_admission(RUN, TRAIN, admit_until=ordinal + 1, target_in_flight=2, samples_per_task=2)
    tokens = {"prompt_tokens": 1, "completion_tokens": 1, "turns": 1, "min_version": 0, "max_version": 0}
    names = []
    for claim in ledger.claim_samples(RUN, TRAIN, "w", 2):
        names.append(f"s{ordinal}.{claim.key.sample}")
        ledger.put_session(SessionRecord(names[-1], f"hash-{names[-1]}", RUN, claim.key, claim.attempt))
        ledger.finish_sample(claim.key, claim.attempt, session=names[-1], output=None, **tokens)
        ledger.score_sample(claim.key, claim.attempt, 1.0)
    ledger.commit_group(RUN, TRAIN, ordinal, f"shard-{ordinal}", f"sha-{ordinal}", dict.fromkeys(names, 1))


def publish(state: StateFolder, version: int, content: str) -> WeightsRef:
    store = WeightsStore(state.weights(RUN))
    folder = store.begin(version)
    (folder / "model.safetensors").write_text(content)
    (folder / "tokenizer.json").write_text("{}")
    return store.commit(version, folder)


def trained(state: StateFolder, ledger: Ledger, step: int, content: str) -> WeightsRef:
    """A committed step whose weights are published."""
    ref = publish(state, step + 1, content)
    finish_group(ledger, step)
    ledger.claim_batch(RUN, 0, step, 1, drop_zero_variance=False, min_version=0, take_partial=False)
    ledger.commit_checkpoint(
        RUN,
        0,
        step,
        version=step + 1,
        path="p",
        digest=str(step),
        weights_path=ref.path,
        weights_digest=ref.digest,
        metrics={},
    )
    return ref


def test_the_newest_weights_are_written_with_everything_beside_them(
    state: StateFolder, ledger: Ledger, tmp_path: Path
) -> None:
    trained(state, ledger, 0, "one")
    newest = trained(state, ledger, 1, "two")
    written = export(state, RUN, tmp_path / "out")
    assert (written.version, written.digest) == (2, newest.digest)
    assert folder_digest(tmp_path / "out") == newest.digest
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "seamlessflow.json",
        "tokenizer.json",
    ]
    origin = json.loads((tmp_path / "out" / "seamlessflow.json").read_text())
    assert origin == {"run": RUN, "step": 2, "weights_digest": newest.digest}


def test_a_step_may_be_named_and_0_is_the_initial_model(state: StateFolder, ledger: Ledger, tmp_path: Path) -> None:
    trained(state, ledger, 0, "one")
    trained(state, ledger, 1, "two")
    export(state, RUN, tmp_path / "first", step=1)
    export(state, RUN, tmp_path / "initial", step=0)
    assert (tmp_path / "first" / "model.safetensors").read_text() == "one"
    assert (tmp_path / "initial" / "model.safetensors").read_text() == "initial"


def test_a_step_that_was_made_again_is_exported_as_the_ledger_has_it(
    state: StateFolder, ledger: Ledger, tmp_path: Path
) -> None:
    trained(state, ledger, 0, "committed")
    publish(state, 1, "made again, and never committed")
    export(state, RUN, tmp_path / "out", step=1)
    assert (tmp_path / "out" / "model.safetensors").read_text() == "committed"


def test_nothing_is_overwritten(state: StateFolder, ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(state, RUN, tmp_path / "out")


def test_collected_weights_are_named_with_what_is_kept(state: StateFolder, ledger: Ledger, tmp_path: Path) -> None:
    for step in range(4):
        trained(state, ledger, step, str(step))
    WeightsStore(state.weights(RUN)).collect(1, every=2)
    with pytest.raises(NotFoundError, match=r"step 1 of run demo are collected; these are kept: 2, 4"):
        export(state, RUN, tmp_path / "out", step=1)
    with pytest.raises(NotFoundError, match="no weights of step 9"):
        export(state, RUN, tmp_path / "out", step=9)


def test_damaged_weights_are_not_exported(state: StateFolder, ledger: Ledger, tmp_path: Path) -> None:
    ref = trained(state, ledger, 0, "one")
    (Path(ref.path) / "model.safetensors").write_text("damaged")
    with pytest.raises(IntegrityError, match="damaged"):
        export(state, RUN, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
