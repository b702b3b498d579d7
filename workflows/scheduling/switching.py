"""Whether a change of roles pays: hysteresis for nodes that both roll out and train.

Two questions, one rule. *Take*: a batch is complete; do the train nodes change over now, or when the batch after it is
complete too, so that two updates share one change? *Return*: an update is made; do they roll out until the next batch
is complete, or stay? A change pays if what it gains exceeds its cost, which is measured, by :data:`MARGIN`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from workflows.scheduling.decision import Decision

SWITCH, STAY = "switch", "stay"
MARGIN = 0.1
KEPT = 5
"""Measurements of which a cost is the mean: few, so that it follows the machine."""

Part = Literal["release", "load", "weights", "first_token"]


class SwitchCost(BaseModel):
    """Rolling measurement of a change to training and back, by part, in seconds; the newest last.

    ``release``: pre-empt signal until the engine has stopped. ``load``: until the gang is ready. ``weights``: end of
    the update until the engine serves them. ``first_token``: until it decodes again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    release: tuple[float, ...] = ()
    load: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    first_token: tuple[float, ...] = ()

    def with_measured(self, part: Part, seconds: float) -> SwitchCost:
        """With one more measurement.

        >>> SwitchCost().with_measured("release", 0.2).with_measured("load", 0.4).total_s
        0.6...
        """
        return self.model_copy(update={part: (*getattr(self, part), max(0.0, seconds))[-KEPT:]})

    def mean_s(self, part: Part) -> float:
        """0 where nothing was measured."""
        values: tuple[float, ...] = getattr(self, part)
        return sum(values) / len(values) if values else 0.0

    @property
    def total_s(self) -> float | None:
        """Of a round trip; None before anything was measured."""
        parts: tuple[Part, ...] = ("release", "load", "weights", "first_token")
        return sum(map(self.mean_s, parts)) if any(getattr(self, part) for part in parts) else None


@dataclass(frozen=True)
class GroupFlow:
    """How groups come in. Rates are of all nodes that rolled out lately."""

    ready: int
    """Complete groups that a step may train."""
    wanted: int
    """Groups of a step."""
    supply: int
    """Groups that rollout can still complete within the staleness bound, those in work included."""
    in_flight: int
    """Groups that are worked on at a time while there are enough."""
    rate: float
    """Groups completed per second; 0: not known."""


def seconds_to_next_batch(flow: GroupFlow) -> float:
    """Until the next batch is complete; infinite if nothing says when, or if it needs more than may start.

    >>> seconds_to_next_batch(GroupFlow(ready=1, wanted=4, supply=8, in_flight=4, rate=0.5))
    6.0
    """
    missing = max(0, flow.wanted - flow.ready)
    if missing and (flow.rate <= 0 or missing > flow.supply):
        return math.inf
    return missing / flow.rate if missing else 0.0


def gain_of_return(flow: GroupFlow, *, alone: bool = False, train_s: float = 0.0, idled_s: float = 0.0) -> float:
    """Node-seconds of rollout that a train node would do until it is taken again.

    ``alone``: no other node rolls out, so a batch that is not complete would never be if the train nodes stayed.
    ``train_s``: how long an update takes whose gradients are accumulated as groups complete; a node that stays is
    busy with it before the batch is complete. ``idled_s``: what nodes that stayed are known to wait nevertheless, since
    groups come in waves.

    Groups are taken to come in as a Poisson stream, so the next batch may be later than expected. A node that stays
    would wait for it, one that returns would be called a little early: the gain is the mean of what is later than the
    update takes, and above 0 where the batch is expected sooner.

    >>> gain_of_return(GroupFlow(ready=1, wanted=4, supply=8, in_flight=4, rate=50.0), alone=True)
    inf
    >>> round(gain_of_return(GroupFlow(ready=0, wanted=4, supply=8, in_flight=4, rate=0.5), train_s=5.0), 1)
    3.5
    """
    if alone and flow.ready < flow.wanted:
        return math.inf
    if not flow.supply:
        return 0.0
    batch_s = seconds_to_next_batch(flow)
    return max(idled_s, _mean_beyond(train_s, batch_s, missing=flow.wanted - flow.ready) if train_s else batch_s)


def _mean_beyond(limit_s: float, mean_s: float, *, missing: int) -> float:
    """Mean of how much later than ``limit_s`` the last of ``missing`` groups comes, which is expected after ``mean_s``:
    of a normal distribution with the deviation of a Poisson stream."""
    deviation_s = mean_s / math.sqrt(max(1, missing))
    if math.isinf(mean_s) or not deviation_s:
        return max(0.0, mean_s - limit_s)
    z = (mean_s - limit_s) / deviation_s
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation_s * (density + z * (1 + math.erf(z / math.sqrt(2))) / 2)


def gain_of_taking(flow: GroupFlow) -> float:
    """Node-seconds that a node would idle if it waited until the batch after the complete one is complete too.

    Rollout is busy while more groups are left than it works on at a time, ``n``; from then on completions slow down in
    proportion to what is left (memoryless groups), and the last ``d`` of the awaited ones come in
    ``n / rate * ln(n / (n - d))`` instead of ``d / rate`` seconds. Infinite where waiting is in vain: the second batch
    is complete too, or the staleness bound forbids it.
    """
    awaited = max(0, 2 * flow.wanted - flow.ready)
    if not awaited or flow.rate <= 0 or awaited >= flow.supply:
        return math.inf
    n = max(1, min(flow.in_flight, flow.supply))
    tail = max(0, awaited - (flow.supply - n))
    return (n * math.log(n / (n - tail)) - tail) / flow.rate if tail < n else math.inf


def worth_switching(
    gain_s: float, cost_s: float | None, *, what_for: str = "the change", batch_s: float = 0.0, margin: float = MARGIN
) -> Decision:
    """``switch`` or ``stay``. An unknown cost is measured by switching.

    ``predicted_gain_s`` of the answer is what remains of the gain after the cost, for the choice that was made; None
    where it is not known or without bound. ``batch_s``: when the next batch is expected, for :func:`with_hindsight`.

    >>> worth_switching(gain_s=4.0, cost_s=1.5).what, worth_switching(gain_s=1.0, cost_s=1.5).what
    ('switch', 'stay')
    """
    if cost_s is None:
        return Decision(what=SWITCH, why=f"{what_for}: its cost is not known yet and will be measured")
    if math.isinf(gain_s):
        why = f"{what_for}: nobody knows when there would be a better moment"
        return Decision(what=SWITCH, why=why, facts={"cost_s": cost_s})
    net = gain_s - cost_s
    pays = gain_s > cost_s * (1 + margin)
    why = f"{what_for} gains {gain_s:.2f} s of the nodes' time and costs {cost_s:.2f} s"
    facts = {"gain_s": gain_s, "cost_s": cost_s, "batch_s": batch_s if math.isfinite(batch_s) else 0.0}
    return Decision(what=SWITCH if pays else STAY, why=why, facts=facts, predicted_gain_s=net if pays else -net)


def with_hindsight(decision: Decision, batch_s: float, cost_s: float) -> float:
    """What a decision gained, once the next batch was complete after ``batch_s`` and the change had cost ``cost_s``.

    Gains are proportional to the time a batch takes, so the predicted one is scaled by what it took.

    >>> with_hindsight(worth_switching(4.0, 1.5, batch_s=4.0), batch_s=6.0, cost_s=2.0)
    4.0
    """
    expected = decision.facts.get("batch_s", 0.0)
    gain = decision.facts["gain_s"] * batch_s / expected if expected else batch_s
    net = gain - cost_s
    return net if decision.what == SWITCH else -net
