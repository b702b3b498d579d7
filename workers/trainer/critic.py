"""The critic: a language model's body with a head that gives one value per token.

It is trained by the trainer's ranks, or by ranks of its own (:mod:`workers.trainer.critic_trainer`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ValueModel(nn.Module):
    """Takes the arguments of a causal LM; its head starts at 0, so that a new critic expects nothing."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.body = language_model.base_model
        weight = next(self.body.parameters())
        hidden = language_model.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden, 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, *, logits_to_keep: Tensor, **arguments: Any) -> Tensor:
        """Values behind the tokens ``logits_to_keep``, shape (K,)."""
        hidden_KD = self.body(**arguments).last_hidden_state[0, logits_to_keep]
        values_K: Tensor = self.head(hidden_KD).squeeze(-1)
        return values_K
