"""The parts of ``make bench-sync`` that compute, without a process."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.sync.measure import Answer, Row, Update, by_request, headline, judge, print_table

CASE = ("embedded", "disk", "in_place")
UPDATES = [Update(version=1, held=10.0, open=10.5)]


def answer(times: list[float], versions: list[int], **changes: object) -> Answer:
    logprobs = [-0.5 - n for n in range(len(times))]
    whole = Answer(len(times), 9.0, times, logprobs, versions=versions, recorded=list(logprobs))
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def test_an_update_costs_an_agent_the_gap_between_its_last_old_and_its_first_new_token() -> None:
    early = answer([9.8, 9.9, 10.6, 10.7], [0, 0, 1, 1])
    late = answer([10.8, 10.9], [1, 1], started=10.2)
    over = answer([9.5, 9.6], [0, 0])
    after = answer([11.0], [1], started=10.9)
    row = judge(CASE, UPDATES, [early, late, over, after], made=9)
    assert row.pause_to_first_token_ms == pytest.approx(600)
    assert row.hold_ms_p50 == pytest.approx(650)  # of 700 and 600
    assert (row.tokens_lost, row.tokens_again, row.agent_errors) == (0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"asked": 3},
        {"recorded": [-0.5]},
        {"recorded": [-0.5, -0.5]},
        {"logged": [-0.5, -9.0]},
        {"logprobs": [-0.5]},
    ],
)
def test_a_token_that_did_not_arrive_as_it_was_recorded_and_logged_is_lost(changes: dict[str, object]) -> None:
    broken = answer([9.8, 10.6], [0, 1], **changes)
    assert broken.lost() == 1


def test_errors_are_counted_and_the_first_is_shown() -> None:
    answers = [answer([9.9, 10.6], [0, 1]), answer([9.9], [0], error="502", asked=4)]
    row = judge(CASE, UPDATES, answers, made=None)
    assert (row.agent_errors, row.tokens_lost, row.tokens_again) == (1, 3, -1)
    assert print_table([row]).endswith("embedded disk in_place: 502")


def test_a_row_of_the_json_line_is_of_one_engine_and_transfer() -> None:
    row = Row(*CASE, 3, 9, 0, 0, 0, 12.5, 7.5)
    figures = {"pause_to_first_token_ms": 12.5, "tokens_lost": 0, "agent_errors": 0, "hold_ms_p50": 7.5}
    line = headline([row, dataclasses.replace(row, mode="retract")])
    assert line == {
        "bench": "sync",
        "rows": [{"engine": "embedded", "transfer": "disk", **figures, "retract": figures}],
    }


def test_the_engines_log_is_read_by_request() -> None:
    log = [{"rid": "a", "input_ids": [1]}, {"rid": "a", "logprobs": [-1.0]}, {"rid": "a", "logprobs": [-2.0]}]
    assert by_request(log) == {"a": [-1.0, -2.0]}
