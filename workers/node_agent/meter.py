"""How fast the node works in each role, against what the roofline predicts for the very load that it has."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from storage.errors import ConfigError, EngineError
from workers.engines.base import Stats
from workers.node_agent.profiler import remember, remembered
from workflows.messages import NodeProfiled, NodeRate, TrainOutcome
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import decode_step_s, train_s

log = logging.getLogger(__name__)

KEPT = 20
"""Measurements that a rolling figure is made of."""
LOOK_EVERY_S = 1.0

Look = Callable[[], Awaitable[Stats | None]]


class RateMeter:
    """One node's rates. ``folder``: where its last profile is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, deque[tuple[float, float]]] = {"decode": deque(maxlen=KEPT), "train": deque(maxlen=KEPT)}
        self._last: tuple[float, Stats] | None = None
        self._profile: NodeProfiled | None = None
        self._model: ModelCost | None = None
        found = remembered(folder)
        if found is not None:
            self._use(found)

    @property
    def profile(self) -> NodeProfiled | None:
        return self._profile

    def learn(self, found: NodeProfiled) -> None:
        """The node was measured anew: what was compared with the old profile is forgotten."""
        remember(self._folder, found)
        for seen in self._seen.values():
            seen.clear()
        self._use(found)

    def rates(self) -> tuple[NodeRate, ...]:
        """Of the roles that the node had since its profile was measured."""
        return tuple(self._rate(role) for role in ("decode", "train") if self._seen[role])

    def noted(self, outcome: TrainOutcome) -> TrainOutcome:
        """An update of this node was measured; its metrics tell the prediction errors from now on."""
        metrics = outcome.metrics
        tokens, seconds = metrics.get("tokens_computed", 0.0), metrics.get("seconds_training", 0.0)
        if self._profile and self._model and tokens and seconds:
            context = metrics.get("tokens_in_rows", tokens) / max(1.0, metrics.get("rows", 1.0))
            predicted = train_s(self._profile.device, self._model, tokens, context=context)
            self._seen["train"].append((tokens / predicted, tokens / seconds))
        errors = {f"{rate.role}_rate_error": rate.error for rate in self.rates() if rate.error is not None}
        return outcome.model_copy(update={"metrics": {**metrics, **errors}})

    async def watch(self, look: Look) -> None:
        """Compare for ever. ``look``: the engine's load; None where none runs or none tells what it generated."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self.saw(await look(), time.monotonic())
            except EngineError as error:
                log.debug("no rate of the engine: %s", error)
                self._last = None

    def saw(self, load: Stats | None, now: float) -> None:
        """The engine's load at second ``now``. Counts where it was busy at both ends of the interval."""
        last, self._last = self._last, None if load is None else (now, load)
        if last is None or load is None or load.generated is None or last[1].generated is None:
            return
        tokens = load.generated - last[1].generated
        if tokens <= 0 or not (load.running and last[1].running) or not (self._profile and self._model):
            return
        batch = (load.running + last[1].running) / 2
        context = (_context(load) + _context(last[1])) / 2
        step = decode_step_s(self._profile.device, self._model, batch, context)
        self._seen["decode"].append((batch / step, tokens / (now - last[0])))

    def _use(self, found: NodeProfiled) -> None:
        try:
            config = json.loads((Path(found.model) / "config.json").read_text())
            self._model = ModelCost.from_config(config)
        except (OSError, ConfigError) as error:
            log.warning("no predictions: the model of the last profile cannot be read: %s", error)
            return
        self._profile = found

    def _rate(self, role: Literal["decode", "train"]) -> NodeRate:
        seen = self._seen[role]
        predicted, measured = (sum(pair[side] for pair in seen) / len(seen) for side in (0, 1))
        error = sum(abs(p / m - 1) for p, m in seen) / len(seen)
        return NodeRate(role=role, predicted=predicted, measured=measured, error=error)


def _context(load: Stats) -> int:
    return load.used_tokens if load.running_tokens is None else load.running_tokens
