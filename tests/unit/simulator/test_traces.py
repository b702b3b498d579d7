"""A simulated run as the record of a real one: what the trace measures explains the run it is of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipeline.calibration import compare, predicted, replayed
from simulator.run import simulate
from simulator.trace import Measured, MeasuredNode, Timed, Trace, fit_token_s, fit_update, lines_of, read_trace
from storage.errors import ConfigError
from workflows.scheduling.roofline import decode_step_s

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "dtype": "float32",
}
TOKEN_S, PAUSE_S = 0.02, 0.5


def recorded(groups: int = 12, size: int = 4) -> list[Timed]:
    chance = np.random.default_rng(3)
    made = []
    for ordinal in range(groups):
        for sample in range(size):
            answers = tuple(int(n) for n in chance.integers(5, 200, 2 - sample % 2))
            elapsed = TOKEN_S * sum(answers) + PAUSE_S * len(answers)
            made.append(
                Timed(
                    ordinal=ordinal, sample=sample, prompt=10, answers=answers, observations=(3,) * (len(answers) - 1),
                    elapsed_s=elapsed,
                )
            )  # fmt: skip
    return made


def trace(**more: object) -> Trace:
    fields = {
        "run": "live", "pipeline": "multiplexed", "staleness": 1, "steps": 3, "groups_per_step": 4, "group_size": 4,
        "target_in_flight": 16, "max_running": 32, "kv_tokens": 8192, "model": CONFIG, "dtype": "float32",
        "nodes": [
            MeasuredNode(id="a", tags=frozenset({"rollout", "train"})),
            MeasuredNode(id="b", tags=frozenset({"rollout"})),
        ],
        "wall_s": 30.0, "token_s": TOKEN_S, "batch": 6, "train_token_s": 1e-3, "train_fixed_s": 0.5,
        "rollout_to_train_s": 0.1, "train_to_rollout_s": 0.2,
    }  # fmt: skip
    return Trace(measured=Measured.model_validate({**fields, **more}), lines=lines_of(recorded(), TOKEN_S))


def test_the_time_of_a_token_is_told_from_the_agents_pauses() -> None:
    written = sum(sum(session.answers) for session in recorded())
    assert fit_token_s(recorded(), busy_s=written * TOKEN_S / 8, max_running=8) == pytest.approx(TOKEN_S)
    never = fit_token_s(recorded(), busy_s=1e6, max_running=8)
    assert never * written == pytest.approx(sum(s.elapsed_s for s in recorded())), "engines can have had all of it"
    line = lines_of(recorded(), TOKEN_S)[0]
    assert line.tools_s == pytest.approx((PAUSE_S,))
    assert line.reward_s == pytest.approx(PAUSE_S)


def test_what_an_update_costs_is_told_from_what_a_token_costs() -> None:
    assert fit_update([100, 200, 400], [3, 4, 6], [2, 1.9, 2.2]) == pytest.approx((2, 0.01))
    assert fit_update([100, 100], [3, 3], [0, 0]) == pytest.approx((0, 0.03))


def test_a_measured_node_decodes_and_trains_as_it_was_measured() -> None:
    node, model = next(trace().measured.cluster().each()).kind.device, trace().measured.model_cost
    assert decode_step_s(node, model, 6, 6 * 400) == pytest.approx(TOKEN_S), "computing is a part of the measured step"
    result = simulate(replayed(trace()))
    trained = sum(step.train_s - 0.5 for step in result.steps)
    tokens = sum(line.prompt + sum(line.answers) + sum(line.observations) for line in trace().lines)
    assert trained == pytest.approx(tokens * 1e-3, rel=1e-6)


def test_a_trace_is_read_as_it_was_written_and_holds_no_text(tmp_path: Path) -> None:
    trace().write(tmp_path / "live.jsonl")
    assert read_trace(tmp_path / "live.jsonl") == trace()
    sessions = (tmp_path / "live.jsonl").read_text().splitlines()[1:]
    assert not any(
        character.isalpha() for line in sessions for character in line.replace("null", "") if character > "z"
    )
    assert all("messages" not in line and "ids" not in line for line in sessions)


def test_replaying_a_trace_trains_each_recorded_sample_once() -> None:
    result = simulate(replayed(trace()))
    assert result.trained == 3 * 4 * 4
    assert predicted(trace()) == result.wall_s


def test_a_run_is_predicted_from_the_record_of_another_one() -> None:
    seen = trace()
    other = seen.measured.model_copy(update={"pipeline": "colocated", "staleness": 0, "steps": 2, "wall_s": 10.0})
    told = replayed(seen, other)
    assert (told.policy.name, told.policy.steps, told.policy.staleness) == ("colocated", 2, 0)
    assert told.cluster == replayed(seen).cluster, "rates and costs are those of the record"


def test_what_one_run_cannot_measure_is_taken_from_another_and_neither_counts_as_predicted() -> None:
    rates = trace(pipeline="off_policy", rollout_to_train_s=0, train_to_rollout_s=0)
    changes = trace(pipeline="colocated", staleness=0, commit_s=0.3, sync_s=0.4)
    other = trace(pipeline="disaggregated", staleness=0, wall_s=10.0)
    told = rates.measured.with_changes_of(changes.measured)
    assert (told.token_s, told.rollout_to_train_s, told.sync_s) == (TOKEN_S, 0.1, 0.4)
    runs = {"off_policy": rates, "colocated": changes, "disaggregated": other}
    found = compare(runs)
    both = rates.model_copy(update={"measured": told})
    assert found.predicted == round(abs(predicted(both, other.measured) / 10.0 - 1), 4)
    owns = [abs(predicted(run) / run.measured.wall_s - 1) for run in runs.values()]
    assert found.calibrated == round(sum(owns) / 3, 4)


@pytest.mark.parametrize("text", ["", "{}", '{"trace": 1}\n{}'])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "no.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"no\.jsonl"):
        read_trace(tmp_path / "no.jsonl")
    with pytest.raises(ConfigError, match="trace export"):
        read_trace(tmp_path / "absent.jsonl")
