"""Tells a lack of memory from other failures, and which micro-batch was in work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.trainer.packing import MicroBatch
from workflows.spec import TrainerSpec

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation")
"""What torch's allocators say; the one of the CPU raises a plain RuntimeError."""


@dataclass
class InWork:
    """What a rank computes."""

    number: int = 0
    """Of the micro-batch, counted from 1; 0: none."""
    of: int = 0
    tokens: int = 0
    """Of the micro-batch."""
    changed: bool = False
    """Whether an optimizer step of the batch has been made."""

    def __str__(self) -> str:
        return f"micro-batch {self.number} of {self.of} ({self.tokens} tokens)" if self.number else "no micro-batch"

    def over(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The same micro-batches; whoever goes through them is noted here."""
        return _Noted(batches, self)


class _Noted(list[MicroBatch]):
    def __init__(self, batches: Sequence[MicroBatch], at: InWork) -> None:
        super().__init__(batches)
        self._at = at

    def __iter__(self) -> Iterator[MicroBatch]:
        at = self._at
        for at.number, batch in enumerate(super().__iter__(), start=1):
            at.of, at.tokens = len(self), batch.tokens
            yield batch
        at.number = 0


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)


def advice(at: InWork, trainer: TrainerSpec, *, packs: bool) -> str:
    """What a human can do about it. ``packs``: whether micro-batches are packed to ``row_tokens``."""
    limit = trainer.row_tokens
    if at.tokens > limit or not packs:
        smaller = f"lower model.max_context (it is one trajectory: trainer.row_tokens, {limit}, cannot divide it)"
    else:
        smaller = f"set trainer.row_tokens below {min(limit, at.tokens or limit)} (it is {limit})"
    return smaller if trainer.activation_checkpointing else f"{smaller} or trainer.activation_checkpointing: true"
