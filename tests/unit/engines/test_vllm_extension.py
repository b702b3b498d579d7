"""What is put into vLLM's workers, on a worker made for it: reloads, their proof, log-probs of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from workers.engines.vllm_extension.seamlessflow_vllm import extension
from workers.engines.vllm_extension.seamlessflow_vllm.extension import WorkerExtension
from workers.engines.vllm_extension.seamlessflow_vllm.proof import COLUMNS, Samples, columns, prove
from workers.engines.vllm_extension.seamlessflow_vllm.sampling import report_all_tokens

HIDDEN, VOCAB = 24, 10


class Packed(nn.Module):
    """A layer as vLLM has it on the CPU: its own tensor is empty, what it computes with is elsewhere."""

    def __init__(self, weight: torch.Tensor, keep: bool = False) -> None:
        super().__init__()
        self.quant_method = self
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._keep = keep
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        held = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ held.t()
        if not self._keep:
            self.weight = nn.Parameter(torch.empty(0, dtype=held.dtype), requires_grad=False)


class Attention(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.qkv_proj = Packed(torch.cat([tensors[f"attention.{part}.weight"] for part in ("q", "k", "v")]))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(tensors["attention.norm.weight"].clone(), requires_grad=False)


class Model(nn.Module):
    """One block and a tied head. ``load`` forgets the head's packed copy, as vLLM does."""

    packed_modules_mapping = {"qkv_proj": ["q", "k", "v"]}  # noqa: RUF012 - read only

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(tensors["embed_tokens.weight"].clone(), requires_grad=False)
        self.attention = Attention(tensors)
        self.lm_head = Packed(self.embed_tokens.weight.detach(), keep=True)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaded = dict(tensors)
        self.embed_tokens.weight.data.copy_(loaded["embed_tokens.weight"])
        self.attention = Attention(loaded)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    parts = {f"attention.{part}.weight": torch.randn(rows, HIDDEN) for part, rows in (("q", 8), ("k", 4), ("v", 4))}
    return {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "attention.norm.weight": torch.randn(HIDDEN)} | parts


def write(folder: Path, seed: int) -> str:
    """A checkpoint in two files; the embedding is in the first."""
    folder.mkdir()
    tensors = checkpoint(seed)
    save_file({"embed_tokens.weight": tensors.pop("embed_tokens.weight")}, folder / "model-1.safetensors")
    save_file(tensors, folder / "model-2.safetensors")
    return str(folder)


@dataclass
class Worker(WorkerExtension):
    """The worker that vLLM would have made."""

    path: str
    quantization: str | None = None
    workers: int = 1
    abandoned: int = 0
    corrupt: Callable[[Model], None] = field(default=lambda model: None)
    """Done to the model at the end of each reload."""

    def __post_init__(self) -> None:
        self.model = Model(dict(extension.stored(self.path)))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, sampler=SimpleNamespace(sample=lambda: None))
        self.model_config = SimpleNamespace(
            model=self.path,
            quantization=self.quantization,
            dtype=torch.float32,
            hf_text_config=SimpleNamespace(tie_word_embeddings=True),
            get_vocab_size=lambda: VOCAB,
            max_model_len=64,
            logprobs_mode="processed_logprobs",
            max_logprobs=21,
            enable_sleep_mode=False,
        )
        self.parallel_config = SimpleNamespace(tensor_parallel_size=self.workers)
        self.device = torch.device("cpu")

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.load(weights_iterator)
        self.corrupt(self.model)

    def _seamlessflow_abandon(self) -> None:
        self.abandoned += 1

    def holds(self, seed: int) -> bool:
        """Whether all that the model computes with is of one checkpoint."""
        return all(
            torch.equal(now, wanted)
            for now, wanted in (
                (
                    self.model.lm_head.cpu_linear(torch.eye(HIDDEN), None, None).t(),
                    checkpoint(seed)["embed_tokens.weight"],
                ),
                (self.model.embed_tokens.weight, checkpoint(seed)["embed_tokens.weight"]),
                (self.model.attention.norm.weight, checkpoint(seed)["attention.norm.weight"]),
                (
                    self.model.attention.qkv_proj.cpu_linear(torch.eye(HIDDEN), None, None).t(),
                    torch.cat([checkpoint(seed)[f"attention.{part}.weight"] for part in ("q", "k", "v")]),
                ),
            )
        )


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [write(tmp_path / f"version-{seed}", seed) for seed in range(2)]


def test_a_load_reaches_every_layer_the_tied_head_too_and_is_proven(paths: list[str]) -> None:
    worker = Worker(paths[0])
    assert worker.seamlessflow_load(paths[1]) == {"loaded": True, "seen": 5, "proven": 5}
    assert worker.holds(1)
    assert worker.seamlessflow_state()["path"] == paths[1]


def test_a_load_that_breaks_off_leaves_the_weights_that_were_served(paths: list[str]) -> None:
    worker = Worker(paths[0])
    worker.seamlessflow_load(paths[1])
    Path(paths[0], "model-2.safetensors").write_bytes(b"\xff" * 64)
    answer = worker.seamlessflow_load(paths[0])
    assert (answer["loaded"], answer["lost"]) == (False, None)
    assert "Safetensor" in answer["error"]
    assert worker.abandoned == 1
    assert worker.holds(1)
    assert worker.seamlessflow_state()["path"] == paths[1]


def test_a_folder_without_weights_is_told_and_changes_nothing(paths: list[str], tmp_path: Path) -> None:
    worker = Worker(paths[0])
    assert str(tmp_path / "nowhere") in worker.seamlessflow_load(str(tmp_path / "nowhere"))["error"]
    assert worker.holds(0)


def test_weights_that_cannot_be_put_back_are_said_to_be_lost(paths: list[str]) -> None:
    worker = Worker(paths[0])
    Path(paths[0], "model-1.safetensors").unlink()
    Path(paths[0], "model-2.safetensors").unlink()
    Path(paths[1], "model-2.safetensors").write_bytes(b"\xff" * 64)
    assert paths[0] in worker.seamlessflow_load(paths[1])["lost"]


@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        (lambda model: model.embed_tokens.weight.data[3, columns(HIDDEN)[1]].add_(1e-6), "embed_tokens.weight"),
        (lambda model: model.attention.norm.weight.data[0].add_(1e-6), "attention.norm.weight"),
        (lambda model: setattr(model.attention, "qkv_proj", Packed(torch.zeros(16, HIDDEN))), "qkv_proj.weight"),
    ],
)
def test_a_model_that_holds_something_else_after_a_load_is_put_back(
    paths: list[str], corrupt: Callable[[Model], None], named: str
) -> None:
    worker = Worker(paths[0])
    attempts: list[Model] = []

    def once(model: Model) -> None:
        attempts.append(model)
        if len(attempts) == 1:
            corrupt(model)

    worker.corrupt = once
    answer = worker.seamlessflow_load(paths[1])
    assert (answer["loaded"], answer["lost"]) == (False, None)
    assert named in answer["error"]
    assert worker.holds(0)


def test_without_the_repacking_the_tied_head_is_found_to_be_stale(paths: list[str]) -> None:
    model, samples = Model(checkpoint(0)), Samples()
    model.load(samples.watch(checkpoint(1).items()))
    assert prove(model, samples, tied=True, dtype=torch.float32).wrong == ["lm_head.weight"]


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"workers": 2}])
def test_what_is_no_part_of_the_checkpoint_as_it_is_proves_nothing(paths: list[str], options: dict[str, Any]) -> None:
    assert Worker(paths[0], **options).seamlessflow_load(paths[1]) == {"loaded": True, "seen": 5, "proven": 0}


def test_rows_of_padding_and_a_narrower_type_are_no_difference() -> None:
    samples = Samples()
    tensors = list(samples.watch(checkpoint(0).items()))
    model = Model({name: tensor.to(torch.bfloat16) for name, tensor in tensors})
    padded = torch.cat([model.embed_tokens.weight.detach(), torch.zeros(6, HIDDEN, dtype=torch.bfloat16)])
    model.embed_tokens.weight = nn.Parameter(padded, requires_grad=False)
    proof = prove(model, samples, tied=True, dtype=torch.bfloat16)
    assert (proof.wrong, proof.proven) == ([], 5)


@pytest.mark.parametrize("width", [1, 3, 8, 9, 64, 576])
def test_the_columns_looked_at_are_spread_over_the_width(width: int) -> None:
    found = columns(width)
    assert found == sorted(set(found))
    assert len(found) == min(width, COLUMNS)
    assert 0 <= found[0] <= width // COLUMNS
    assert width - 1 - width // COLUMNS - 1 <= found[-1] < width


def sampler() -> Any:
    """As vLLM's: what it reports is of the tokens that are left, and it changes the logits in place."""

    def sample(logits: torch.Tensor, metadata: Any, mode: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.div_(torch.where(metadata.temperature < 1e-5, 1.0, metadata.temperature).unsqueeze(1))
        if metadata.top_k is not None:
            scaled[scaled < scaled.topk(int(metadata.top_k)).values[:, -1:]] = -torch.inf
        return scaled.argmax(-1), scaled.log_softmax(-1)

    return SimpleNamespace(sample=sample)


def metadata(**changes: Any) -> Any:
    values = {"temperature": torch.tensor([0.5, 0.0]), "top_k": None, "top_p": None, "max_num_logprobs": 0}
    logitsprocs = SimpleNamespace(argmax_invariant=[SimpleNamespace(min_p_count=changes.pop("min_p_count", 0))])
    return SimpleNamespace(**(values | {"all_greedy": False, "logitsprocs": logitsprocs} | changes))


@pytest.mark.parametrize("masked", [{"top_k": 2}, {"top_p": torch.tensor([0.1, 0.1])}, {"min_p_count": 1}, {}])
def test_log_probs_are_of_all_tokens_at_the_temperature_and_the_draw_is_the_sampler_s(masked: dict[str, Any]) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    drawn, _ = sampler().sample(logits.clone(), metadata(**masked))
    changed = sampler()
    report_all_tokens(changed)
    report_all_tokens(changed)
    tokens, reported = changed.sample(logits.clone(), metadata(**masked))
    expected = torch.stack([(logits[0] / 0.5).log_softmax(-1), logits[1].log_softmax(-1)])
    assert torch.equal(tokens, drawn)
    assert torch.allclose(reported, expected, atol=1e-6)
