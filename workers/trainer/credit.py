"""From rewards to the advantage of each trained token: the estimator of the run file, over the trees of the batch.

Shape suffixes: ``N`` trained tokens of the batch in the order of its trajectories, ``S`` sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.advantages import Group, dr_grpo, grpo, rloo, whiten
from algorithms.credit import TreeCredit, at_turns, leaves, tree_advantages, tree_returns
from storage.errors import ConfigError, IntegrityError
from workers.trainer.rows import GroupRows
from workers.trainer.usercode import call, is_target
from workflows.spec import AlgorithmSpec

_OF_A_GROUP: Mapping[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp_baseline": dr_grpo,
}
_NONE = np.empty(0, np.int64)
_WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")


@dataclass(frozen=True)
class Evidence:
    """What advantages are made of, but for what models say of the tokens."""

    reward_S: Tensor
    """float64, raw; also of sessions without trained tokens."""
    groups: tuple[slice, ...]
    """The sessions of each group."""
    names: tuple[str, ...]
    """Of the sessions."""
    session_N: Tensor
    turn_N: Tensor
    """Generation of the token, counted over the batch."""
    parent_N: Tensor
    """The trained token in front of it on its trajectories; -1 for none."""


def gather_evidence(groups: Sequence[GroupRows]) -> Evidence:
    """Numbers sessions, turns and tokens in the order of ``groups`` and their trajectories."""
    names = [name for group in groups for name in group.rewards]
    sessions = {name: index for index, name in enumerate(names)}
    ends = [0, *accumulate(len(group.rewards) for group in groups)]
    session: list[npt.NDArray[np.int64]] = [_NONE]
    turn, parent = list(session), list(session)
    turns = tokens = 0
    for group in groups:
        rows = group.trajectories
        session += [np.full(len(row.turns), sessions[row.session]) for row in rows]
        turn += [row.turns.astype(np.int64) + turns for row in rows]
        parent += [np.where(row.parents < 0, -1, row.parents.astype(np.int64) + tokens) for row in rows]
        turns += 1 + max((int(row.turns.max()) for row in rows), default=-1)
        tokens += sum(len(row.turns) for row in rows)
    session_N, turn_N, parent_N = (torch.from_numpy(np.concatenate(part)) for part in (session, turn, parent))
    return Evidence(
        reward_S=torch.tensor([reward for group in groups for reward in group.rewards.values()], dtype=torch.float64),
        groups=tuple(starmap(slice, pairwise(ends))),
        names=tuple(names),
        session_N=session_N,
        turn_N=turn_N,
        parent_N=parent_N,
    )


def assign_credit(
    evidence: Evidence,
    algorithm: AlgorithmSpec,
    weight_N: Tensor,
    *,
    kl_N: Tensor | None = None,
    value_N: Tensor | None = None,
) -> TreeCredit:
    """Advantages, and returns where there is a critic (else 0).

    ``kl_N`` is subtracted from the reward; ``value_N`` is the critic's; both are 0 if not given. Group estimators
    subtract a session's whole KL from its reward, the others let each token's act from that token on.

    Raises :class:`IntegrityError` for a group that has no statistics, :class:`ConfigError` for what an estimator of the
    user's gives.
    """
    name = algorithm.advantage_used
    penalty_N = torch.zeros(len(weight_N)) if kl_N is None else (algorithm.kl_coefficient or 0.0) * kl_N
    discount_N = _steps(algorithm, algorithm.discount, evidence)
    reward_N = torch.where(leaves(evidence.parent_N), evidence.reward_S[evidence.session_N], 0.0)
    tree = (evidence.parent_N, weight_N, discount_N)
    return_N = torch.zeros(len(weight_N))
    if name == "gae":
        value_N = torch.zeros(len(weight_N)) if value_N is None else value_N
        decay_N = _steps(algorithm, algorithm.gae_lambda, evidence)
        advantage_N, return_N = tree_advantages(reward_N - penalty_N, value_N, *tree, decay_N)
    elif name == "reinforce_pp":
        advantage_N = tree_returns(reward_N - penalty_N, *tree)
    else:
        advantage_N = _of_groups(evidence, name, penalty_N)[evidence.session_N]
        if algorithm.discount < 1:
            ends_N = leaves(evidence.parent_N).double()
            advantage_N = advantage_N * tree_returns(ends_N, *tree)
    return TreeCredit(whiten(advantage_N) if name in _WHITENED else advantage_N, return_N)


def _of_groups(evidence: Evidence, name: str, penalty_N: Tensor) -> Tensor:
    """One advantage per session, shape (S,)."""
    sessions = len(evidence.reward_S)
    penalty_S = torch.zeros(sessions, dtype=torch.float64).index_add_(0, evidence.session_N, penalty_N.double())
    tokens_S = torch.bincount(evidence.session_N, minlength=sessions)
    pairs = torch.unique(torch.stack([evidence.turn_N, evidence.session_N]), dim=1)
    turns_S = torch.bincount(pairs[1], minlength=sessions)
    advantage_S = torch.zeros(sessions)
    for part in evidence.groups:
        group = Group(evidence.reward_S[part] - penalty_S[part], tokens_S[part], turns_S[part])
        try:
            advantage_S[part] = _checked(name, group) if is_target(name) else _OF_A_GROUP[name](group.reward_S)
        except ValueError as error:
            raise IntegrityError(f"group of sessions {', '.join(evidence.names[part])}: {error}") from error
    return advantage_S


def _checked(target: str, group: Group) -> Tensor:
    advantage_S = call(target, group)
    wanted = group.reward_S.shape
    if not isinstance(advantage_S, Tensor) or advantage_S.shape != wanted or not torch.isfinite(advantage_S).all():
        raise ConfigError(f"algorithm.advantage {target} must give {wanted[0]} finite numbers, it gave {advantage_S}")
    return advantage_S.float()


def _steps(algorithm: AlgorithmSpec, factor: float, evidence: Evidence) -> Tensor:
    if algorithm.discount_per == "turn":
        return at_turns(factor, evidence.turn_N, evidence.parent_N)
    return torch.full((len(evidence.parent_N),), factor, dtype=torch.float64)
