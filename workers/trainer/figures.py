"""The figures that an update reports, from its sums and its batch."""

from __future__ import annotations

from workers.trainer.batch import Batch
from workers.trainer.distributions import quantiles, ratio_quantiles, staleness_shares
from workers.trainer.messages import UpdateMetrics
from workers.trainer.step import Trained


def metrics_of(
    batch: Batch, done: Trained, *, dropped: int, learning_rate: float, seconds: float, seconds_training: float
) -> UpdateMetrics:
    sums = done.sums
    staleness = batch.step - batch.versions()
    tokens_in_rows = sum(len(row.trajectory.inputs) for row in batch.rows)
    return UpdateMetrics(
        loss=sums.loss / max(done.optimizer_steps, 1),
        grad_norm=done.grad_norm,
        learning_rate=learning_rate,
        clip_fraction=sums.mean("clipped"),
        ratio_max=sums.ratio_max,
        importance_mean=sums.mean("importance"),
        correction_masked=sums.mean("masked"),
        logprob_gap_mean=sums.mean("gap", over="current"),
        logprob_gap_max=sums.gap_max,
        tokens_on_policy=done.tokens_on_policy,
        off_policy_ratio_mean=sums.mean("stale_ratio", over="stale") if sums.stale else 1.0,
        entropy=sums.mean("entropy"),
        reference_kl=sums.mean("kl"),
        advantage_abs_mean=sums.mean("advantage_abs"),
        value_loss=done.value_loss,
        explained_variance=done.explained_variance,
        tokens=batch.trained,
        tokens_masked=batch.masked,
        rows=len(batch.rows),
        tokens_computed=done.tokens_computed,
        tokens_in_rows=tokens_in_rows,
        prefix_savings=1 - done.tokens_per_pass / tokens_in_rows if tokens_in_rows else 0.0,
        groups=batch.groups,
        sessions_dropped=dropped,
        optimizer_steps=done.optimizer_steps,
        staleness_mean=float(staleness.mean()) if len(staleness) else 0.0,
        staleness_max=int(staleness.max()) if len(staleness) else 0,
        **ratio_quantiles(sums.importance_bins),
        **staleness_shares(staleness),
        **quantiles("reward", batch.evidence.reward_S.numpy()),
        **quantiles("session_tokens", batch.session_tokens()),
        seconds=seconds,
        seconds_training=seconds_training,
    )
