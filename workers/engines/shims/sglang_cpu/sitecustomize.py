"""Python imports this at the start of every process of an SGLang server on a CPU: see README.md.

Each finder waits for the first import of one package, puts right what a machine without CUDA lacks, and is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

KEPT: list[Any] = []
"""Objects that must outlive the import."""


class BeforeTorchvision(MetaPathFinder):
    """Declares the operators of torchvision's compiled half, which does not load beside a CPU build of torch."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(library)
        return None


class InsteadOfTriton(MetaPathFinder):
    """Where triton is not installed: the stand-in that SGLang brings along for Apple's machines."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "triton":
            return None
        sys.meta_path.remove(self)
        stubs = next(
            (file for folder in sys.path if (file := Path(folder, "sglang/_platform_stubs.py")).is_file()), None
        )
        if PathFinder.find_spec("triton") is not None or stubs is None:
            return None
        install(stubs)
        module = sys.modules["triton"]
        module.__spec__ = ModuleSpec("triton", Made(module), is_package=True)
        return module.__spec__


class Made(Loader):
    """Hands out a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def install(file: Path) -> None:
    """Run the stand-in as if this were the machine it was made for."""
    import torch

    spec = spec_from_file_location("_sglang_platform_stubs", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    stubs: Any = module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    # What it asks about the machine, and what it would change in torch for Metal, are answered here.
    stubs.sys = SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)
    stubs.platform = SimpleNamespace(machine=lambda: "arm64")
    stubs._patch_non_blocking = lambda: None
    metal: Any = torch.backends.mps
    available = metal.is_available
    metal.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        metal.is_available = available


for finder in (BeforeTorchvision(), InsteadOfTriton()):
    sys.meta_path.insert(0, finder)
