"""Stop strings: where token ids meet text."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any


class StopFinder:
    """Looks for stop strings in decoded output; the tokenizer is loaded when first needed."""

    def __init__(self, tokenizer: Path) -> None:
        self._path = tokenizer

    @property
    def available(self) -> bool:
        """Whether the model comes with a tokenizer."""
        return self._path.exists()

    def __call__(self, ids: list[int], stops: tuple[str, ...]) -> str | None:
        """The stop string that comes first in the text of ``ids``, None if there is none."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        found = [(text.index(stop), stop) for stop in stops if stop in text]
        return min(found)[1] if found else None

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer  # costs 20 ms, and few requests have stop strings

        return Tokenizer.from_file(str(self._path))
