"""A small campaign on the embedded engine; ``make prove-interruptions`` runs the whole of it on every engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.interruptions.campaign import Report, campaign
from tests.contract.interruptions.evidence import weigh
from tests.contract.interruptions.model import write_models


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of two dozen interrupted generations and one kill."""
    folder: Path = tmp_path_factory.mktemp("campaign")
    (folder / "state").mkdir()
    models = write_models(folder / "models")
    return asyncio.run(campaign(folder / "state", "embedded", models, 24, 1, 16, 0))


def test_agents_of_interrupted_engines_get_unbroken_answers_of_the_recorded_tokens(report: Report) -> None:
    assert report.passed(), report.text()
    assert {"update", "preemption"} <= set(report.findings.by)


def test_an_answer_that_misses_or_repeats_a_token_is_noticed(report: Report) -> None:
    asked = next(one for one in report.asked if one.request["logprobs"])
    (told, *others), tokens = asked.told, asked.told[0].tokens
    assert tokens
    wrong = [
        replace(told, text=told.text + "1"),
        replace(told, tokens=tokens[1:]),
        replace(told, tokens=(*tokens, tokens[-1])),
        replace(told, finish=None),
    ]
    for each in wrong:
        before = report.asked[: report.asked.index(asked)]
        changed = [*before, replace(asked, told=(each, *others))]
        assert len(weigh(report.cluster, changed).faults) == 1


def test_a_journal_that_differs_from_the_engine_s_log_is_noticed(report: Report) -> None:
    logs = {log: log.read_bytes() for log in (node.token_log() for node in report.cluster.nodes.values())}
    try:
        for log, whole in logs.items():
            log.write_bytes(whole.replace(b'"ids":[', b'"ids":[1,'))
        assert weigh(report.cluster, report.asked).faults
    finally:
        for log, whole in logs.items():
            log.write_bytes(whole)
