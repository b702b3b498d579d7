"""Training the tree gives the loss, the gradient and the log-probs of training each path by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from storage.errors import ConfigError
from workers.trainer.attention import ancestor_attention, blocks
from workers.trainer.forward import logits_of, use_trees
from workers.trainer.objective import Objective, token_logprobs
from workers.trainer.packing import MicroBatch, TokenColumns, WeightedTrajectory, pack, plan
from workers.trainer.rows import Segment, Trajectory
from workflows.spec import AlgorithmSpec

CPU = torch.device("cpu")
VOCABULARY = 32
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # with the usual 0.02 all predictions are alike, and so are all gradients
    "bos_token_id": None,
    "eos_token_id": None,
}


def _model(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def _copies(name: str, **changes: Any) -> tuple[Any, Any]:
    """The same model as it is, and as the trainer sets it up."""
    flat, tree = _model(name, **changes), _model(name, **changes)
    assert use_trees(tree, CPU) is None
    return flat, tree


@pytest.fixture(
    scope="module", params=["Llama", "Qwen2", "Qwen3", "Qwen3 without shared heads", "Qwen3 with tied embeddings"]
)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    name, _, variant = request.param.partition(" ")
    changes = {
        "without shared heads": {"num_key_value_heads": 4},
        "with tied embeddings": {"tie_word_embeddings": True},
    }
    return _copies(name, **changes.get(variant, {}))


@st.composite
def steps(draw: st.DrawFn) -> list[WeightedTrajectory]:
    """Paths of a few tasks: turns of prompt and answer that fork anywhere, each answer trained on its first path."""
    rows = []
    for task in range(draw(st.integers(1, 3))):
        rng = np.random.default_rng(draw(st.integers(0, 2**20)))
        made: list[Trajectory] = []
        for _ in range(draw(st.integers(1, 5))):
            start = made[draw(st.integers(0, len(made) - 1))] if made else None
            ids = [task, 5, 6] if start is None else start.ids[: draw(st.integers(1, len(start.ids)))].tolist()
            trained: list[int] = []
            for _ in range(draw(st.integers(1, 3))):
                ids += rng.integers(0, VOCABULARY, draw(st.integers(0, 6))).tolist()
                answer = rng.integers(0, VOCABULARY, draw(st.integers(1, 6))).tolist()
                trained += range(len(ids), len(ids) + len(answer))
                ids += answer
            old = (-3 + 0.3 * rng.standard_normal(len(trained))).astype(np.float32)
            made.append(_trajectory(ids, trained, old))
        for row in made:
            first = sum(other.trajectory.trained for other in rows)
            columns = TokenColumns(
                token_N=np.arange(first, first + row.trained),
                engine_logprob_N=row.engine_logprobs,
                version_N=row.versions,
                sequence_N=np.full(row.trained, len(rows)),
                advantage_N=rng.standard_normal(row.trained).astype(np.float32),
                weight_N=rng.uniform(0.001, 0.02, row.trained).astype(np.float32),
            )
            rows.append(WeightedTrajectory(row, columns))
    return rows


def _trajectory(ids: list[int], trained: list[int], engine_logprobs: npt.NDArray[np.float32]) -> Trajectory:
    zeros = np.zeros(len(trained), np.int32)
    segment = Segment((0, 0), np.array(ids, np.int32), np.array(trained, np.int32), engine_logprobs, zeros)
    return Trajectory("s", (segment,), zeros, zeros)


def _train(model: Any, batches: Sequence[MicroBatch], *, trees: bool) -> tuple[float, Tensor]:
    """Loss and whole gradient of a step; log-probs corrected against the engine's, as in a run."""
    model.zero_grad()
    objective, total = Objective(AlgorithmSpec(old_logprobs="engine"), 0.9), 0.0
    for batch in batches:
        loss, sums = objective(logits_of(model, batch, CPU, trees=trees), batch)
        loss.backward()
        total += sums.loss
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@given(rows=steps(), row_tokens=st.sampled_from([1, 25, 60, 1000]), merge=st.booleans())
@settings(max_examples=12)
def test_loss_and_gradient_are_those_of_every_path_alone(
    models: tuple[Any, Any], rows: list[WeightedTrajectory], row_tokens: int, merge: bool
) -> None:
    flat, tree = models
    loss, gradient = _train(flat, [pack([row]) for row in rows], trees=False)
    batches, _ = plan(rows, rank=0, ranks=1, row_tokens=row_tokens, merge=merge)
    tree_loss, tree_gradient = _train(tree, batches, trees=True)
    assert tree_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(tree_gradient, gradient, rtol=1e-5, atol=1e-5)


@given(rows=steps())
@settings(max_examples=8)
def test_logprobs_are_those_of_every_path_alone(models: tuple[Any, Any], rows: list[WeightedTrajectory]) -> None:
    flat, tree = models
    (batch,), _ = plan(rows, rank=0, ranks=1, row_tokens=10_000)
    alone = []
    with torch.no_grad():
        together, _ = token_logprobs(logits_of(tree, batch, CPU, trees=True), torch.from_numpy(batch.target_N), 1.0)
        for row in rows:
            ids, trained = (
                torch.from_numpy(a.astype(np.int64)) for a in (row.trajectory.ids, row.trajectory.trained_at)
            )
            every = torch.log_softmax(flat(input_ids=ids[None]).logits[0, :-1], -1)
            alone.append(every[trained - 1, ids[trained]])
    torch.testing.assert_close(together, torch.cat(alone)[torch.from_numpy(batch.token_N)], rtol=0, atol=1e-5)


@given(rows=steps(), ranks=st.integers(1, 4))
@settings(max_examples=25)
def test_every_rank_s_tokens_together_are_the_step_s(rows: list[WeightedTrajectory], ranks: int) -> None:
    shares = [plan(rows, rank=rank, ranks=ranks, row_tokens=40) for rank in range(ranks)]
    batches = [batch for share, _ in shares for batch in share if batch.weight_N.any()]
    columns = TokenColumns.concatenate([row.columns for row in rows])
    token_N = np.concatenate([batch.token_N for batch in batches])
    assert sorted(token_N) == columns.token_N.tolist()
    for name in ("engine_logprob_N", "advantage_N", "weight_N", "sequence_N", "version_N"):
        found = np.concatenate([getattr(batch, name) for batch in batches])
        assert np.array_equal(found, getattr(columns, name)[token_N])


@given(rows=steps())
@settings(max_examples=3)
def test_activation_checkpointing_changes_nothing(models: tuple[Any, Any], rows: list[WeightedTrajectory]) -> None:
    _, model = models
    batches, _ = plan(rows, rank=0, ranks=1, row_tokens=100)
    before = _train(model, batches, trees=True)[1]
    model.train()  # transformers checkpoints only in training mode; there is no dropout
    model.activation_checkpointing_enable()
    after = _train(model, batches, trees=True)[1]
    model.activation_checkpointing_disable()
    model.eval()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Mamba", {}, "linear_attention layers"),
        ("Gemma2", {}, "sliding_attention layers"),
        ("Mistral", {"sliding_window": 16}, "has a window"),
        ("DeepseekV3", {"first_k_dense_replace": 2}, "same head size"),
        ("Bloom", {}, "attention is its own"),
    ],
)
def test_a_model_that_sees_more_or_less_than_ancestors_is_told_apart(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    model = _model(name, **changes)
    before = model.config._attn_implementation
    why = use_trees(model, CPU)
    assert why is not None
    assert reason in why
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["Qwen3Moe", "GPTNeoX", "Phi"])
def test_other_models_of_full_attention_are_trained_as_trees(name: str) -> None:
    assert use_trees(_model(name), CPU) is None


def test_attention_with_more_than_a_softmax_is_refused() -> None:
    tensor = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ConfigError, match=r"with softcap, which tree rows cannot"):
        ancestor_attention(
            torch.nn.Identity(), tensor, tensor, tensor, None, scaling=1.0, tree=blocks(np.array([2, 2])), softcap=30.0
        )
