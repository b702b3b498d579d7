"""Whether train nodes roll out between two updates, and when they are called back.

Ours (:class:`Hysteresis`) asks the scheduling code. The others are rules that peers have published, written down from
their descriptions so that they meet ours on the same cluster with the same work:

:class:`DynamicSchedule`   verl's fully asynchronous trainer, ``dynamic_schedule``
:class:`EnableSwitch`      verl's V1 trainer, ``enable_switch``
:class:`IntraToggle`       PEARL's gate, with smoothed costs

All three lend all train nodes or none, and only between updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from simulator.cluster import Costs
from workflows.scheduling import switching
from workflows.scheduling.decision import Decision
from workflows.scheduling.recall import FIRST_SHARE, Recall, StepWaits
from workflows.scheduling.switching import STAY, SWITCH, GroupFlow


@dataclass(frozen=True)
class Moment:
    """What is known when an update has been made. Counts are of groups."""

    flow: GroupFlow
    """As of the step that begins now."""
    waited: int
    """Groups of the last step that its train nodes, once called, had to wait for."""
    waited_s: float
    """How long that was."""
    called: bool
    """Whether they were called from rollout for it, rather than kept."""
    train_s: float
    """How long they computed."""
    rollout_s: float
    """From the beginning of the last step until its batch was complete."""
    starved: bool
    """Whether rollout had started all that it may when the update was made."""
    train_nodes: int
    rollout_nodes: int
    """Those that never train."""


class Lending:
    """The base keeps nothing: train nodes always return, and are called when the batch is complete."""

    def __init__(self, costs: Costs) -> None:
        self._cost_s = costs.rollout_to_train_s + costs.train_to_rollout_s

    def recall_at(self, wanted: int) -> int:
        """Complete groups at which train nodes are taken from rollout; ``wanted`` make a step."""
        return wanted

    def returns(self, moment: Moment) -> Decision:
        """``switch``: the train nodes roll out; ``stay``: they wait for the next batch."""
        return Decision(what=SWITCH, why="train nodes always return to rollout")


class Hysteresis(Lending):
    """Ours: :mod:`workflows.scheduling.switching`, with the costs it has measured so far."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._costs = costs
        self._measured = switching.SwitchCost()

    def returns(self, moment: Moment) -> Decision:
        return self._decide(switching.gain_of_return(moment.flow, alone=not moment.rollout_nodes))

    def _decide(self, gain: float) -> Decision:
        decision = switching.worth_switching(gain, self._measured.total_s, what_for="the return to rollout")
        if decision.what == SWITCH:
            self._measured = self._measured.with_measured("release", self._costs.rollout_to_train_s)
            self._measured = self._measured.with_measured("weights", self._costs.train_to_rollout_s)
        return decision


class JustInTime(Hysteresis):
    """Ours, for gradients that are accumulated as groups complete: train nodes are called so early that they do not
    have to wait for groups, and no earlier: :class:`~workflows.scheduling.recall.Recall`."""

    def __init__(self, costs: Costs, share: float = FIRST_SHARE) -> None:
        super().__init__(costs)
        self._recall = Recall(share=share)

    def recall_at(self, wanted: int) -> int:
        return self._recall.at(wanted)

    def returns(self, moment: Moment) -> Decision:
        took = StepWaits(moment.called, moment.waited_s, moment.train_s, moment.rollout_s, moment.starved)
        self._recall = self._recall.after(took, moment.flow)
        known = {"train_s": moment.train_s, "idled_s": self._recall.idled_s}
        return self._decide(switching.gain_of_return(moment.flow, alone=not moment.rollout_nodes, **known))


class DynamicSchedule(Lending):
    """verl, ``docs/advance/dynamic_schedule.md``, with the values of its benchmark: rho 0.6, cost 10 s until measured.

    Lend if ``gap * seconds per group > cost``, where gap is what is missing to ``rho`` of the next batch; called back
    at ``rho`` of it. ``rho`` rises by the share of the batch that was waited for, else falls by 0.02.
    """

    FIRST_S, COST_S = 1000.0, 10.0

    def __init__(self, costs: Costs, rho: float = 0.6) -> None:
        super().__init__(costs)
        self._rho = rho
        self._per_group_s = self.FIRST_S
        self._paid: deque[float] = deque(maxlen=3)

    def recall_at(self, wanted: int) -> int:
        return max(1, int(self._rho * wanted))

    def returns(self, moment: Moment) -> Decision:
        wanted = moment.flow.wanted
        if moment.waited:
            self._per_group_s = moment.waited_s / moment.waited
            self._rho = min(1.0, self._rho + min(0.1, max(0.02, moment.waited / wanted)))
        else:
            self._rho -= 0.02
        gap = self._rho * wanted - moment.flow.ready
        cost = fmean(self._paid) if self._paid else self.COST_S
        return self._lend(gap > 0 and gap * self._per_group_s > cost)

    def _lend(self, lends: bool) -> Decision:
        if lends:
            self._paid.append(self._cost_s)
        return Decision(what=SWITCH if lends else STAY, why="verl, dynamic_schedule")


class EnableSwitch(Lending):
    """verl, ``trainer_separate_async.py``: r 0.4, four mini-batches a step.

    Lend if ``remaining * seconds per group * (1 - 1/s) > cost`` with s the speed-up by the lent nodes and seconds per
    group a mean since the start of the run; called back at the threshold. r moves after two steps of the same kind.
    """

    POLL_S = 2.0

    def __init__(self, costs: Costs, share: float = 0.4, mini_batches: int = 4) -> None:
        super().__init__(costs)
        self._share = share
        self._mini_batches = mini_batches
        self._waited_s, self._waited = 0.0, 0
        self._known = False
        self._streak = 0

    def recall_at(self, wanted: int) -> int:
        return max(1, wanted // self._mini_batches, min(wanted, round(self._share * wanted)))

    def returns(self, moment: Moment) -> Decision:
        self._waited_s += moment.waited_s
        self._waited += moment.waited
        self._adapt(idle=moment.waited_s > self.POLL_S)
        speed_up = (moment.train_nodes + moment.rollout_nodes) / max(1, moment.rollout_nodes)
        remaining = max(0, self.recall_at(moment.flow.wanted) - moment.flow.ready)
        per_group_s = self._waited_s / self._waited if self._waited else 0.0
        pays = not self._known or remaining * per_group_s * (1 - 1 / speed_up) > self._cost_s
        lends = remaining > 0 and pays
        self._known = self._known or lends
        return Decision(what=SWITCH if lends else STAY, why="verl, enable_switch")

    def _adapt(self, *, idle: bool) -> None:
        """``_streak`` counts steps of the same kind: above 0 those that waited, below 0 the calm ones."""
        self._streak = max(0, self._streak) + 1 if idle else min(0, self._streak) - 1
        if self._streak == 2:
            self._share, self._streak = min(1.0, self._share + 0.05), 0
        elif self._streak == -2:
            self._share, self._streak = max(1 / self._mini_batches, self._share - 0.03), 0


class IntraToggle(Lending):
    """PEARL: lend if ``(R / B) * (T_dedicated - T_full) > T_toggle``, with exponentially smoothed times.

    R groups remain of a batch of B. The time with all nodes is taken to be shorter by the share of nodes, as their
    paper's text at hand does not say how it is found.
    """

    SMOOTH = 0.5

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._full_s: float | None = None

    def returns(self, moment: Moment) -> Decision:
        seen = moment.rollout_s
        self._full_s = seen if self._full_s is None else self.SMOOTH * seen + (1 - self.SMOOTH) * self._full_s
        nodes = moment.train_nodes + moment.rollout_nodes
        dedicated = self._full_s * nodes / max(1, moment.rollout_nodes)
        remaining = max(0, moment.flow.wanted - moment.flow.ready) / moment.flow.wanted
        pays = remaining * (dedicated - self._full_s) > self._cost_s
        return Decision(what=SWITCH if pays else STAY, why="PEARL, intra-scale toggle")


LENDING: dict[str, Callable[[Costs], Lending]] = {
    "hysteresis": Hysteresis,
    "just-in-time": JustInTime,
    "verl-dynamic": DynamicSchedule,
    "verl-switch": EnableSwitch,
    "pearl": IntraToggle,
}
"""By name."""
PEERS = ("verl-dynamic", "verl-switch", "pearl")
