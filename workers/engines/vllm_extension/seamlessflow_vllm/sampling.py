"""Log-probs of ``softmax(logits / temperature)``, also where top-p, top-k or min-p leave only some tokens to draw."""

from __future__ import annotations

from typing import Any

import torch

GREEDY = 1e-5
"""vLLM takes a lower temperature for none at all."""


def report_all_tokens(sampler: Any) -> None:
    """Make a sampler of vLLM (``v1/sample/sampler.py``) report so; harmless when repeated."""
    inner = sampler.sample
    if getattr(inner, "reports_all_tokens", False):
        return

    def sample(logits: torch.Tensor, metadata: Any, mode: str | None = None) -> tuple[torch.Tensor, Any]:
        if metadata.max_num_logprobs is None or metadata.all_greedy or not _masks(metadata):
            return inner(logits, metadata, mode)  # type: ignore[no-any-return]
        temperature = torch.where(metadata.temperature < GREEDY, 1.0, metadata.temperature)
        # Before the sampler's own steps, which change the logits in place.
        reported = (logits / temperature.unsqueeze(1)).log_softmax(-1, dtype=torch.float32)
        return inner(logits, metadata, mode)[0], reported

    sample.reports_all_tokens = True  # type: ignore[attr-defined]
    sampler.sample = sample


def _masks(metadata: Any) -> bool:
    """Whether some request of the batch draws from some of its tokens only."""
    if metadata.top_k is not None or metadata.top_p is not None:
        return True
    # min-p counts the requests that use it; another processor of this kind is taken for a mask.
    return any(getattr(processor, "min_p_count", 1) for processor in metadata.logitsprocs.argmax_invariant)
