"""The peers' side, run by their environment's Python: ``python peers.py FOLDER``.

Reads ``batch.npz`` and writes what TRL and verl make of each case to ``trl.npz`` and ``verl.npz``. It calls their own
code: verl's functions, and of TRL the loss of its GRPO trainer, on an object that has only what that method reads.
"""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import ADVANTAGES, LOSSES, Case  # type: ignore[import-not-found]  # beside this script

Batch = dict[str, torch.Tensor]


def logprobs(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens, and the entropies."""
    everything = torch.log_softmax(logits, -1)
    return everything.gather(-1, batch["token"][..., None])[..., 0], -(everything.exp() * everything).sum(-1)


def trl_loss(case: Case, batch: Batch) -> dict[str, Any]:
    from trl import GRPOTrainer

    logits = batch["logits"].clone().requires_grad_()
    settings = case.trl
    accelerator = types.SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        gather_for_metrics=lambda x: x,
    )
    coefficient = settings.get("entropy_coef", 0.0)
    arguments = {"delta": settings.get("delta"), "use_bias_correction_kl": False, "steps_per_generation": 1}
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        args=types.SimpleNamespace(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, **arguments),
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        loss_type=settings["loss_type"],
        beta=settings.get("beta", 0.0),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        max_completion_length=32,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=coefficient,
        _entropy_bonus_enabled=coefficient > 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (*logprobs(logits, batch), None),
    )
    mask = batch["mask"]
    inputs = {
        "prompt_ids": batch["token"][:, :1],
        "prompt_mask": mask[:, :1].int(),
        "completion_ids": batch["token"],
        "completion_mask": torch.ones_like(mask, dtype=torch.int),
        "tool_mask": mask.int(),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, logits)
    return {"loss": loss.detach(), "gradient": gradient}


def verl_loss(case: Case, batch: Batch) -> dict[str, Any]:
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig

    settings, mask = dict(case.verl), batch["mask"].float()
    if "value_clip" in settings:
        value = batch["value"].clone().requires_grad_()
        loss, _ = core_algos.compute_value_loss(
            value, batch["return"], batch["old_value"], mask, settings["value_clip"]
        )
        return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, value)[0]}
    logits = batch["logits"].clone().requires_grad_()
    logprob, _ = logprobs(logits, batch)
    name, mode, level = settings.pop("loss"), settings.pop("mode"), settings.pop("correction", None)
    kl, coefficient = settings.pop("kl", None), settings.pop("kl_coefficient", 0.0)
    weights = None
    if level is not None:
        weights, _ = compute_rollout_correction_weights(batch["old"] - batch["engine"], mask, *level)
    scale = {"loss_scale_factor": settings.pop("loss_scale_factor")} if "loss_scale_factor" in settings else {}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    config.global_batch_info.update(scale)
    advantage = batch["advantage"][:, None].expand_as(mask)
    given = {"loss_agg_mode": mode, "config": config, "rollout_is_weights": weights}
    loss, _ = core_algos.get_policy_loss_fn(name)(batch["old"], logprob, advantage, mask, **given)
    if kl is not None:
        penalty = core_algos.kl_penalty(logprob, batch["reference"], kl)
        loss = loss + coefficient * core_algos.agg_loss(penalty, mask, mode)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logits)[0]}


def verl_advantage(case: Case, batch: Batch) -> dict[str, Any]:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    mask = batch["mask"].float()
    settings = dict(case.verl)
    name = settings.pop("estimator")
    last = mask.cumsum(1).argmax(1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), last] = batch["reward"]
    if name == "gae":
        found, returns = core_algos.compute_gae_advantage_return(rewards, batch["value"], mask, **settings)
        return {"advantage": found[batch["mask"]], "return": returns[batch["mask"]]}
    config = AlgoConfig(gamma=settings.pop("gamma", 1.0))
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "config": config, **settings}
    if name != "reinforce_plus_plus":
        arguments["index"] = batch["group"].numpy()
    found, _ = core_algos.get_adv_estimator_fn(name)(**arguments)
    return {"advantage": found[batch["mask"]]}


def run(cases: list[Case], peer: str, of: Callable[[Case, Batch], dict[str, Any]], batch: Batch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        if getattr(case, peer) is not None:
            found |= {f"{case.name}/{key}": value.numpy() for key, value in of(case, batch).items()}
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    with np.load(folder / "batch.npz") as arrays:
        batch = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    np.savez(folder / "trl.npz", **run(LOSSES, "trl", trl_loss, batch))
    np.savez(
        folder / "verl.npz", **run(LOSSES, "verl", verl_loss, batch) | run(ADVANTAGES, "verl", verl_advantage, batch)
    )


if __name__ == "__main__":
    main()
