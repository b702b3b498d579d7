"""DeepSpeed (ZeRO 0 to 3) on CPU (gloo) or GPU (nccl): the first training back end.

Importing this module imports torch, transformers and deepspeed (about four seconds).
"""

from __future__ import annotations

import datetime
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from storage.errors import ConfigError, GangLost
from workers.trainer.critic import ValueModel
from workers.trainer.deepspeed_config import choose_kernels, deepspeed_config, refuse_idle_settings
from workers.trainer.forward import arguments, logits_of, to, use_trees
from workers.trainer.launch import Launch
from workers.trainer.objective import Objective, StepSums, ValueObjective, token_logprobs
from workers.trainer.packing import MicroBatch
from workers.trainer.parking import Parking
from workers.trainer.publish import collect, write_model
from workers.trainer.recompute import recompute_layers
from workers.trainer.schedule import learning_rate_factor
from workers.trainer.states import gathered, load_states, prepare, save_states, updates
from workers.trainer.with_deepspeed import deepspeed

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CRITIC_LEARNING_RATE = 1e-5


class DeepSpeedBackend:
    """One rank."""

    def __init__(self, launch: Launch) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._launch = launch
        self._spec = launch.spec
        self._engine: Any = None
        self._reference: Any = None
        self._critic: Any = None
        self._device = torch.device("cpu")
        self._parking = Parking(self._device)
        self._factor = learning_rate_factor(launch.spec)
        self._clipped_norm = 0.0
        self.packs = True
        self.compute_dtype = "float32"

    def initialize(self) -> None:
        """Raises :class:`ConfigError` if the model cannot be read, :class:`GangLost` if the ranks do not meet."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.manual_seed(self._spec.seed)
        choose_kernels(self._spec.trainer)
        deepspeed.accelerator.get_accelerator().set_device(self._launch.local_rank)
        self._device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        self._parking = Parking(self._device)
        refuse_idle_settings(self._spec.trainer, self._device)
        self._meet()
        if self._spec.model.dtype == "bfloat16" and all(self.gather(_bfloat16_instructions(self._device))):
            self.compute_dtype = "bfloat16"
        models, algorithm, initial = self._launch.models, self._spec.algorithm, self._spec.model.path
        if "policy" in models:
            self._engine = self._trained(self._model(initial, "model.path"), self._spec.trainer.learning_rate)
            if self._spec.trainer.zero_stage == 0:
                self._engine.clip_fp32_gradients = self._clip
        if "reference" in models:
            self._reference = self._frozen(self._model(algorithm.reference or initial, "algorithm.reference"))
        if "critic" in models:
            model = ValueModel(self._model(algorithm.critic or initial, "algorithm.critic"))
            self._critic = self._trained(model, algorithm.critic_learning_rate or _CRITIC_LEARNING_RATE)

    def _frozen(self, model: Any) -> Any:
        """The same weights for ever: whole on each rank, unless the policy's are split."""
        model.requires_grad_(requires_grad=False).eval()
        if self._spec.trainer.zero_stage < 3:
            return model
        config = deepspeed_config(self._spec.trainer, model, self.compute_dtype, self._device)
        engine, _, _, _ = deepspeed.initialize(model=model, config=config)
        engine.eval()
        return engine

    def _trained(self, model: Any, learning_rate: float) -> Any:
        """A DeepSpeed engine around a model."""
        trainer = self._spec.trainer
        if trainer.activation_checkpointing:
            recompute_layers(model, reentrant=trainer.zero_stage == 3)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=trainer.betas, weight_decay=trainer.weight_decay
        )
        config = deepspeed_config(trainer, model, self.compute_dtype, self._device)
        schedule = LambdaLR(optimizer, self._factor)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
        prepare(engine)
        # No dropout: the log-probs of the forward pass that trains must be those of the policy that sampled.
        engine.eval()
        return engine

    @property
    def learning_rate(self) -> float:
        engine = next(iter(self._engines().values()))
        return float(engine.lr_scheduler.get_last_lr()[0])

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective, scale: float) -> StepSums:
        sums = StepSums()
        for batch in batches:
            loss, part = objective(self._logits(self._engine, batch), batch)
            sums.add(part)
            # DeepSpeed averages gradients over ranks; the weights in the loss already normalise over all of them.
            self._engine.backward(loss * (self.world_size * scale), scale_wrt_gas=False)
        total = StepSums()
        for part in self.gather(sums):
            total.add(part)
        return total

    def update(self, scale: float) -> float:
        """DeepSpeed divides gradients by its loss scale where it clips them: one is set for the step alone. It makes no
        step on a norm that is not finite, but at stage 0, where :meth:`_clip` sees to that.
        """
        optimizer = self._engine.optimizer
        if self._spec.trainer.zero_stage == 0:
            return self._update_whole(scale)
        optimizer.override_loss_scale(1.0 / scale)
        try:
            self._engine.step()
        finally:
            optimizer.custom_loss_scaler = False
        return self._grad_norm()

    def _update_whole(self, scale: float) -> float:
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        try:
            self._engine.step()
        except FloatingPointError:
            self.forget()
        return self._clipped_norm

    def forget(self) -> None:
        """Stage 2 keeps what it has reduced apart from the parameters, with offload also how often it has."""
        self._engine.zero_grad()
        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        if self._spec.trainer.zero_stage == 2:
            for held in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
                held.update(dict.fromkeys(held))
            optimizer.micro_step_id = deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return self._logprobs(self._engine, batches, temperature)

    def reference_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return self._logprobs(self._reference, batches, temperature)

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch]) -> list[npt.NDArray[np.float32]]:
        return [self._values(batch).float().cpu().numpy() for batch in batches]

    def update_critic(self, batches: Sequence[MicroBatch], objective: ValueObjective) -> float:
        total = 0.0
        for batch in batches:
            loss = objective(self._values(batch), batch)
            total += float(loss.detach())
            self._critic.backward(loss * self.world_size, scale_wrt_gas=False)
        self._critic.step()
        return sum(self.gather(total))

    def save(self, folder: Path) -> None:
        for name, engine in self._engines().items():
            save_states(engine, folder / name)

    def load(self, folder: Path) -> None:
        for name, engine in self._engines().items():
            load_states(engine, folder / name)
            made = updates(engine)
            engine.lr_scheduler = LambdaLR(engine.basic_optimizer, self._factor, last_epoch=made - 1)

    def _engines(self) -> dict[str, Any]:
        """By the folder of their state in a checkpoint."""
        engines = {"policy": self._engine, "critic": self._critic}
        return {name: engine for name, engine in engines.items() if engine is not None}

    def publish(self, folder: Path) -> None:
        """One parameter is whole on each rank at a time; rank 0 keeps them, in the run's dtype, in main memory."""
        weights = collect(gathered(self._engine.module), getattr(torch, self._spec.model.dtype), keep=self.rank == 0)
        if self.rank == 0:
            write_model(self._engine.module, weights, Path(self._spec.model.path), folder)

    def park(self) -> None:
        """On a GPU all state moves to main memory; on a CPU it is there already, and freed memory goes back."""
        self._parking.park()

    def unpark(self) -> None:
        self._parking.unpark()

    def gather(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        result: T = values[0]
        return result

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _meet(self) -> None:
        launch = self._launch
        # DeepSpeed reads its place in the gang from these, and looks for MPI if they are missing.
        os.environ.update(
            RANK=str(launch.rank),
            WORLD_SIZE=str(launch.world_size),
            LOCAL_RANK=str(launch.local_rank),
            MASTER_ADDR=launch.master_addr,
            MASTER_PORT=str(launch.master_port),
        )
        if dist.is_initialized():
            return
        try:
            dist.init_process_group(
                deepspeed.accelerator.get_accelerator().communication_backend_name(),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=datetime.timedelta(seconds=max(launch.start_limit_s, self._spec.trainer.step_time_limit_s)),
            )
        except RuntimeError as error:
            raise GangLost(
                f"rank {launch.rank} of {launch.world_size} did not meet the others at "
                f"{launch.master_addr}:{launch.master_port}: {error}"
            ) from error

    def _model(self, path: str, key: str) -> Any:
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{key} {path}: no config.json there; it must be a Hugging Face model directory")
        dtype = getattr(torch, self.compute_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        model = model.to(self._device)
        refusal = next(filter(None, self.gather(use_trees(model, self._device))), None)
        if refusal is not None:
            self.packs = False
            _log.warning("each path is computed by itself, not as part of a tree: %s cannot, %s", path, refusal)
        return model

    @torch.no_grad()
    def _logprobs(self, model: Any, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [
            token_logprobs(self._logits(model, batch), to(self._device, batch.target_N), temperature)[0].cpu().numpy()
            for batch in batches
        ]

    def _logits(self, model: Any, batch: MicroBatch) -> Tensor:
        return logits_of(model, batch, self._device, trees=self.packs)

    def _values(self, batch: MicroBatch) -> Tensor:
        values_K: Tensor = self._critic(**arguments(batch, self._device, trees=self.packs))
        return values_K[to(self._device, batch.predictor_N)]

    def _clip(self) -> None:
        """What DeepSpeed does at stage 0, but the norm is kept."""
        self._clipped_norm = float(clip_grad_norm_(self._engine.module.parameters(), self._spec.trainer.grad_clip))
        if not math.isfinite(self._clipped_norm):
            raise FloatingPointError(f"the gradient's norm is {self._clipped_norm}")

    def _grad_norm(self) -> float:
        return float(self._engine.get_global_grad_norm())


def _bfloat16_instructions(device: torch.device) -> bool:
    """Whether bfloat16 pays. CPUs with AVX-512 alone emulate it, at two to five times the cost of float32."""
    if device.type != "cpu":
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
