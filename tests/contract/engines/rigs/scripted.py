"""The scripted engine without plays: its tokens are a function of the prompt alone, whatever the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.contract.engines.models import CONTEXT
from tests.contract.engines.rigs.base import ABILITIES, Rig
from workers.engines.base import Engine

OF_A_MODEL = {"policy", "min_p", "seeds", "stop_strings", "tied_and_untied", "queue", "checks_weights"}


class ScriptedRig(Rig):
    kind = "scripted"
    abilities = ABILITIES - OF_A_MODEL - {"collective"}

    def arguments(self, folder: Path) -> Sequence[str]:
        script = folder / "script.json"
        script.write_text(json.dumps({"delay_s": 0.002, "max_context": CONTEXT, "strict_loads": True}))
        return ("--script", str(script))

    async def version(self, engine: Engine) -> str:
        return version("seamlessflow")
