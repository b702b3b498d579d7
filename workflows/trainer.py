"""The run file's section ``trainer``: how the policy is trained, whatever the algorithm. What cannot act is refused."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workflows.section import Spec

RESUMABLE = {
    "on_bad_batch",
    "row_tokens",
    "activation_checkpointing",
    "offload",
    "zero_stage",
    "learning_rate",
    "grad_clip",
    "step_time_limit_s",
}
"""Keys that may differ when a run that stopped is started again: what it takes to go on."""


class TrainerSpec(Spec):
    backend: Literal["deepspeed"] = "deepspeed"
    """Training back end."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage; 0 with bfloat16 is refused (DeepSpeed trains it differently)."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What a GPU leaves in main memory: the optimizer's state, whose step is then made there (ZeRO stage 1 or more), or
    the weights too, but for those in use (stage 3). Refused on the CPU."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which computes the layer again: less memory, more time."""
    deterministic: bool = True
    """Only kernels whose result does not depend on timing. false: also faster ones; the same batch may then give other
    weights when a step is repeated."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """AdamW's, where it is highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after its warm-up: stay, or fall to 0, in a line or as half a cosine."""
    schedule_steps: int | None = Field(default=None, ge=1)
    """Policy updates, those of the warm-up included, after which it is 0; None: ``pipeline.steps``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Policy updates in which the learning rate, the critic's too, rises in a line."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    rows: Literal["tree", "paths"] = "tree"
    """``tree``: what trajectories begin with in common is computed once. ``paths``: each is computed in full."""
    row_tokens: int = Field(default=8192, ge=1)
    """Tokens per forward pass and rank; only a trajectory that is longer by itself makes a longer one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; one is written every step."""
    keep_weights_every: int | None = Field(default=None, ge=1)
    """Published weights of each so many steps stay until the state folder is removed, to be exported; None: only those
    that engines may still need."""
    step_time_limit_s: float = Field(default=1800.0, gt=0)
    """Deadline of one update."""
    on_bad_batch: Literal["stop", "skip"] = "stop"
    """What becomes of a step whose loss or gradient is no finite number. ``stop``: the run stops, says which sessions
    made it, and goes on from there when it is started again. ``skip``: these samples end as ``filtered(not_finite)``
    and the others are trained; it stops if that is all of them, for then it is not the samples."""

    @model_validator(mode="after")
    def _everything_can_act(self) -> TrainerSpec:
        needed = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(f"offload {self.offload!r} needs zero_stage {needed}, not {self.zero_stage}")
        if self.schedule_steps is not None and self.schedule == "constant":
            raise ValueError(
                f"schedule_steps {self.schedule_steps} does nothing with the schedule 'constant': remove it"
            )
        return self
