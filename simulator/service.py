"""How long a node takes: decode steps, prompts and updates, from the real roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from workflows.scheduling import roofline
from workflows.scheduling.devices import DeviceProfile
from workflows.scheduling.model_cost import ModelCost

_FAR = 1e7
"""Context tokens at which whatever grows fastest with the context rules a step."""


class StepLine(NamedTuple):
    """Seconds of a decode step of one batch size: ``low + low_slope*context`` up to ``crossing`` context tokens, then
    ``high + high_slope*context``. That is what the roofline is: the larger of two lines."""

    low: float
    low_slope: float
    crossing: float
    high: float
    high_slope: float


@dataclass(eq=False)
class Service:
    """The speed of one kind of node: ``devices`` like devices that hold one replica of the model."""

    device: DeviceProfile
    model: ModelCost
    devices: int = 1
    kv_limit: int | None = None
    """Tokens of KV; None: what fits beside the weights."""
    _lines: dict[int, StepLine] = field(default_factory=dict, repr=False)

    @property
    def kv_tokens(self) -> int:
        return self.kv_limit or roofline.kv_tokens(self.device, self.model, self.devices)

    def step_s(self, batch: int, context: float) -> float:
        """Seconds of one decode step; ``context``: tokens in the KV of all ``batch`` sequences."""
        return roofline.decode_step_s(self.device, self.model, batch, context, devices=self.devices)

    def prefill_s(self, tokens: float, context: float = 0) -> float:
        return roofline.prefill_s(self.device, self.model, tokens, context=context, devices=self.devices)

    def train_s(self, tokens: float, context: float) -> float:
        """Seconds of an update if this node made it alone."""
        return roofline.train_s(self.device, self.model, tokens, context=context, devices=self.devices)

    def line(self, batch: int) -> StepLine:
        """The roofline of one batch size, read off the function itself."""
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = self._read_line(batch)
        return line

    def _read_line(self, batch: int) -> StepLine:
        near, far = self.step_s(batch, 0), self.step_s(batch, _FAR)
        low_slope = (self.step_s(batch, batch) - near) / batch
        high_slope = (self.step_s(batch, 2 * _FAR) - far) / _FAR
        high = far - high_slope * _FAR
        crossing = (near - high) / (high_slope - low_slope) if high_slope - low_slope > 1e-18 else math.inf
        return StepLine(near, low_slope, crossing, high, high_slope)


def seconds_of(line: StepLine, batch: int, context: float, steps: float) -> float:
    """Time of ``steps`` decode steps with which the context grows by ``batch`` tokens each: a closed form."""
    start, slope, crossing, high, high_slope = line
    room = (crossing - context) / batch
    if room >= steps:
        return steps * (start + slope * (context + batch * steps / 2))
    seconds = 0.0
    if room > 0:
        seconds = room * (start + slope * (context + batch * room / 2))
        steps -= room
        context = crossing
    return seconds + steps * (high + high_slope * (context + batch * steps / 2))


def steps_in(line: StepLine, batch: int, context: float, seconds: float) -> float:
    """The inverse of :func:`seconds_of`: decode steps, with their fraction, that fit into ``seconds``."""
    start, slope, crossing, high, high_slope = line
    room = (crossing - context) / batch
    if room <= 0:
        return _solve(high_slope * batch / 2, high + high_slope * context, seconds)
    first = room * (start + slope * (context + batch * room / 2)) if room < math.inf else math.inf
    if seconds <= first:
        return _solve(slope * batch / 2, start + slope * context, seconds)
    return room + _solve(high_slope * batch / 2, high + high_slope * crossing, seconds - first)


def _solve(a: float, b: float, c: float) -> float:
    """The positive root of a*x^2 + b*x = c, without cancellation where a is small."""
    return 2 * c / (b + math.sqrt(b * b + 4 * a * c))
