"""The embedded engine."""

from __future__ import annotations

from importlib.metadata import version

from tests.contract.engines.rigs.base import ABILITIES, Rig
from workers.engines.base import Engine


class EmbeddedRig(Rig):
    kind = "embedded"
    abilities = ABILITIES - {"collective", "grammar", "penalties"}

    async def version(self, engine: Engine) -> str:
        return version("seamlessflow")
