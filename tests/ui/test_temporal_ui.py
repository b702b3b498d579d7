"""Somebody who has only the Temporal UI starts a run, understands it and steers it (``docs/temporal-ui.md``)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporal_ui import TemporalUi, browser_page, chromium

from cli import stack
from workers.cluster import StateFolder
from workflows.messages import Pause, RunInput
from workflows.queues import CONTROL_QUEUE

pytestmark = pytest.mark.timeout(600)
PAGE = Path(__file__).parents[2] / "docs" / "temporal-ui.md"
BLANK_BYTES = 20_000
"""A picture of an empty window is smaller."""


def example() -> dict[str, Any]:
    """The run that the page shows."""
    found = re.search(r"^```json\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return json.loads(found[1])


def example_in(folder: Path, model: Path) -> dict[str, Any]:
    """The same with paths of this machine, and eight tasks held out."""
    held_out = folder / "held_out.jsonl"
    held_out.write_text("\n".join((model / "held_out.jsonl").read_text().splitlines()[:8]) + "\n")
    run = example()
    run["code"] = str(folder)
    run["model"]["path"] = str(model / "model")
    run["data"] = {"path": str(model / "tasks.jsonl"), "held_out": str(held_out)}
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def run(folder: Path, tiny_model: Path) -> dict[str, Any]:
    return example_in(folder, tiny_model)


@pytest.fixture(scope="module")
def ui(folder: Path, request: pytest.FixtureRequest) -> Iterator[TemporalUi]:
    """The UI of a cluster with the example's nodes, in a browser."""
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium on PATH: install your system's package, as in `apt-get install chromium`")
    run: dict[str, Any] = request.getfixturevalue("run")
    state = StateFolder(folder / "state")
    try:
        stack.up(state, RunInput.model_validate(run).nodes)
        cluster = state.cluster()
        assert cluster.temporal_ui
        with browser_page(executable) as page:
            yield TemporalUi(page, cluster.temporal_ui, cluster.namespace, folder / "screenshots")
    finally:
        stack.down(state)


def test_the_example_of_the_page_is_a_run_and_its_pause_is_a_pause() -> None:
    assert RunInput.model_validate(example()).run == "from-the-ui"
    orders = re.findall(r"^\| `pause` \| `(.*?)`", PAGE.read_text(), re.MULTILINE)
    assert [Pause.model_validate_json(order).mode for order in orders] == ["drain"]


@pytest.mark.e2e
def test_a_run_started_with_one_json_shows_what_it_does_and_is_paused_and_resumed(
    ui: TemporalUi, run: dict[str, Any]
) -> None:
    ui.start_workflow("run/from-the-ui", CONTROL_QUEUE, "TrainingRun", json.dumps(run, indent=2))
    assert ui.status() == "RUNNING"
    offered = ui.send_update("pause", '{"mode": "drain", "actor": "ann", "why": "the UI is tried"}')
    for name, example_data in (
        ("pause", '{"mode": "drain"}'),
        ("resume", '"why": "GPU is back"'),
        ("set_params", '{"patch": {"pipeline"'),
        ("checkpoint_now", '{"actor": "ann"}'),
        ("stop", '{"mode": "drain"}'),
    ):
        assert re.search(rf"^{name}\n.*{re.escape(example_data)}", offered, re.MULTILINE), offered

    paused = ui.details_until("paused", "serves weights 0")
    assert "Paused (drain) by ann: the UI is tried" in paused
    assert "0 of 2 steps done" in paused
    assert re.search(r"node-a\s+rollout, train\s", paused)
    assert re.search(r"node-b\s+rollout\s", paused)
    assert ui.shot("run-paused").stat().st_size > BLANK_BYTES

    ui.send_update("resume", '{"actor": "ann"}')
    done = ui.details_until("finished", "2 of 2 steps done", limit_s=120)
    assert "Paused" not in done
    assert re.search(r"weights\s+held-out reward\s+samples\s+0\s+[\d.]+\s+8\s+2\s+[\d.]+\s+8", done)
    assert re.search(r"groups\s+\d+ trained, \d+ with equal rewards, 0 stale", done)
    assert "Last failure: none" in done
    assert ui.shot("run-finished").stat().st_size > BLANK_BYTES
    with ui.followed("pool of nodes") as pool:
        nodes = pool.details_until("Last decisions", "node-b\u2003\trollout\u2003\tfree")
        pool.shot("pool")
    assert re.search(r"node-b\s+rollout\s+free\s+up\b", nodes)


@pytest.mark.e2e
def test_a_mistyped_key_ends_the_run_at_once_with_a_message_that_names_it(ui: TemporalUi, run: dict[str, Any]) -> None:
    wrong = {**run, "run": "mistyped", "pipelin": run["pipeline"]}
    ui.start_workflow("run/mistyped", CONTROL_QUEUE, "TrainingRun", json.dumps(wrong))
    result = ui.result_until("FAILED")
    assert "pipelin" in result
    assert "Extra inputs are not permitted" in result


@pytest.mark.e2e
def test_a_run_under_a_workflow_id_of_another_name_ends_at_once_and_says_which_is_right(
    ui: TemporalUi, run: dict[str, Any]
) -> None:
    ui.start_workflow("my-first-run", CONTROL_QUEUE, "TrainingRun", json.dumps({**run, "run": "named"}))
    assert "start it as 'run/named'" in ui.result_until("FAILED")
