"""Stands in for SGLang's kernel library, of which the package index has CUDA builds only.

SGLang imports names from here when it starts on a CPU and, for dense text models without AMX, calls none of them.
Whatever it would call says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build here: this model or option needs a GPU")

    absent.__name__ = name
    return absent
