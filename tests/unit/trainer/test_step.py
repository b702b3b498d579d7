"""Batches that take several optimizer steps or ask other models: right by an oracle, however they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from table_backend import TableBackend, TableGang, descend, planner, predictors, table
from torch import Tensor

from algorithms import kl
from algorithms.advantages import dr_grpo, whiten
from storage.errors import ConfigError
from storage.manifests import Manifest
from workers.trainer.batch import Batch, weigh
from workers.trainer.objective import token_logprobs
from workers.trainer.packing import WeightedTrajectory, plan
from workers.trainer.rows import group_rows
from workers.trainer.step import Trained, Work
from workflows.spec import AlgorithmSpec


def read(make: Any, algorithm: AlgorithmSpec, *, groups: int = 4, step: int = 0) -> Batch:
    shards = [make.random_shard(ordinal, 1) for ordinal in range(groups)]
    rows = [group_rows(shard, [row.id for row in shard.sessions]) for shard in shards]
    return weigh(rows, Manifest("demo", 0, step, (), temperature=0.8), algorithm)


def train(make: Any, algorithm: AlgorithmSpec, *, row_tokens: int = 60) -> tuple[Batch, TableBackend, Trained]:
    backend, batch = TableBackend(), read(make, algorithm)
    return batch, backend, Work(batch, algorithm, backend, planner(row_tokens)).run()


class Tokens:
    """The trained tokens of some rows, flat."""

    def __init__(self, rows: Sequence[WeightedTrajectory]) -> None:
        (batch,), _ = plan(rows, rank=0, ranks=1, row_tokens=1_000_000)
        order = np.argsort(batch.token_N)
        self.predictor, self.target = predictors(batch)[order], torch.from_numpy(batch.target_N)[order]
        self.advantage, self.weight = (torch.from_numpy(a)[order] for a in (batch.advantage_N, batch.weight_N))
        self.engine, self.sequence = (torch.from_numpy(a)[order] for a in (batch.engine_logprob_N, batch.sequence_N))

    def logprob(self, policy: Tensor) -> Tensor:
        return token_logprobs(policy[self.predictor], self.target, 0.8)[0]


SEVERAL = {"epochs": 2, "minibatches": 2, "correction": "none"}


@pytest.mark.parametrize("row_tokens", [1, 60, 10_000])
def test_later_steps_of_a_batch_are_clipped_around_the_weights_before_the_first(make: Any, row_tokens: int) -> None:
    batch, backend, trained = train(make, AlgorithmSpec(**SEVERAL), row_tokens=row_tokens)

    policy = table(0).requires_grad_()
    parts = [Tokens(rows) for rows in batch.minibatches]
    old = [part.logprob(policy).detach() for part in parts]
    for _ in range(2):
        for part, before in zip(parts, old, strict=True):
            ratio = (part.logprob(policy) - before).exp()
            loss = torch.maximum(-part.advantage * ratio, -part.advantage * ratio.clamp(0.8, 1.28))
            loss = torch.where(part.advantage < 0, loss.minimum(-3 * part.advantage), loss)
            descend(policy, (loss * part.weight).sum(), 30.0)

    assert len(parts) == 2
    assert trained.optimizer_steps == 4
    assert trained.sums.clipped > 0
    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequence", ["session", "turn"])
@pytest.mark.parametrize("row_tokens", [1, 10_000])
def test_gspo_clips_whole_sequences_though_their_turns_lie_in_several_micro_batches(
    make: Any, row_tokens: int, sequence: str
) -> None:
    algorithm = AlgorithmSpec(name="gspo", sequence=sequence, clip_low=0.02, clip_high=0.02, **SEVERAL)
    batch, backend, trained = train(make, algorithm, row_tokens=row_tokens)

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
            descend(policy, total, 30.0)

    assert trained.sums.clipped > 0
    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_session_s_importance_weight_is_of_all_its_turns(make: Any, level: str) -> None:
    algorithm = AlgorithmSpec(correction_level=level, correction_cap=1.5)
    batch, backend, _ = train(make, algorithm, row_tokens=1)

    policy = table(0).requires_grad_()
    tokens = Tokens(batch.rows)
    gap = tokens.logprob(policy).detach() - tokens.engine
    total = {n: gap[tokens.sequence == n] for n in tokens.sequence.unique().tolist()}
    combine = torch.sum if level == "sequence" else torch.mean
    weight = torch.stack([combine(total[n]) for n in tokens.sequence.tolist()]).exp().clamp(max=1.5)
    descend(policy, -(tokens.advantage * tokens.weight * weight * tokens.logprob(policy)).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


def test_kl_in_the_loss_pulls_towards_the_reference(make: Any) -> None:
    algorithm = AlgorithmSpec(kl="k3", kl_coefficient=0.5, correction="none")
    batch, backend, trained = train(make, algorithm)

    policy = table(0).requires_grad_()
    tokens = Tokens(batch.rows)
    logprob, reference = tokens.logprob(policy), tokens.logprob(backend.reference)
    loss = -tokens.advantage * (logprob - logprob.detach()).exp() + 0.5 * kl.k3(logprob, reference)
    descend(policy, (loss * tokens.weight).sum(), 30.0)

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
    descend(policy, -(advantage * tokens.weight * tokens.logprob(policy)).sum(), 30.0)

    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)


def test_an_entropy_bonus_has_the_entropy_s_gradient(make: Any) -> None:
    algorithm = AlgorithmSpec(name="rloo", entropy_coefficient=0.3, correction="none")
    batch, backend, _ = train(make, algorithm)

    policy = table(0).requires_grad_()
    tokens = Tokens(batch.rows)
    all_logprobs = torch.log_softmax(policy[tokens.predictor] / 0.8, -1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    descend(policy, -((tokens.advantage * tokens.logprob(policy) + 0.3 * entropy) * tokens.weight).sum(), 30.0)

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
    descend(policy, -(whiten(advantage) * tokens.weight * tokens.logprob(policy)).sum(), 30.0)
    value_loss = (critic[tokens.predictor, 0] - advantage - value).square() / 2 * tokens.weight
    descend(critic, value_loss.sum(), 1.0)

    assert max(len(c) for t, c in children.items() if t >= 0) == 2  # some session branches
    torch.testing.assert_close(backend.policy, policy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(backend.critic, critic, rtol=1e-5, atol=1e-5)
    assert trained.value_loss == pytest.approx(float(value_loss.detach().sum()), rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "gspo", "clip_low": 0.02, "clip_high": 0.02, **SEVERAL},
        {"correction_level": "sequence", "kl": "k2", "kl_coefficient": 0.1, "kl_in": "reward"},
        {"name": "ppo", "epochs": 2, "value_clip": 0.2, "kl": "k3", "kl_coefficient": 0.1},
    ],
    ids=["gspo", "sequence and reward", "ppo"],
)
def test_the_number_of_ranks_changes_nothing(make: Any, change: dict[str, Any]) -> None:
    algorithm = AlgorithmSpec(**change)
    batch, alone, trained = train(make, algorithm)
    gang = TableGang(3)
    for found, backend in zip(gang.train(batch, algorithm, 60), gang.backends, strict=True):
        torch.testing.assert_close(backend.policy, alone.policy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backend.critic, alone.critic, rtol=1e-5, atol=1e-5)
        assert found.sums.loss == pytest.approx(trained.sums.loss, rel=1e-4)
        assert found.value_loss == pytest.approx(trained.value_loss, rel=1e-4)


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
        descend(policy, -(advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau * tokens.weight).sum(), 30.0)

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
    trained = Work(batch, algorithm, backend, planner(60)).run()

    assert trained.tokens_on_policy == trained.sums.current == 3
    assert trained.sums.stale == 6
    said = token_logprobs(untrained[[1, 7, 8]], torch.tensor([7, 8, 9]), 0.8)[0]
    # The second optimizer step computes under other weights, and is left out.
    assert trained.sums.mean("gap", over="current") == pytest.approx(float((said - logprob).abs().mean()), rel=1e-5)
