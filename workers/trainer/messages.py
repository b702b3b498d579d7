"""What a trainer rank and its callers say to each other: JSON bodies of the control port.

Built by :mod:`workers.trainer.server` and :mod:`workers.trainer.client`; read by activities. No torch here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["starting", "ready", "parked", "loading", "computing", "training", "saving", "failed", "stopping"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Message(BaseModel):
    """Base of every message: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ColumnRef(Message):
    """What a model said of a batch's tokens: an object, see :mod:`storage.columns`."""

    name: str
    key: str
    digest: Digest
    """sha256 of the object."""


class UpdateRequest(Message):
    """Train one step. Every rank of the gang gets the same request at about the same time."""

    lineage: int = Field(ge=0)
    step: int = Field(ge=0)
    """Step ``s`` turns weight version ``s`` into ``s + 1``."""
    manifest_key: str
    """Object that lists the shards of the batch."""
    manifest_digest: Digest
    """sha256 of that object."""
    epoch: int = Field(ge=0)
    """Fencing token of the lease; a request older than the newest seen is refused."""
    columns: tuple[ColumnRef, ...] = ()
    """What models that are not the gang's own say of the batch's tokens."""
    dropped: tuple[str, ...] = ()
    """Sessions of the batch that are left out, because the policy could not be trained on them."""


class ColumnRequest(UpdateRequest):
    """Have a rank's model say what it can of a manifest's tokens. Every rank of its gang gets the same request."""

    share: int = Field(default=0, ge=0)
    """Of the manifest's micro-batches, which are dealt out to ``shares`` gangs: those that this one computes."""
    shares: int = Field(default=1, ge=1)


class Order(Message):
    """Park, or unpark."""

    epoch: int = Field(ge=0)
    """Of the lease that says so."""


class UpdateMetrics(Message):
    """Figures of one update, over all ranks. A mean over tokens is over trained tokens."""

    loss: float
    """Policy loss of the batch, KL and entropy terms included; mean over its optimizer steps."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping; mean over the batch's optimizer steps."""
    learning_rate: float = 0.0
    """Of the update's first optimizer step."""
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped, or whose loss the dual clip bounded."""
    ratio_max: float
    """Largest exp(current - old log-prob)."""
    importance_mean: float
    """Mean off-policy weight, truncated or masked; 1 when the correction is off."""
    importance_p01: float = 1.0
    """1st percentile of exp(trainer - engine) log-prob over trained tokens, before any truncation and before the
    batch's first optimizer step; to 0.5 %."""
    importance_p50: float = 1.0
    """Its median."""
    importance_p99: float = 1.0
    """Its 99th percentile."""
    correction_masked: float = 0.0
    """Share of trained tokens whose off-policy weight is 0."""
    logprob_gap_mean: float
    """Mean of |trainer - engine| log-prob over the trained tokens of turns that the weights before the update sampled
    whole: what the engine computes otherwise than the trainer, not what training changed. 0 if there is none."""
    logprob_gap_max: float
    """Largest of these."""
    tokens_on_policy: int = 0
    """How many these are."""
    off_policy_ratio_mean: float = 1.0
    """Mean of exp(trainer - engine) log-prob over the others, before any truncation: how far the policy has moved away
    from what sampled them. 1 if there is none."""
    entropy: float
    """Mean entropy of the trainer's next-token distribution, in nats, at the sampling temperature."""
    reference_kl: float = 0.0
    """Mean k3 estimate of KL(policy || reference), in nats; 0 without a reference."""
    advantage_abs_mean: float
    """Mean |advantage| per trained token."""
    value_loss: float = 0.0
    """Critic's loss of the batch; 0 without a critic."""
    explained_variance: float = 0.0
    """1 - var(return - value) / var(return), by the critic before the update; 0 without one."""
    tokens: int
    """Trained tokens: each counts once, however many leaves share it."""
    tokens_masked: int
    """Sampled tokens kept as context: unknown weight version, or a generation marked not trainable."""
    rows: int
    """Trajectories: leaf paths that have a trained token."""
    tokens_in_rows: int
    """Tokens that training each of those by itself would compute."""
    tokens_computed: int
    """Tokens of the policy's forward passes: what trajectories of a micro-batch begin with in common counts once."""
    prefix_savings: float
    """Share of ``tokens_in_rows`` that one pass over the batch does not compute, its beginnings being shared."""
    groups: int
    """Groups in the manifest."""
    sessions_dropped: int = 0
    """Sessions left out because their loss was no finite number (``trainer.on_bad_batch: skip``)."""
    optimizer_steps: int
    """Of the policy: 0 when nothing in the batch could be trained, else ``epochs`` x ``minibatches``."""
    staleness_mean: float
    """Mean of (step - weight version of the token)."""
    staleness_max: int
    """Largest of (step - weight version of the token)."""
    staleness_0: float = 0.0
    """Share of trained tokens sampled by the weights before the update."""
    staleness_1: float = 0.0
    """Share of trained tokens one update old."""
    staleness_2: float = 0.0
    """Share of trained tokens two updates old."""
    staleness_3_up: float = 0.0
    """Share of trained tokens three or more updates old."""
    reward_p10: float = 0.0
    """10th percentile of the samples' rewards, those without trained tokens included."""
    reward_p50: float = 0.0
    """Median reward."""
    reward_p90: float = 0.0
    """90th percentile of the rewards."""
    reward_max: float = 0.0
    """Largest reward."""
    session_tokens_p10: float = 0.0
    """10th percentile of the trained tokens per session, sessions without any left out."""
    session_tokens_p50: float = 0.0
    """Its median."""
    session_tokens_p90: float = 0.0
    """Its 90th percentile."""
    session_tokens_max: float = 0.0
    """Its maximum."""
    seconds: float
    """Wall time of the whole update: read, train, save, publish."""
    seconds_training: float
    """Wall time of forward, backward and optimizer."""


class UpdateResult(Message):
    """A committed update: the checkpoint that contains it and the weights it published."""

    lineage: int
    step: int
    version: int
    """``step + 1``."""
    checkpoint_path: str
    checkpoint_digest: Digest
    weights_path: str = ""
    weights_digest: Digest | None = None
    """None: nothing was published, for it was the critic's."""
    metrics: UpdateMetrics
    dropped: tuple[str, ...] = ()
    """Sessions of the manifest that were not trained: their loss is no finite number."""
    returns: ColumnRef | None = None
    """What a critic apart is to learn from the step; None where there is none."""


class Accumulated(Message):
    """Gradients held ahead of the next step."""

    groups: int


class TrainerStatus(Message):
    """Answer of ``GET /status``."""

    rank: int
    world_size: int
    pid: int
    phase: Phase
    step: int
    """The step in work, or the next one."""
    version: int
    """Weight version that the rank holds."""
    lineage: int
    epoch: int
    """Newest epoch seen."""
    last_error: str | None = None


class ErrorBody(Message):
    """Body of every answer that is not 200."""

    error: str
    """Class name in ``storage.errors``."""
    message: str
