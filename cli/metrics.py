"""docs/metrics.md, made from the messages' own descriptions: ``python -m cli.metrics > docs/metrics.md``."""

from __future__ import annotations

from workers.trainer.messages import UpdateMetrics

INTRODUCTION = """\
# Figures of a step

Every update reports these. They are in `seamlessflow status RUN --json`, on the run's page in the Temporal UI, in the
ledger, and in each tracker that the run file names under [`trackers`](run-file.md), as `train/<name>` by step;
evaluations as `eval/reward_mean`, `eval/samples` and `eval/failed` by weight version. TensorBoard reads them:

    pip install tensorboard && tensorboard --logdir .seamlessflow/local/tracking

The thresholds under [`alarms`](run-file.md) turn a figure into a warning in the status, with what to think of.

## Evaluations

The tasks of `data.held_out` are run by the same agent and reward, never trained on, before the first step, each
`evaluation.every` steps and after the last, with a sampling of their own ([`evaluation`](run-file.md)). A result
belongs to one weight version: the proxy gives an evaluation's requests only to engines that serve it. Where another
node rolls out too and the pipeline lets engines differ (`multiplexed`, `off_policy`), an evaluation runs beside
training: an engine on a node that does not train keeps the weights until it is over, and no step waits. What that
engine gives to training meanwhile counts as old; an evaluation that lasts longer than `max_staleness` steps costs
such groups. With one node, and in the other pipelines, steps wait for it. An evaluation whose engine is taken away,
or that takes too long, is missing, never zero.

pass@k is unbiased: `1 - C(n - c, k) / C(n, k)` for n samples of a task of which c have `evaluation.pass_reward` or
more (arXiv 2107.03374), a mean over the tasks with k rewards; it is `eval/pass_at_<k>` in trackers.

This page is made by `python -m cli.metrics`.
"""

OF_THE_BATCH = {
    "groups_claimed": "Groups in the batch.",
    "groups_zero_variance": "Groups left out because all their rewards are equal.",
    "length_bias": "Trainable tokens a group: mean of the batch less that of the complete groups it left behind.",
    "age_bias": "Place in the data: mean of the batch less that of all groups left under way or complete.",
    "groups_stale": "Groups that ended because they were too old for this step.",
    "reward_mean": "Mean reward of the samples of all groups looked at, those with equal rewards included.",
    "reward_std": "Standard deviation of these rewards.",
    "replayed": "1 for a batch that is trained again after a rewind: its rewards were counted when it was claimed.",
    "seconds_claim": "Seconds from the start of the step to the claim of its batch.",
    "seconds_companions": "Seconds from then until models that have nodes of their own had computed the batch.",
    "seconds_acquire": "Seconds from the claim until the trainer gang was ready.",
    "seconds_critic": "Seconds of the critic's update behind it, where the critic has nodes of its own.",
    "seconds_step_training": "Seconds from then until every member had trained.",
}


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_table("The batch", OF_THE_BATCH)]
    update = {name: field.description or "" for name, field in UpdateMetrics.model_fields.items()}
    return "\n".join([*parts, *_table("The update", update)]).rstrip() + "\n"


def _table(title: str, meanings: dict[str, str]) -> list[str]:
    rows = [f"| `{name}` | {_plain(meaning)} |" for name, meaning in meanings.items()]
    return [f"## {title}", "", "| name | meaning |", "| --- | --- |", *rows, ""]


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
