"""Batches that take several optimizer steps or ask other models: right by an oracle, however they are packed.

The model is a table of next-token logits by token, so that the oracle needs no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from algorithms import kl
from algorithms.advantages import dr_grpo, whiten
from storage.errors import ConfigError
from storage.manifests import Manifest
from workers.trainer.backend import StepOutcome
from workers.trainer.batch import Batch, weigh
from workers.trainer.objective import Objective, StepSums, ValueObjective, token_logprobs
from workers.trainer.packing import MicroBatch, WeightedTrajectory, plan
from workers.trainer.rows import group_rows
from workers.trainer.step import Planner, Trained, train_batch
from workflows.spec import AlgorithmSpec

VOCABULARY = 64


def table(seed: int, columns: int = VOCABULARY) -> Tensor:
    return torch.randn(VOCABULARY, columns, generator=torch.Generator().manual_seed(seed))


class TableBackend:
    """Policy, reference and critic as tables, trained by plain gradient descent."""

    rank, world_size, compute_dtype, packs = 0, 1, "float32", True

    def __init__(self) -> None:
        self.policy = table(0).requires_grad_()
        self.reference = table(1)
        self.critic = table(2, 1).requires_grad_()

    def update(self, batches: Sequence[MicroBatch], objective: Objective) -> StepOutcome:
        sums, total = StepSums(), torch.zeros(())
        for batch in batches:
            loss, part = objective(self.policy[_predictors(batch)], batch)
            total = total + loss
            sums.add(part)
        _descend(self.policy, total, 30.0)
        return StepOutcome(sums, 1.0)

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [_logprobs(self.policy, batch, temperature) for batch in batches]

    def reference_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [_logprobs(self.reference, batch, temperature) for batch in batches]

    def values(self, batches: Sequence[MicroBatch]) -> list[npt.NDArray[np.float32]]:
        return [self.critic.detach()[_predictors(batch), 0].numpy() for batch in batches]

    def update_critic(self, batches: Sequence[MicroBatch], objective: ValueObjective) -> float:
        losses = [objective(self.critic[_predictors(batch), 0], batch) for batch in batches]
        total = torch.stack(losses).sum()
        _descend(self.critic, total, 1.0)
        return float(total.detach())

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def initialize(self) -> None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def publish(self, folder: Path) -> None: ...
    def park(self) -> None: ...
    def unpark(self) -> None: ...
    def close(self) -> None: ...
    def broadcast(self, value: Any) -> Any:
        return value


def _predictors(batch: MicroBatch) -> Tensor:
    return torch.from_numpy(batch.ids_T[batch.predictor_K[batch.predictor_N]])


@torch.no_grad()
def _logprobs(logits: Tensor, batch: MicroBatch, temperature: float) -> npt.NDArray[np.float32]:
    return token_logprobs(logits[_predictors(batch)], torch.from_numpy(batch.target_N), temperature)[0].numpy()


def _descend(weights: Tensor, loss: Tensor, rate: float) -> None:
    (gradient,) = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        weights -= rate * gradient


def planner(size: int) -> Planner:
    return lambda rows: plan(rows, rank=0, ranks=1, row_tokens=20 * size)


def read(make: Any, algorithm: AlgorithmSpec, *, groups: int = 4, step: int = 0) -> Batch:
    shards = [make.random_shard(ordinal, 1) for ordinal in range(groups)]
    rows = [group_rows(shard, [row.id for row in shard.sessions]) for shard in shards]
    return weigh(rows, Manifest("demo", 0, step, (), temperature=0.8), algorithm)


def train(make: Any, algorithm: AlgorithmSpec, *, size: int = 3) -> tuple[Batch, TableBackend, Trained]:
    backend, batch = TableBackend(), read(make, algorithm)
    return batch, backend, train_batch(batch, algorithm, backend, planner(size))


class Tokens:
    """The trained tokens of some rows, flat."""

    def __init__(self, rows: Sequence[WeightedTrajectory]) -> None:
        (batch,), _ = plan(rows, rank=0, ranks=1, row_tokens=10_000)
        order = np.argsort(batch.token_N)
        self.predictor, self.target = _predictors(batch)[order], torch.from_numpy(batch.target_N)[order]
        self.advantage, self.weight = (torch.from_numpy(a)[order] for a in (batch.advantage_N, batch.weight_N))
        self.engine, self.sequence = (torch.from_numpy(a)[order] for a in (batch.engine_logprob_N, batch.sequence_N))

    def logprob(self, policy: Tensor) -> Tensor:
        return token_logprobs(policy[self.predictor], self.target, 0.8)[0]


SEVERAL = {"epochs": 2, "minibatches": 2, "correction": "none"}


@pytest.mark.parametrize("size", [1, 3, 100])
def test_later_steps_of_a_batch_are_clipped_around_the_weights_before_the_first(make: Any, size: int) -> None:
    batch, backend, trained = train(make, AlgorithmSpec(**SEVERAL), size=size)

    policy = table(0).requires_grad_()
    parts = [Tokens(rows) for rows in batch.minibatches]
    old = [part.logprob(policy).detach() for part in parts]
    for _ in range(2):
        for part, before in zip(parts, old, strict=True):
            ratio = (part.logprob(policy) - before).exp()
            loss = torch.maximum(-part.advantage * ratio, -part.advantage * ratio.clamp(0.8, 1.28))
            loss = torch.where(part.advantage < 0, loss.minimum(-3 * part.advantage), loss)
            _descend(policy, (loss * part.weight).sum(), 30.0)

    assert len(parts) == 2
    assert trained.optimizer_steps == 4
    assert trained.sums.clipped > 0
    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequence", ["session", "turn"])
@pytest.mark.parametrize("size", [1, 100])
def test_gspo_clips_whole_sequences_though_their_turns_lie_in_several_micro_batches(
    make: Any, size: int, sequence: str
) -> None:
    algorithm = AlgorithmSpec(name="gspo", sequence=sequence, clip_low=0.02, clip_high=0.02, **SEVERAL)
    batch, backend, trained = train(make, algorithm, size=size)

    policy = table(0).requires_grad_()
    parts = [Tokens(rows) for rows in batch.minibatches]
    old = [part.logprob(policy).detach() for part in parts]
    for _ in range(2):
        for part, before in zip(parts, old, strict=True):
            log_ratio, total = part.logprob(policy) - before, torch.zeros(())
            for name in part.sequence.unique():
                mine = part.sequence == name
                ratio, advantage = log_ratio[mine].mean().exp(), part.advantage[mine][0]
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.98, 1.02))
                total = total + loss * part.weight[mine].sum()
            _descend(policy, total, 30.0)

    assert trained.sums.clipped > 0
    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_session_s_importance_weight_is_of_all_its_turns(make: Any, level: str) -> None:
    algorithm = AlgorithmSpec(correction_level=level, correction_cap=1.5)
    batch, backend, _ = train(make, algorithm, size=1)

    policy = table(0).requires_grad_()
    tokens = Tokens(batch.rows)
    gap = tokens.logprob(policy).detach() - tokens.engine
    total = {n: gap[tokens.sequence == n] for n in tokens.sequence.unique().tolist()}
    combine = torch.sum if level == "sequence" else torch.mean
    weight = torch.stack([combine(total[n]) for n in tokens.sequence.tolist()]).exp().clamp(max=1.5)
    _descend(policy, -(tokens.advantage * tokens.weight * weight * tokens.logprob(policy)).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


def test_kl_in_the_loss_pulls_towards_the_reference(make: Any) -> None:
    algorithm = AlgorithmSpec(kl="k3", kl_coefficient=0.5, correction="none")
    batch, backend, trained = train(make, algorithm)

    policy = table(0).requires_grad_()
    tokens = Tokens(batch.rows)
    logprob, reference = tokens.logprob(policy), tokens.logprob(backend.reference)
    loss = -tokens.advantage * (logprob - logprob.detach()).exp() + 0.5 * kl.k3(logprob, reference)
    _descend(policy, (loss * tokens.weight).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)
    assert trained.sums.mean("kl") == pytest.approx(float(kl.k3(logprob, reference).mean().detach()), rel=1e-4)


def test_kl_in_the_reward_of_a_group_is_that_of_each_session(make: Any) -> None:
    algorithm = AlgorithmSpec(
        name="rloo", advantage="dr_grpo", kl="k1", kl_in="reward", kl_coefficient=0.1, correction="none"
    )
    batch, backend, _ = train(make, algorithm)

    policy = table(0).requires_grad_()
    tokens, evidence = Tokens(batch.rows), batch.evidence
    apart = (tokens.logprob(policy) - tokens.logprob(backend.reference)).detach()
    reward = evidence.reward_S - 0.1 * torch.stack([apart[evidence.session_N == s].sum() for s in range(16)])
    advantage = torch.cat([dr_grpo(reward[group]) for group in evidence.groups])[evidence.session_N]
    _descend(policy, -(advantage * tokens.weight * tokens.logprob(policy)).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


def test_an_entropy_bonus_has_the_entropy_s_gradient(make: Any) -> None:
    algorithm = AlgorithmSpec(name="rloo", entropy_coefficient=0.3, correction="none")
    batch, backend, _ = train(make, algorithm)

    policy = table(0).requires_grad_()
    tokens = Tokens(batch.rows)
    all_logprobs = torch.log_softmax(policy[tokens.predictor] / 0.8, -1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    _descend(policy, -((tokens.advantage * tokens.logprob(policy) + 0.3 * entropy) * tokens.weight).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


def test_ppo_trains_the_policy_on_gae_and_the_critic_on_its_returns(make: Any) -> None:
    algorithm = AlgorithmSpec(name="ppo", discount=0.9, gae_lambda=0.8, discount_per="token", correction="none")
    batch, backend, trained = train(make, algorithm)

    policy, critic = table(0).requires_grad_(), table(2, 1).requires_grad_()
    tokens, evidence = Tokens(batch.rows), batch.evidence
    value, advantage = critic.detach()[tokens.predictor, 0], torch.zeros(len(tokens.target))
    children: dict[int, list[int]] = {n: [] for n in range(-1, len(advantage))}
    for token, parent in enumerate(evidence.parent_N.tolist()):
        children[parent].append(token)

    def tokens_below(token: int) -> int:
        return 1 + sum(map(tokens_below, children[token]))

    for token in reversed(range(len(advantage))):
        below = [tokens_below(child) for child in children[token]]
        reward = 0.0 if below else float(evidence.reward_S[evidence.session_N[token]])
        shares = [n / sum(below) for n in below]
        ahead = sum(s * 0.9 * float(value[c]) for s, c in zip(shares, children[token], strict=True))
        later = sum(s * 0.72 * float(advantage[c]) for s, c in zip(shares, children[token], strict=True))
        advantage[token] = reward + ahead - value[token] + later
    _descend(policy, -(whiten(advantage) * tokens.weight * tokens.logprob(policy)).sum(), 30.0)
    value_loss = (critic[tokens.predictor, 0] - advantage - value).square() / 2 * tokens.weight
    _descend(critic, value_loss.sum(), 1.0)

    assert max(len(c) for t, c in children.items() if t >= 0) == 2  # some session branches
    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(backend.critic, critic, rtol=1e-5, atol=1e-5)
    assert trained.value_loss == pytest.approx(float(value_loss.detach().sum()), rel=1e-4)


def test_while_the_critic_warms_up_the_policy_stays(make: Any) -> None:
    algorithm = AlgorithmSpec(name="ppo", critic_warmup=1)
    _, backend, trained = train(make, algorithm)
    assert trained.optimizer_steps == 0
    assert torch.equal(backend.policy, table(0))
    assert not torch.equal(backend.critic, table(2, 1))


def test_a_discount_per_turn_makes_early_answers_count_less(make: Any) -> None:
    batch = read(make, AlgorithmSpec(advantage="dr_grpo", discount=0.5))
    plain = read(make, AlgorithmSpec(advantage="dr_grpo"))
    ratio = batch.columns().advantage_N / plain.columns().advantage_N
    assert set(np.round(ratio, 6).tolist()) == {0.5, 1.0}  # two turns a session


def stale_batch(make: Any, algorithm: AlgorithmSpec, step: int) -> Batch:
    shard = make.ShardBuilder()
    root = shard.prompt(-1, [1])
    shard.session("a", reward=1.0, leaves=[shard.completion(root, [7, 8, 9], session="a", versions=[3, 4, 5])])
    shard.session("b", reward=0.0, leaves=[shard.completion(root, [8], session="b", versions=[5])])
    oldest = step - (algorithm.token_staleness or 0) if algorithm.stale_tokens == "drop" else 0
    return weigh([group_rows(shard.build(), ["a", "b"], oldest=oldest)], Manifest("r", 0, step, (), 1.0), algorithm)


def test_stale_tokens_are_dropped_as_if_never_sampled_or_masked_in_an_unchanged_mean(make: Any) -> None:
    dropped = stale_batch(make, AlgorithmSpec(token_staleness=1), step=5)
    assert dropped.columns().version_N.tolist() == [4, 5, 5]
    assert dropped.columns().weight_N.tolist() == pytest.approx([1 / 3] * 3)
    assert dropped.masked == 1
    masked = stale_batch(make, AlgorithmSpec(token_staleness=1, stale_tokens="mask"), step=5)
    assert masked.columns().version_N.tolist() == [3, 4, 5, 5]
    assert masked.columns().weight_N.tolist() == [0.0, 0.25, 0.25, 0.25]
    assert masked.trained == 3


def test_each_minibatch_is_averaged_by_itself_and_holds_whole_groups(make: Any) -> None:
    batch = read(make, AlgorithmSpec(minibatches=3), groups=4)
    assert [len({row.trajectory.session[:2] for row in rows}) for rows in batch.minibatches] == [1, 1, 2]
    for rows in batch.minibatches:
        assert sum(float(row.columns.weight_N.sum()) for row in rows) == pytest.approx(1.0, rel=1e-5)


def test_a_batch_cut_short_has_fewer_minibatches(make: Any) -> None:
    assert len(read(make, AlgorithmSpec(minibatches=4), groups=2).minibatches) == 2


def test_functions_of_the_user_s_stand_in_for_advantage_and_loss(make: Any) -> None:
    algorithm = AlgorithmSpec(
        advantage="examples.custom_algorithm.advantage:brief",
        loss="examples.custom_algorithm.loss:soft_gate",
        epochs=2,
        correction="none",
    )
    batch, backend, _ = train(make, algorithm)

    policy, evidence = table(0).requires_grad_(), batch.evidence
    tokens = Tokens(batch.rows)
    lengths = evidence.session_N.bincount()
    shorter = [evidence.reward_S[g] - 0.1 * lengths[g] / lengths[g].max() for g in evidence.groups]
    advantage = torch.cat([dr_grpo(reward) for reward in shorter])[evidence.session_N]
    old = tokens.logprob(policy).detach()
    for _ in range(2):
        ratio, tau = (tokens.logprob(policy) - old).exp(), torch.where(advantage > 0, 1.0, 1.05)
        _descend(policy, -(advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau * tokens.weight).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantage": "operator:attrgetter"}, r"operator:attrgetter raised TypeError"),
        ({"advantage": "builtins:id"}, r"must give 4 finite numbers, it gave"),
        ({"loss": "builtins:id"}, r"must give a differentiable Tensor of shape"),
        ({"loss": "no_such_module:loss"}, r"no module 'no_such_module'"),
    ],
)
def test_what_is_wrong_with_a_function_of_the_user_s_is_told(make: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make, AlgorithmSpec(**change))


def test_engine_and_trainer_are_compared_on_turns_that_the_weights_before_the_batch_sampled_whole(make: Any) -> None:
    """Of three turns one is of older weights, and one was cut by a change of weights."""
    shard, logprob = make.ShardBuilder(), -0.5
    root = shard.prompt(-1, [1])
    for name, reward, versions in (("whole", 1.0, [4, 4, 4]), ("older", 0.0, [3, 3]), ("cut", 0.5, [3, 4, 4, 4])):
        ids = [7 + n for n in range(len(versions))]
        leaf = shard.completion(root, ids, session=name, versions=versions, logprobs=[logprob] * len(ids))
        shard.session(name, reward=reward, leaves=[leaf])
    rows = group_rows(shard.build(), ["whole", "older", "cut"])
    algorithm, backend = AlgorithmSpec(old_logprobs="engine", epochs=2), TableBackend()
    untrained = backend.policy.detach().clone()

    batch = weigh([rows], Manifest("demo", 0, 4, (), temperature=0.8), algorithm)
    trained = train_batch(batch, algorithm, backend, planner(3))

    assert trained.tokens_on_policy == trained.sums.current == 3
    assert trained.sums.stale == 6
    said = token_logprobs(untrained[[1, 7, 8]], torch.tensor([7, 8, 9]), 0.8)[0]
    # The second optimizer step computes under other weights, and is left out.
    assert trained.sums.mean("gap", over="current") == pytest.approx(float((said - logprob).abs().mean()), rel=1e-5)
