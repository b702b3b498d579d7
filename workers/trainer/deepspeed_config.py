"""What DeepSpeed and torch are told of a run."""

from __future__ import annotations

import os
from typing import Any

import torch

from storage.errors import ConfigError
from workflows.spec import TrainerSpec

_BUCKET = 2**24
"""Elements that are reduced or gathered together."""


def deepspeed_config(
    trainer: TrainerSpec, model: torch.nn.Module, compute_dtype: str, device: torch.device
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The number of micro-batches changes from step to step: step() is the boundary, not a count.
        "managed_gradient_accumulation": False,
        "gradient_clipping": trainer.grad_clip,
        "bf16": {"enabled": compute_dtype == "bfloat16"},
        "zero_optimization": _zero(trainer, model, device),
        # The client optimizer is plain torch: DeepSpeed's own would be compiled at start.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def refuse_idle_settings(trainer: TrainerSpec, device: torch.device) -> None:
    """Raises :class:`ConfigError` if a setting could do nothing on this device."""
    if trainer.offload != "none" and device.type == "cpu":
        raise ConfigError(
            f"trainer.offload {trainer.offload} moves state from a GPU to main memory, but this rank computes on the "
            "CPU, with all of it in main memory: set it to none, or train on a node with a GPU"
        )


def choose_kernels(trainer: TrainerSpec) -> None:
    """cuBLAS has deterministic ones only with a workspace of fixed size, told before the first kernel starts."""
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(trainer.deterministic)
    # Filling is a debugging aid that costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _zero(trainer: TrainerSpec, model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    vectors = [parameter.numel() for parameter in model.parameters() if parameter.dim() < 2]
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        # By default DeepSpeed allocates buckets of 5e8 elements: two gigabytes, for a model of any size.
        "reduce_bucket_size": _BUCKET,
        "allgather_bucket_size": _BUCKET,
        "stage3_prefetch_bucket_size": _BUCKET,
        # Biases and norms stay whole on each rank: gathering them costs more than holding them.
        "stage3_param_persistence_threshold": max(vectors, default=0),
    }
    host = {"device": "cpu", "pin_memory": device.type != "cpu"}
    if trainer.offload != "none":
        zero["offload_optimizer"] = host
    if trainer.offload == "parameters":
        zero["offload_param"] = host
    return zero
