"""The calls: ``method`` of ``POST /collective_rpc``, each answered by every worker with a dict.

An exception in a call would reach the adapter as an HTTP error without its cause and leave the workers in different
states, so a load answers with what happened instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .broadcast import Broadcast
from .proof import Proof, Samples, prove
from .sampling import report_all_tokens

PROTOCOL = 1
Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class Served:
    """What a worker holds."""

    path: str
    """Directory of the weights."""


class WorkerExtension:
    """Base class that vLLM adds to its worker; ``self`` is that worker."""

    model_runner: Any
    model_config: Any
    parallel_config: Any
    device: torch.device
    reload_weights: Callable[..., None]

    def seamlessflow_state(self) -> dict[str, Any]:
        """What this worker serves and how; from the first call on, log-probs are those of all tokens."""
        report_all_tokens(self.model_runner.sampler)
        served = self._seamlessflow_served()
        return {
            "protocol": PROTOCOL,
            "model_path": self.model_config.model,
            "path": served.path,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_context": self.model_config.max_model_len,
            "logprobs_mode": self.model_config.logprobs_mode,
            "max_logprobs": self.model_config.max_logprobs,
            "sleeps": self.device.type != "cpu" and bool(self.model_config.enable_sleep_mode),
        }

    def seamlessflow_load(self, path: str) -> dict[str, Any]:
        """Serve the checkpoint directory ``path``; if that fails, what was served before."""
        return self._seamlessflow_change(path, lambda: stored(path))

    def seamlessflow_receive(self, path: str, broadcast: dict[str, Any]) -> dict[str, Any]:
        """The same, with the tensors taken from a broadcast; ``path`` holds them too."""
        return self._seamlessflow_change(path, lambda: Broadcast(**broadcast).tensors(self.device))

    def _seamlessflow_change(self, path: str, source: Callable[[], Tensors]) -> dict[str, Any]:
        served = self._seamlessflow_served()
        error, proof = self._seamlessflow_attempt(source)
        if error is None:
            served.path = path
            return {"loaded": True, "seen": proof[0], "proven": proof[1]}
        # Half a model is unusable, and some of it may have no memory: nothing may run before this.
        again, _ = self._seamlessflow_attempt(lambda: stored(served.path))
        lost = None if again is None else f"{error}; and then {served.path}: {again}"
        return {"loaded": False, "error": error, "lost": lost}

    def _seamlessflow_attempt(self, source: Callable[[], Tensors]) -> tuple[str | None, tuple[int, int]]:
        """Why it failed, or None; and how many tensors came and how many of them the model is proven to hold."""
        samples = Samples()
        try:
            self.reload_weights(weights_iterator=samples.watch(source()))
            proof = self._seamlessflow_settle(samples)
        except Exception as error:  # noqa: BLE001 - whatever it was, the worker has to be made whole and the cause told
            self._seamlessflow_abandon()
            return f"{type(error).__name__}: {error}", (0, 0)
        if proof.wrong:
            return f"the model does not hold what was loaded: {', '.join(proof.wrong[:5])} differ", (0, 0)
        return None, (samples.seen, proof.proven)

    def _seamlessflow_settle(self, samples: Samples) -> Proof:
        model = self.model_runner.get_model()
        repack_heads(model)
        if self.model_config.quantization is not None or self.parallel_config.tensor_parallel_size > 1:
            return Proof([], 0)  # what a layer holds is no part of the checkpoint as it is
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        return prove(model, samples, tied=tied, dtype=self.model_config.dtype)

    def _seamlessflow_abandon(self) -> None:
        """End a reload that was cut: else the next one counts its tensors together with those of this one."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)

    def _seamlessflow_served(self) -> Served:
        if not hasattr(self, "_seamlessflow"):
            self._seamlessflow = Served(self.model_config.model)
        return self._seamlessflow


def stored(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint directory."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def repack_heads(model: torch.nn.Module) -> int:
    """Make packed copies of weights anew that a reload leaves; returns how many.

    A layer that packs its weights on the CPU gives up the plain ones, except for a language model head, whose plain
    weights may be the embedding's too. A reload packs a layer when tensors of its own came, and a tied head has none.
    """
    count = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]
            count += 1
    return count
