"""The real SGLang server on the CPU."""

from __future__ import annotations

from tests.contract.engines.rigs.base import ABILITIES, Rig
from workers.engines.base import Engine
from workers.engines.sglang import SglangEngine


class SglangRig(Rig):
    kind = "sglang"
    abilities = ABILITIES - {"seeds", "release_memory", "abort_in_place", "update_lands_at_once"}
    engine = {"device": "cpu"}  # noqa: RUF012 - read only

    async def version(self, engine: Engine) -> str:
        assert isinstance(engine, SglangEngine)
        return str((await engine.server_info())["version"])
