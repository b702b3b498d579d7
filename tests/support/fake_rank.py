"""A trainer rank without torch: it answers as one, and its "weights" are a digest of everything it was trained on.

``python fake_rank.py LAUNCH.json``. The same checkpoint and manifest give the same weights, whoever computes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

from aiohttp import web

from storage.processes import started_at
from storage.weights import WeightsStore
from workers.cluster import StateFolder
from workers.trainer.launch import Launch, Residency
from workers.trainer.messages import ErrorBody, Order, TrainerStatus, UpdateMetrics, UpdateRequest, UpdateResult

SLOW = "SLOW"
"""While a file of this name is in the state folder, an update does not end: time to kill something."""
MOVES = "MOVES"
"""What ranks did, a word a line, in a file of this name in the state folder."""
BUSY = "BUSY"
"""A file of this name appears in the state folder when such an update has begun."""


class Rank:
    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.state = StateFolder(launch.state)
        saved = json.loads((launch.checkpoint / "state.json").read_text()) if launch.checkpoint else {}
        self.version = int(saved.get("version", 0))
        self.content = str(saved.get("content", "initial"))
        self.phase = "ready"
        self.epoch = launch.epoch
        self.working = asyncio.Lock()
        self.done: dict[tuple[int, int], UpdateResult] = {}

    async def status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._status().model_dump_json())

    def _status(self) -> TrainerStatus:
        return TrainerStatus.model_validate(
            {
                "rank": self.launch.rank,
                "world_size": self.launch.world_size,
                "pid": os.getpid(),
                "phase": self.phase,
                "step": self.version,
                "version": self.version,
                "lineage": 0,
                "epoch": self.epoch,
            }
        )

    async def update(self, request: web.Request) -> web.Response:
        asked = UpdateRequest.model_validate_json(await request.text())
        key = (asked.lineage, asked.step)
        async with self.working:  # a repeated request joins the running update
            if key not in self.done:
                await self._work(asked)
        return web.Response(text=self.done[key].model_dump_json())

    async def park(self, request: web.Request) -> web.Response:
        return await self._place(request, "park", "parked")

    async def unpark(self, request: web.Request) -> web.Response:
        return await self._place(request, "unpark", "ready")

    async def _place(self, request: web.Request, move: str, phase: str) -> web.Response:
        epoch = Order.model_validate_json(await request.text()).epoch
        if epoch < self.epoch:
            old = ErrorBody(error="FencedError", message=f"epoch {epoch} is out of date")
            return web.Response(text=old.model_dump_json(), status=409)
        self.epoch = epoch
        if self.phase != phase:
            self._note(move)
        self.phase = phase
        return web.Response(text=self._status().model_dump_json())

    def _note(self, move: str) -> None:
        with (self.launch.state / MOVES).open("a") as file:
            file.write(move + "\n")

    async def _work(self, asked: UpdateRequest) -> None:
        assert asked.step == self.version, f"step {asked.step} was sent to a rank at version {self.version}"
        assert self.phase == "ready", f"an update came while the rank was {self.phase}"
        self._note("update")
        self.phase = "training"
        while (self.launch.state / SLOW).exists():
            (self.launch.state / BUSY).touch()
            await asyncio.sleep(0.02)
        self.done[asked.lineage, asked.step] = self._train(asked)
        self.phase = "ready"

    def _train(self, asked: UpdateRequest) -> UpdateResult:
        self.version += 1
        self.content = hashlib.sha256((self.content + asked.manifest_digest).encode()).hexdigest()
        checkpoint = self.state.checkpoints(self.launch.spec.run) / f"{asked.lineage}.{asked.step}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text(json.dumps({"version": self.version, "content": self.content}))
        weights = publish(self.state.weights(self.launch.spec.run), self.version, self.content)
        figures = {name: 0 for name in UpdateMetrics.model_fields}
        return UpdateResult(
            lineage=asked.lineage,
            step=asked.step,
            version=self.version,
            checkpoint_path=str(checkpoint),
            checkpoint_digest=self.content,
            weights_path=weights[0],
            weights_digest=weights[1],
            metrics=UpdateMetrics.model_validate(figures),
        )


def publish(root: Path, version: int, content: str) -> tuple[str, str]:
    """Publish ``content`` as the weights of a version; returns path and digest."""
    store = WeightsStore(root)
    temporary = store.begin(version)
    (temporary / "model.safetensors").write_text(content)
    published = store.commit(version, temporary)
    return published.path, published.digest


async def main() -> None:
    launch = Launch.read(Path(sys.argv[1]))
    rank = Rank(launch)
    app = web.Application()
    app.add_routes([web.get("/status", rank.status), web.post("/update", rank.update)])
    app.add_routes([web.post("/park", rank.park), web.post("/unpark", rank.unpark)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert launch.residency is not None
    Residency(
        pid=os.getpid(),
        start_time=started_at(os.getpid()),
        host="127.0.0.1",
        port=runner.addresses[0][1],
        token=launch.token,
        epoch=launch.epoch,
        rank=launch.rank,
        world_size=launch.world_size,
        run=launch.spec.run,
        launch=sys.argv[1],
    ).write(launch.residency)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
