"""All rigs, by kind of engine."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.contract.engines.rigs.base import Rig

KINDS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("base", "every"))
"""Each has a module here with the class ``<Kind>Rig``."""


def rig_of(kind: str) -> Rig:
    """The rig of a kind of engine."""
    module = importlib.import_module(f"tests.contract.engines.rigs.{kind}")
    rig: Rig = getattr(module, f"{kind.capitalize()}Rig")()
    return rig
