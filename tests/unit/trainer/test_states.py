"""A checkpoint's states come back exactly, and those of another model are refused before anything changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from storage.errors import ConfigError
from workers.trainer.states import load_states, prepare, save_states, updates


@dataclass
class PlainEngine:
    """As much of a DeepSpeed engine at stage 0 with one rank as states need."""

    module: torch.nn.Module
    world_size: int = 1
    global_rank: int = 0
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        prepare(self)

    def zero_optimization_stage(self) -> int:
        return 0

    def zero_optimization(self) -> bool:
        return False

    def step(self, count: int) -> None:
        for step in range(count):
            self.module(torch.full((1, 3), 1.0 + step)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def model(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def parameters(engine: PlainEngine) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in engine.module.parameters()]


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    first, second = PlainEngine(model()), PlainEngine(model())
    first.step(3)
    save_states(first, tmp_path / "policy")
    load_states(second, tmp_path / "policy")
    assert updates(second) == 3
    first.step(2)
    second.step(2)
    assert parameters(first) == parameters(second)


def test_a_state_can_be_saved_before_the_first_step(tmp_path: Path) -> None:
    new, other = PlainEngine(model()), PlainEngine(model())
    save_states(new, tmp_path)
    other.step(1)
    load_states(other, tmp_path)
    assert updates(other) == 0
    assert parameters(new) == parameters(other)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (None, "holds no optimizer state"),
        (torch.nn.Sequential(torch.nn.Linear(3, 4)), r"another model: 2\.bias is in one of them only"),
        (model(width=5), r"another model: 0\.weight has shape \(5, 3\) there and \(4, 3\) here"),
    ],
    ids=["nothing", "other names", "other shapes"],
)
def test_another_model_s_state_is_refused_and_nothing_changes(
    tmp_path: Path, saved: torch.nn.Module | None, message: str
) -> None:
    if saved is not None:
        save_states(PlainEngine(saved), tmp_path)
    engine = PlainEngine(model())
    before = parameters(engine)
    with pytest.raises(ConfigError, match=message):
        load_states(engine, tmp_path)
    assert parameters(engine) == before
