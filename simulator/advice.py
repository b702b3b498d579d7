"""Tables of results, and what follows from them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.measure import Result

HEAD = (
    "pipeline", "train nodes", "wall s", "s/step", "tokens/s", "idle", "of rollout", "of training", "switching",
    "staleness", "dropped",
)  # fmt: skip
CLEAR = 0.02
"""A gain below this is no reason to change anything."""


@dataclass(frozen=True)
class Choice:
    """A pipeline with the number of nodes that train."""

    trainers: int
    result: Result


def table(choices: Mapping[str, Choice]) -> str:
    """One line for each choice, by name."""
    rows = [HEAD, *(_row(name, choice) for name, choice in choices.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def _row(name: str, choice: Choice) -> tuple[str, ...]:
    result = choice.result
    shares = (result.idle_fraction, result.idle_rollout, result.idle_train, result.switch_fraction)
    return (
        name,
        str(choice.trainers * result.stands_for),
        f"{result.wall_s:.0f}",
        f"{result.wall_s / max(1, len(result.steps)):.1f}",
        f"{result.tokens_per_s:.0f}",
        *(f"{share:.1%}" for share in shares),
        f"{result.staleness_mean:.2f}",
        f"{result.stale / max(1, result.produced):.1%}",
    )


def advise(choices: Mapping[str, Choice], present: str, node_ids: Sequence[str]) -> list[str]:
    """What to do, most important first. ``present``: the choice the run file and the cluster file stand for;
    ``node_ids``: ids in the order in which nodes are taken for training."""
    best_name = min(choices, key=lambda name: choices[name].result.wall_s)
    best, now = choices[best_name], choices[present]
    gain = 1 - best.result.wall_s / now.result.wall_s
    if gain < CLEAR:
        return [
            f"Keep what you have: no pipeline and no other tags are more than {CLEAR:.0%} faster.",
            _why(now.result),
        ]
    chosen = node_ids[: best.trainers]
    policy = best.result.policy
    tags = "train" if policy is not None and policy.trainers == "own" else "rollout, train"
    lines = [
        f"Use pipeline {best_name} with {best.trainers * best.result.stands_for} train nodes: "
        f"{gain:.0%} less time than {present} with {now.trainers * now.result.stands_for} "
        f"({now.result.wall_s:.0f} s -> {best.result.wall_s:.0f} s).",
        f"Tags: [{tags}] for {_span(chosen)}; [rollout] for the others.",
        _why(best.result),
    ]
    if best.result.staleness_mean > now.result.staleness_mean + 0.1:
        lines.append(
            f"It trains on older tokens: {best.result.staleness_mean:.2f} updates old on average instead of "
            f"{now.result.staleness_mean:.2f}."
        )
    return lines


def _why(result: Result) -> str:
    """Where the remaining time goes, in one sentence."""
    held = sum(spent for activity, spent in result.seconds.items() if activity != "down") or 1.0
    parts = {
        "engines without a request (too few sessions in flight, or a tail of long ones)": "rollout_idle",
        "train nodes that wait for a batch": "train_idle",
        "changes of role": "switch",
        "loading of weights": "sync",
    }
    shares = {words: result.seconds.get(key, 0.0) / held for words, key in parts.items()}  # type: ignore[call-overload]
    words, share = max(shares.items(), key=lambda item: item[1])
    if share < CLEAR:
        return f"Nodes are idle {result.idle_fraction:.1%} of the time: nothing is left to gain."
    return f"Nodes are idle {result.idle_fraction:.1%} of the time, most of it ({share:.1%}) {words}."


def _span(ids: Sequence[str]) -> str:
    return ", ".join(ids) if len(ids) <= 4 else f"{ids[0]} ... {ids[-1]} ({len(ids)} nodes)"
