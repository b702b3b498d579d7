"""A real run's record as input: what its sessions were like, and how fast its nodes were. Counts and seconds only.

A trace file has the :class:`Measured` of the run on its first line and a session on each other one:
``{"ordinal": 3, "sample": 0, "prompt": 41, "answers": [12, 7], "observations": [5], "tools_s": [0.4], ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simulator.cluster import Cluster, Costs, NodeKind
from simulator.workload import RecordedSession, Workload
from storage.errors import ConfigError
from workflows.scheduling import roofline
from workflows.scheduling.devices import DeviceProfile
from workflows.scheduling.model_cost import ModelCost
from workflows.spec import Tag

VERSION = 1
FIXED_SEQUENCES = 10.0
"""What a decode step costs however many sequences it has, in sequences: `seamlessflow node profile` of the tiny model
has 30 % of a step of 24 as fixed. At the measured batch it makes no difference."""


class MeasuredNode(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    tags: frozenset[Tag]


class Measured(BaseModel):
    """What a run's own record says of its nodes and of its time. Built by ``seamlessflow trace export``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    trace: int = VERSION
    run: str
    pipeline: str
    accumulates: bool = False
    staleness: int
    steps: int
    groups_per_step: int
    group_size: int
    target_in_flight: int
    max_running: int
    kv_tokens: int
    nodes: tuple[MeasuredNode, ...]
    model: dict[str, Any]
    """Its ``config.json``."""
    dtype: str
    warm_up: int = Field(default=0, ge=0)
    """First updates that are not in ``wall_s``, nor are rates measured in them: processes start meanwhile."""
    wall_s: float
    """Seconds that the other updates took, until the last was committed."""
    token_s: float = Field(gt=0)
    """Seconds of a decoded token in its session, at the run's own concurrency."""
    batch: float = Field(ge=1)
    """Sequences that an engine decoded together, on average while it decoded."""
    train_token_s: float = Field(gt=0)
    """Seconds of an update per token of its rows and train node."""
    train_fixed_s: float = Field(ge=0)
    rollout_to_train_s: float = Field(ge=0)
    train_to_rollout_s: float = Field(ge=0)
    claim_s: float = Field(default=0.0, ge=0)
    trainer_start_s: float = Field(default=0.0, ge=0)
    """First request until something was trained: ranks started meanwhile, and groups were stocked."""
    commit_s: float = Field(default=0.0, ge=0)
    """End of an update until it is committed."""
    sync_s: float = Field(default=0.0, ge=0)
    """Commit until a node that does not train decodes with the new weights; 0 unless rollout waits for them."""

    def with_changes_of(self, other: Measured) -> Measured:
        """The same rates with what another run of the same nodes measured of changes that this one never makes."""
        names = ("rollout_to_train_s", "train_to_rollout_s", "commit_s", "sync_s")
        return self.model_copy(update={name: getattr(other, name) for name in names})

    @property
    def model_cost(self) -> ModelCost:
        """Without attention's part, which grows with the context: it is in the measured seconds of a token."""
        return replace(ModelCost.from_config(self.model, self.dtype), attention_width=0)

    def device(self) -> DeviceProfile:
        """A device that is as fast as the nodes were: all of a step is fixed or per sequence, none of it is bytes.

        Computing a token, a forward pass at the speed of training, is a part of the measured step, not beside it.
        """
        model = self.model_cost
        flops = roofline.TRAIN_PASSES * model.flops(1, 0)
        sequence_s = self.token_s / (FIXED_SEQUENCES + self.batch)
        return DeviceProfile(
            name=f"measured in {self.run}",
            peak_flops=flops / self.train_token_s,
            bandwidth=1e18,
            memory_bytes=1e18,
            prefill_efficiency=1.0,
            decode_efficiency=1.0,
            train_efficiency=1.0,
            decode_step_s=sequence_s * FIXED_SEQUENCES,
            decode_sequence_s=max(0.0, sequence_s - self.train_token_s / roofline.TRAIN_PASSES),
            link_bandwidth=1e18,
        )

    def cluster(self) -> Cluster:
        """The run's nodes with their tags."""
        kinds = tuple(
            NodeKind(count=1, device=self.device(), tags=node.tags, kv_tokens=self.kv_tokens) for node in self.nodes
        )
        costs = Costs(
            rollout_to_train_s=self.rollout_to_train_s,
            train_to_rollout_s=self.train_to_rollout_s,
            sync_s=self.sync_s,
            claim_s=self.claim_s,
            commit_s=self.commit_s,
            train_fixed_s=self.train_fixed_s,
            trainer_start_s=self.trainer_start_s,
            logprob_passes=0,
        )
        return Cluster(name=self.run, nodes=kinds, costs=costs, max_running=self.max_running)


class Line(RecordedSession):
    """A session of the trace."""

    ordinal: int
    sample: int


class Trace(BaseModel):
    """A whole trace file."""

    measured: Measured
    lines: tuple[Line, ...]

    @property
    def workload(self) -> Workload:
        """Replays the recorded groups in their order, then from the beginning again."""
        ordered = sorted(self.lines, key=lambda line: (line.ordinal, line.sample))
        groups = [tuple(group) for _, group in groupby(ordered, key=lambda line: line.ordinal)]
        whole = tuple(group for group in groups if len(group) == self.measured.group_size)
        if not whole:
            raise ConfigError(f"the trace of run {self.measured.run} has no complete group: nothing can be replayed")
        return Workload(prompt=0, answer=1, recorded=whole)  # type: ignore[arg-type]

    def write(self, path: Path) -> None:
        lines = [self.measured.model_dump_json(), *(line.model_dump_json() for line in self.lines)]
        path.write_text("\n".join(lines) + "\n")


def read_trace(path: Path) -> Trace:
    """Raises :class:`ConfigError` naming what is wrong with the file."""
    try:
        first, *rest = path.read_text().splitlines()
        return Trace(measured=Measured.model_validate_json(first), lines=tuple(map(Line.model_validate_json, rest)))
    except FileNotFoundError:
        raise ConfigError(f"trace {path} does not exist: make one with `seamlessflow trace export`") from None
    except (ValueError, ValidationError, json.JSONDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from None


class Timed(BaseModel):
    """A session as the record has it: the turns' lengths, and how long it took in all."""

    ordinal: int
    sample: int
    prompt: int
    answers: tuple[int, ...]
    observations: tuple[int, ...]
    elapsed_s: float


def fit_token_s(sessions: Sequence[Timed], busy_s: float, max_running: int) -> float:
    """Seconds of a token in its session: what sessions took, as far as engines can have spent it on them.

    The record has no pauses. In ``busy_s`` node-seconds of decoding no more than ``max_running`` sessions can have been
    in a batch, which bounds the time that was decoding; the rest was tools, waiting and the agent itself.
    """
    written = sum(sum(session.answers) for session in sessions)
    return min(sum(session.elapsed_s for session in sessions), busy_s * max_running) / max(1, written)


def fit_update(tokens: Sequence[float], seconds: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """``(fixed, per_token)`` seconds of updates that took ``seconds`` in all; ``beside``: the part of each that was not
    computing, as reading the batch and writing the checkpoint.

    >>> fit_update([100, 200], [3.0, 5.0], [1.0, 1.0])
    (1.0, 0.02)
    """
    fixed = median(beside)
    return fixed, max(0.0, sum(seconds) - fixed * len(seconds)) / max(1e-9, sum(tokens))


def lines_of(sessions: Sequence[Timed], token_s: float) -> tuple[Line, ...]:
    """Sessions with a pause behind each turn: what nine of ten sessions took at least beyond their tokens.

    One pause for all, and a short one: what sessions took longer may as well be a hold or an engine's queue, which the
    simulation has too.
    """
    beyond = sorted(max(0.0, s.elapsed_s - token_s * sum(s.answers)) / len(s.answers) for s in sessions)
    pause = beyond[len(beyond) // 10] if beyond else 0.0
    return tuple(
        Line(**s.model_dump(exclude={"elapsed_s"}), tools_s=(pause,) * (len(s.answers) - 1), reward_s=pause)
        for s in sessions
    )
