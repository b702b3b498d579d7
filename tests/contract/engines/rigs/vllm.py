"""The real vLLM server on the CPU."""

from __future__ import annotations

from tests.contract.engines.rigs.base import ABILITIES, Rig
from workers.engines.base import Engine
from workers.engines.vllm import VllmEngine


class VllmRig(Rig):
    kind = "vllm"
    abilities = ABILITIES - {"release_memory"}
    engine = {"device": "cpu"}  # noqa: RUF012 - read only

    async def version(self, engine: Engine) -> str:
        assert isinstance(engine, VllmEngine)
        return await engine.version()
