"""The three ways of training a group that the benchmark compares are the same training."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.tree.__main__ import CPU, figures, measure
from benchmarks.tree.workload import VOCABULARY, Case, Group
from workers.trainer.forward import use_trees
from workers.trainer.packing import TokenColumns, WeightedTrajectory

BRANCHES = Case(turns=4, siblings=2, opening=6, prompt=3, answer=2, branches=True)
SIBLINGS = Case(turns=1, siblings=3, opening=20, prompt=0, answer=4)


def _columns(rows: list[WeightedTrajectory]) -> dict[str, list[float]]:
    """By token of the group."""
    columns = TokenColumns.concatenate([row.columns for row in rows])
    order = np.argsort(columns.token_N)
    return {name: getattr(columns, name)[order].tolist() for name in ("token_N", "advantage_N", "weight_N")}


@pytest.mark.parametrize("case", [BRANCHES, SIBLINGS], ids=lambda case: case.name)
def test_both_kinds_of_rows_train_each_answer_once_with_the_same_advantage(case: Case) -> None:
    group = Group(case, seed=1)
    turns, leaves = group.turn_rows(), group.leaf_rows()
    assert _columns(turns) == _columns(leaves)
    assert sum(_columns(turns)["weight_N"]) == pytest.approx(1)
    assert len(leaves) == case.siblings


def test_a_session_s_turn_rows_grow_by_a_turn_each() -> None:
    rows = Group(Case(turns=3, siblings=1, opening=6, prompt=3, answer=2), seed=1).turn_rows()
    assert [len(row.trajectory.ids) for row in rows] == [8, 13, 18]
    assert [row.trajectory.trained_at.tolist() for row in rows] == [[6, 7], [11, 12], [16, 17]]


def test_a_row_of_the_report_has_the_figures_that_are_judged() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=8, **sizes)).eval()
    assert use_trees(model, CPU) is None
    ways = measure(BRANCHES, model, 1)
    found = figures(BRANCHES, ways)
    assert list(found) == [
        "turns",
        "siblings",
        "token_ratio",
        "speedup_vs_turn_rows",
        "speedup_vs_leaf_rows",
        "max_grad_diff",
        "peak_mb",
    ]
    # The tree: 6 + 3 * 3 + 4 * 2 - 1 tokens of the first branch, and two turns that part from it.
    assert ways["tree"].tokens == 22 + 2 * (3 + 2) - 1
    assert found["token_ratio"] == round((7 + 12 + 17 + 22 + 17 + 22) / 31, 2)
    assert found["max_grad_diff"] <= 1e-5
    assert float(ways["tree"].gradient.abs().max()) > 1e-3
