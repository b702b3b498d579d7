"""The scripted engine without a script: its tokens are a function of the prompt alone, whatever the weights."""

from __future__ import annotations

from importlib.metadata import version

from tests.contract.engines.rigs.base import ABILITIES, Rig
from workers.engines.base import Engine


class ScriptedRig(Rig):
    kind = "scripted"
    abilities = ABILITIES - {"policy", "min_p", "seeds", "stop_strings", "tied_and_untied", "collective"}

    async def version(self, engine: Engine) -> str:
        return version("seamlessflow")
