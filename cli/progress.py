"""What a run looks like while it runs: one :class:`Snapshot`, shown as a live table or as plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from workflows.explain import waits_for
from workflows.messages import PoolStatus, RunStatus, StepStatus

SHOWN_STEPS = 12
PLAIN_EVERY_S = 15.0


@dataclass(frozen=True)
class StepRow:
    """One finished update."""

    step: int
    reward: float | None
    seconds: float | None
    constant: bool = False
    """Every sample had this same reward: nothing was learned."""
    gap: float | None = None
    """Mean |trainer - engine| log-prob of tokens sampled by the weights before the update; None: there were none."""


@dataclass(frozen=True)
class FailureRow:
    """Why attempts had no result: how many for one cause, and what happened to the last of them."""

    cause: str
    attempts: int
    sample: str
    """*Example*: ``train/3.1``: stream, task, sample."""
    detail: str


@dataclass(frozen=True)
class Snapshot:
    """One look at a run. Parts that could not be asked are empty, and ``trouble`` says why."""

    run: str
    phase: str = "starting"
    step: int = 0
    steps: int = 0
    waiting_for: str = ""
    rows: tuple[StepRow, ...] = ()
    evaluations: tuple[tuple[int, float], ...] = ()
    """(weight version, mean reward) of each evaluation."""
    tokens_per_s: float = 0.0
    tokens: int = 0
    in_flight: int = 0
    nodes: dict[str, str] = field(default_factory=dict)
    """What each node does now."""
    failures: tuple[FailureRow, ...] = ()
    trouble: str = ""


def snapshot(
    run: str,
    control: dict[str, Any] | None,
    status: RunStatus | None,
    pool: PoolStatus | None,
    trouble: str = "",
    step: StepStatus | None = None,
) -> Snapshot:
    """Combine the proxy's figures (GET /control/runs/<run>) with what the run, its ``step`` in work and the pool say of
    themselves."""
    control = control or {}
    tokens = control.get("tokens", {})
    return Snapshot(
        run=run,
        phase=(step or status).phase if status else "starting",
        step=status.step if status else 0,
        steps=status.steps if status else 0,
        waiting_for=waits_for(status, step) if status else "",
        rows=tuple(_step_row(item) for item in control.get("steps", ())),
        evaluations=_evaluations(status),
        tokens_per_s=float(tokens.get("per_s") or 0.0),
        tokens=int(tokens.get("journalled") or 0),
        in_flight=int(control.get("sessions_in_flight") or 0),
        nodes={node.node: f"{node.does} ({node.health})" for node in pool.nodes} if pool else {},
        failures=tuple(_failure_row(item) for item in control.get("failures", ())),
        trouble=trouble or _waits(control) or ((status.last_failure or status.warning) if status else ""),
    )


def _waits(control: dict[str, Any]) -> str:
    waits = control.get("shards", {}).get("waits_for")
    return f"finished groups wait for {waits}" if waits else ""


class PlainView:
    """One line a step, and a sign of life in between; for logs and pipes."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._steps: set[int] = set()
        self._evaluated: set[int] = set()
        self._said = float("-inf")

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, now: Snapshot) -> None:
        for version, reward in now.evaluations:
            if version not in self._evaluated:
                self._evaluated.add(version)
                self._say(f"evaluation of version {version}: held-out reward {reward:.3f}")
        for row in now.rows:
            if row.step not in self._steps:
                self._steps.add(row.step)
                parts = [
                    f"step {row.step + 1}/{now.steps}",
                    _reward(row),
                    _gap(row),
                    f"{now.tokens_per_s:.0f} tokens/s",
                ]
                self._say("  ".join(filter(None, [*parts, _nodes(now)])))
        if self._clock() - self._said >= PLAIN_EVERY_S:
            parts = [_state(now), f"{now.tokens_per_s:.0f} tokens/s", _nodes(now), now.trouble]
            self._say("  ".join(filter(None, parts)))

    def _say(self, line: str) -> None:
        self._said = self._clock()
        self._write(line)


class LiveView:
    """A table that is redrawn in place, for terminals."""

    def __init__(self, console: Console, links: dict[str, str]) -> None:
        self._links = links
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, now: Snapshot) -> None:
        self._live.update(picture(now, self._links))


def picture(now: Snapshot, links: dict[str, str]) -> RenderableType:
    """The live table."""
    head = Text.assemble((f"{now.run}  ", "bold"), _state(now))
    figures = Text(f"{now.tokens_per_s:.0f} tokens/s, {now.tokens} tokens, {now.in_flight} sessions in flight")
    steps = Table("step", "reward", "", "seconds", "log-prob gap", box=None, pad_edge=False)
    for row in now.rows[-SHOWN_STEPS:]:
        reward = row.reward if row.reward is not None else 0.0
        seconds = f"{row.seconds:.1f}" if row.seconds is not None else ""
        bar = "█" * round(20 * max(reward, 0.0))
        shown = _reward(row).removeprefix("reward "), bar, seconds, _gap(row).removeprefix("log-prob gap ")
        steps.add_row(str(row.step + 1), *shown)
    parts: list[RenderableType] = [head, figures, steps]
    parts += [Text(f"held-out reward at version {version}: {reward:.3f}") for version, reward in now.evaluations]
    parts += [Text(f"{node}: {what}") for node, what in now.nodes.items()]
    if now.failures:
        parts.append(Text(f"attempts without a result: {causes(now.failures)}", style="yellow"))
    if now.trouble:
        parts.append(Text(now.trouble, style="yellow"))
    parts += [Text(f"{name}: {link}", style="dim") for name, link in links.items()]
    return Group(*parts)


def causes(failures: Iterable[FailureRow]) -> str:
    """*Example*: ``agent_error 3, reward_missing 1``."""
    return ", ".join(f"{row.cause} {row.attempts}" for row in failures)


def _state(now: Snapshot) -> str:
    text = f"step {min(now.step + 1, now.steps) if now.steps else 1}/{now.steps or '?'}, {now.phase}"
    return f"{text}, waits for {now.waiting_for}" if now.waiting_for else text


def _nodes(now: Snapshot) -> str:
    return "  ".join(f"{node}: {what}" for node, what in now.nodes.items())


def _reward(row: StepRow) -> str:
    if row.reward is None:
        return "reward -"
    return f"reward {row.reward:.3f}{' (the same for every sample)' if row.constant else ''}"


def _gap(row: StepRow) -> str:
    return "" if row.gap is None else f"log-prob gap {row.gap:.1e}"


def _step_row(item: dict[str, Any]) -> StepRow:
    metrics = item.get("metrics", item)
    constant = _number(metrics, "reward_std") == 0
    gap = _number(metrics, "logprob_gap_mean") if _number(metrics, "tokens_on_policy") else None
    return StepRow(int(item["step"]), _number(metrics, "reward_mean"), _number(metrics, "seconds"), constant, gap)


def _failure_row(item: dict[str, Any]) -> FailureRow:
    last = item["last"]
    sample = f"{last['stream']}/{last['ordinal']}.{last['sample']}"
    return FailureRow(item["cause"], int(item["attempts"]), sample, last["detail"])


def _evaluations(status: RunStatus | None) -> tuple[tuple[int, float], ...]:
    """Those that have ended; the proxy's rows also hold the mean so far of one that has not."""
    rows = status.evaluations if status else ()
    return tuple((item.version, item.mean) for item in rows if item.mean is not None)


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None
