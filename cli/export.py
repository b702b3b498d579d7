"""`seamlessflow export`: the weights of a run after a step, as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

from storage.errors import ConfigError, IntegrityError, NotFoundError
from storage.ledger import Ledger
from storage.weights import MANIFEST, WeightsRef, WeightsStore, folder_digest
from workers.cluster import StateFolder
from workflows.spec import RunSpec

ORIGIN = "seamlessflow.json"


def export(state: StateFolder, run: str, out: Path, step: int | None = None) -> WeightsRef:
    """Copy the weights after ``step`` updates (None: the newest) to the new folder ``out``, verified.

    Everything else that the run's model directory holds (tokenizer, chat template) comes along; ``seamlessflow.json``
    says where the weights are from. Needs no running cluster.

    Raises:
        ConfigError: ``out`` exists.
        NotFoundError: no such run, or its weights of that step are collected.
        IntegrityError: the published files are damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: export writes a new folder, name another one")
    published = _published(state, run, step)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(published.path, temporary, ignore=shutil.ignore_patterns(MANIFEST))
        _check(temporary, published)
        origin = {"run": run, "step": published.version, "weights_digest": published.digest}
        (temporary / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return WeightsRef(published.version, str(out), published.digest)


def _published(state: StateFolder, run: str, step: int | None) -> WeightsRef:
    """The weights that the ledger names for a step."""
    ledger = Ledger(state.cluster().ledger_url)
    try:
        model = str(RunSpec.model_validate(ledger.run_info(run).spec).model.path)
        found = ledger.latest_checkpoint(run, version=step or None)
    finally:
        ledger.close()
    if step == 0 or (found is None and step is None):
        return WeightsRef(0, model, folder_digest(Path(model)))
    if found is None:
        raise NotFoundError(f"run {run} has no weights of step {step}: see its steps with `seamlessflow status {run}`")
    store = WeightsStore(state.weights(run))
    try:
        return store.get(found.version, found.weights_digest)
    except NotFoundError:
        kept = ", ".join(str(ref.version) for ref in store.published()) or "none"
        raise NotFoundError(
            f"the weights of step {found.version} of run {run} are collected; these are kept: {kept}. "
            "trainer.keep_weights_every keeps more"
        ) from None


def _check(folder: Path, published: WeightsRef) -> None:
    digest = folder_digest(folder)
    if digest != published.digest:
        raise IntegrityError(f"{published.path} has digest {digest}, the ledger says {published.digest}: it is damaged")
