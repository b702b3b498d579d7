"""Weights and optimizer state on disk, in a form that depends on neither ZeRO stage nor number of ranks.

``<parameter>.safetensors`` holds a parameter's ``weight`` and AdamW's moments ``exp_avg`` and ``exp_avg_sq``, whole and
in float32; ``updates.json`` how many optimizer steps made them. Parameters are gathered one after the other, ranks take
turns at writing them, and a rank that loads takes its part of each. All functions are collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from storage.errors import ConfigError
from workers.trainer.with_deepspeed import deepspeed

_MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare(engine: Any) -> None:
    """Give AdamW the state of one that has made no step, which it would make in its first: now it can be saved."""
    for tensor in trained_tensors(engine):
        moments = {name: torch.zeros_like(tensor) for name in _MOMENTS}
        engine.basic_optimizer.state[tensor] = {"step": torch.zeros(()), **moments}
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def trained_tensors(engine: Any) -> list[Tensor]:
    """What AdamW works on: parameters, or with ZeRO this rank's part of them, flat and in float32."""
    match int(engine.zero_optimization_stage()):
        case 0:
            return list(engine.module.parameters())
        case 3:
            return list(engine.optimizer.fp32_partitioned_groups_flat)
        case _:
            return list(engine.optimizer.single_partition_of_fp32_groups)


def updates(engine: Any) -> int:
    """Optimizer steps made."""
    return int(engine.basic_optimizer.state[trained_tensors(engine)[0]]["step"])


def save_states(engine: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        tensors = {key: _whole(engine, parameter, key) for key in ("weight", *_MOMENTS)}
        if number % engine.world_size == engine.global_rank:
            save_file({key: tensor.cpu() for key, tensor in tensors.items()}, _file(folder, name))
    if engine.global_rank == 0:
        (folder / "updates.json").write_text(json.dumps(updates(engine)))


@torch.no_grad()
def load_states(engine: Any, folder: Path) -> None:
    """Raises :class:`ConfigError` if ``folder`` holds another model's state, or none; nothing has changed then."""
    count = _check(engine, folder)
    for name, parameter in engine.module.named_parameters():
        tensors = load_file(_file(folder, name))
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(tensors["weight"])
        for key, tensor in tensors.items():
            _take(engine, parameter, key, tensor)
    for tensor in trained_tensors(engine):
        engine.basic_optimizer.state[tensor]["step"].fill_(count)


def gathered(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's state by name, each tensor whole as long as nobody asks for the next."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor]):
            yield name, tensor


def _check(engine: Any, folder: Path) -> int:
    wanted = {name: getattr(p, "ds_shape", p.shape) for name, p in engine.module.named_parameters()}
    found = {path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors")}
    if not found:
        raise ConfigError(f"{folder} holds no optimizer state: start the run from its first step")
    if different := sorted(wanted.keys() ^ found):
        raise ConfigError(f"{folder} is of another model: {different[0]} is in one of them only")
    for name, shape in wanted.items():
        with safe_open(_file(folder, name), "pt") as file:
            saved = tuple(file.get_slice("weight").get_shape())
        if saved != tuple(shape):
            raise ConfigError(f"{folder} is of another model: {name} has shape {saved} there and {tuple(shape)} here")
    return int(json.loads((folder / "updates.json").read_text()))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _whole(engine: Any, parameter: Any, key: str) -> Tensor:
    """On every rank."""
    whole: Tensor
    if not engine.zero_optimization():
        whole = parameter.detach() if key == "weight" else engine.optimizer.state[parameter][key]
    elif key == "weight":
        whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
    else:
        whole = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
    return whole


def _take(engine: Any, parameter: Any, key: str, whole: Tensor) -> None:
    """What this rank keeps of a float32 tensor of the shape of ``parameter``."""
    match int(engine.zero_optimization_stage()), key:
        case 0, "weight":
            pass
        case 0, _:
            engine.optimizer.state[parameter][key].copy_(whole)
        case 3, "weight":
            deepspeed.utils.safe_set_local_fp32_param(parameter, _part(engine, parameter, whole))
        case 3, _:
            deepspeed.utils.safe_set_local_optimizer_state(parameter, _part(engine, parameter, whole), key)
        case _, "weight":
            deepspeed.utils.safe_set_full_fp32_param(parameter, whole)
        case _:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, key)


def _part(engine: Any, parameter: Any, whole: Tensor) -> Tensor:
    """Stage 3 gives each rank as many elements; behind the end there are zeros."""
    size = parameter.ds_tensor.numel()
    part = whole.flatten()[engine.global_rank * size :][:size]
    return pad(part, (0, size - len(part)))
