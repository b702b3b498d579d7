"""Our side: the trainer's own objective and credit, on a flat batch.

Shape suffixes: ``B`` samples, ``T`` positions, ``V`` vocabulary, ``N`` trained tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.aggregation import aggregation_weights
from algorithms.sequences import sequence_mean
from benchmarks.algorithms.cases import Case
from workers.trainer.credit import Evidence, assign_credit
from workers.trainer.objective import Objective, ValueObjective, correction
from workers.trainer.packing import MicroBatch
from workflows.algorithm import AlgorithmSpec

Arrays = dict[str, npt.NDArray[Any]]


def make_batch(groups: int = 4, samples: int = 4, positions: int = 24, vocabulary: int = 50) -> Arrays:
    """Random samples of unequal length, half of them with an observation in the middle that is not trained."""
    rng = np.random.default_rng(0)
    size = groups * samples
    mask_BT = np.arange(positions) < rng.integers(5, positions, size)[:, None]
    mask_BT[::2, 2:4] = False
    logits_BTV = rng.standard_normal((size, positions, vocabulary)).astype(np.float32)
    token_BT = rng.integers(0, vocabulary, (size, positions))
    scaled = logits_BTV.astype(np.float64)
    logprob_BTV = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    logprob_BT = np.take_along_axis(logprob_BTV, token_BT[..., None], -1)[..., 0]

    def near(distance: float) -> npt.NDArray[np.float32]:
        return (logprob_BT + distance * rng.standard_normal(logprob_BT.shape)).astype(np.float32)

    value_BT = rng.standard_normal(logprob_BT.shape).astype(np.float32)
    return {
        "logits": logits_BTV,
        "token": token_BT,
        "mask": mask_BT,
        "group": np.repeat(np.arange(groups), samples),
        "reward": rng.random(size).astype(np.float32),
        "advantage": rng.standard_normal(size).astype(np.float32),
        "old": near(0.3),
        "engine": near(0.4),
        "reference": near(0.5),
        "value": value_BT,
        "old_value": value_BT + 0.3 * rng.standard_normal(value_BT.shape).astype(np.float32),
        "return": rng.standard_normal(value_BT.shape).astype(np.float32),
    }


def loss(case: Case, batch: Arrays) -> Arrays:
    """The loss, and its gradient by the logits (or, for the critic's, by the values)."""
    algorithm = AlgorithmSpec(**case.ours)
    source = torch.from_numpy(batch["value" if algorithm.has_critic else "logits"]).requires_grad_()
    tokens, trained = micro_batch(batch, algorithm), source[torch.from_numpy(batch["mask"])]
    if algorithm.has_critic:
        found = ValueObjective(algorithm)(trained, tokens)
    else:
        found, _ = Objective(algorithm, 1.0)(trained, tokens)
    (gradient,) = torch.autograd.grad(found, source)
    return {"loss": found.detach().numpy(), "gradient": gradient.numpy()}


def advantage(case: Case, batch: Arrays) -> Arrays:
    """Advantages of trained tokens, and returns where there is a critic."""
    algorithm = AlgorithmSpec(**case.ours)
    credit = assign_credit(
        _evidence(batch), algorithm, torch.ones(int(batch["mask"].sum())), value_N=_flat(batch, "value")
    )
    return {
        "advantage": credit.advantage_N.numpy(),
        **({"return": credit.return_N.numpy()} if algorithm.has_critic else {}),
    }


def micro_batch(batch: Arrays, algorithm: AlgorithmSpec) -> MicroBatch:
    """All trained tokens, with every column that any case reads."""
    mask_BT = torch.from_numpy(batch["mask"])
    sample_N = mask_BT.nonzero()[:, 0]
    tokens_B = mask_BT.sum(1)
    weight_B = aggregation_weights(
        tokens_B, aggregation=algorithm.aggregation_used, length=algorithm.aggregation_length
    )
    old_N, engine_N = _flat(batch, "old"), _flat(batch, "engine")
    now_BTV = torch.log_softmax(torch.from_numpy(batch["logits"]), -1)
    now_N = now_BTV.gather(-1, torch.from_numpy(batch["token"])[..., None])[..., 0][mask_BT]
    nothing = np.zeros(1, np.int64)
    return MicroBatch(
        ids_T=nothing,
        depth_T=nothing,
        end_T=nothing + 1,
        predictor_K=nothing,
        predictor_N=nothing,
        target_N=batch["token"][batch["mask"]],
        token_N=np.arange(len(sample_N)),
        engine_logprob_N=engine_N.numpy(),
        version_N=np.zeros(len(sample_N), np.int32),
        sequence_N=sample_N.numpy(),
        advantage_N=batch["advantage"][sample_N.numpy()],
        weight_N=weight_B[sample_N].numpy(),
        old_logprob_N=old_N.numpy(),
        sequence_log_ratio_N=sequence_mean(now_N - old_N, sample_N).numpy(),
        importance_N=correction(algorithm, old_N, engine_N, sample_N).numpy(),
        reference_logprob_N=_flat(batch, "reference").numpy(),
        value_N=_flat(batch, "old_value").numpy(),
        return_N=_flat(batch, "return").numpy(),
    )


def _evidence(batch: Arrays) -> Evidence:
    sample_N = torch.from_numpy(batch["mask"]).nonzero()[:, 0]
    first_N = torch.cat([torch.ones(1, dtype=torch.bool), sample_N[1:] != sample_N[:-1]])
    starts = np.flatnonzero(np.diff(batch["group"], prepend=-1, append=len(batch["group"])))
    return Evidence(
        reward_S=torch.from_numpy(batch["reward"]).double(),
        groups=tuple(slice(int(a), int(b)) for a, b in pairwise(starts)),
        names=tuple(map(str, range(len(batch["reward"])))),
        session_N=sample_N,
        turn_N=sample_N,
        parent_N=torch.where(first_N, -1, torch.arange(len(sample_N)) - 1),
    )


def _flat(batch: Arrays, name: str) -> Tensor:
    return torch.from_numpy(batch[name][batch["mask"]])
