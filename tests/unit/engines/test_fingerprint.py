"""What an engine must report for a checkpoint, worked out from its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from storage.errors import EngineRejected
from workers.engines.checkpoint import stored_tensors
from workers.engines.fingerprint import check_finite, differing, expected_checksums

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checksum(*tensors: torch.Tensor) -> str:
    raw = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(raw).digest()[:8].hex()


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("served", TYPES)
def test_a_tensor_is_converted_as_torch_converts_it(stored: str, served: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensor = torch.cat([torch.randn(4000), torch.tensor([0.0, -0.0, 1e-7, 65504.0])]).to(TYPES[stored])
    save_file({"norm.weight": tensor}, tmp_path / "model.safetensors")
    expected = expected_checksums(["norm.weight"], stored_tensors(tmp_path), served)
    assert expected == {"norm.weight": checksum(tensor.to(TYPES[served]))}


def test_projections_that_an_engine_fuses_are_joined_in_its_order(tmp_path: Path) -> None:
    parts = {f"l.0.{name}_proj.weight": torch.randn(4, 3) for name in ("v", "k", "q", "up", "gate")}
    save_file(parts, tmp_path / "model.safetensors")
    names = ["l.0.qkv_proj.weight", "l.0.gate_up_proj.weight", "l.0.unheard_of.weight"]
    expected = expected_checksums(names, stored_tensors(tmp_path), "float32")
    assert expected == {
        names[0]: checksum(*(parts[f"l.0.{name}_proj.weight"] for name in "qkv")),
        names[1]: checksum(*(parts[f"l.0.{name}_proj.weight"] for name in ("gate", "up"))),
    }


def test_differing_names_those_that_both_know_and_that_are_not_the_same() -> None:
    assert differing({"a": "1", "b": "2", "d": "4"}, {"a": "1", "b": "3", "c": "5"}) == ["b"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(dtype: str, value: float, tmp_path: Path) -> None:
    tensors = {"good": torch.ones(3, dtype=TYPES[dtype]), "bad": torch.tensor([1.0, value], dtype=TYPES[dtype])}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineRejected, match="bad"):
        check_finite(stored_tensors(tmp_path))
