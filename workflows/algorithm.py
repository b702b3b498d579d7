"""The run file's section ``algorithm``: named algorithms, and the parts they are made of.

A key whose default is None takes what the named algorithm uses. A key that cannot act beside the others is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from workflows.section import Spec

Name = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "ppo"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
Loss = Literal["clip", "gspo", "cispo", "policy_gradient"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
Companion = Literal["reference", "critic"]
COMPANIONS: tuple[Companion, ...] = ("reference", "critic")
Target = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


class _Parts(NamedTuple):
    """What a name stands for."""

    advantage: Advantage
    loss: Loss
    aggregation: Aggregation


_NAMED: dict[str, _Parts] = {
    "grpo": _Parts("grpo", "clip", "token_mean"),
    "dr_grpo": _Parts("dr_grpo", "clip", "fixed_length"),
    "rloo": _Parts("rloo", "policy_gradient", "token_mean"),
    "reinforce_pp": _Parts("reinforce_pp", "clip", "token_mean"),
    "reinforce_pp_baseline": _Parts("reinforce_pp_baseline", "clip", "token_mean"),
    "gspo": _Parts("grpo", "gspo", "sequence_mean"),
    "cispo": _Parts("grpo", "cispo", "token_mean"),
    "ppo": _Parts("gae", "clip", "token_mean"),
}
_CLIPS: dict[str, dict[str, float]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_high": 4.0},
    "policy_gradient": {},
}
_BANDS: dict[str, dict[str, float]] = {
    "none": {},
    "truncate": {"correction_cap": 2.0},
    "mask": {"correction_floor": 0.5, "correction_cap": 5.0},
}


class AlgorithmSpec(Spec):
    name: Name = "grpo"
    """Algorithm: an advantage, a loss and an aggregation that go together (docs/algorithms.md)."""
    group_size: int = Field(default=8, ge=1)
    """Samples per task (G); advantages relative to a group need two."""
    groups_per_step: int = Field(default=8, ge=1)
    """Tasks per policy update (P)."""
    drop_zero_variance: bool | None = None
    """Groups whose raw rewards are all equal end as ``filtered(zero_variance)``; None: where advantages are relative to
    the group, so that these would be 0."""
    advantage: Advantage | Target | None = None
    """Advantage estimator, or your own as ``package.module:function``; None: the algorithm's."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of rewards, for each step between a token and the end of its session."""
    discount_per: Literal["turn", "token"] = "turn"
    """What a step is, for ``discount`` and ``gae_lambda``: the next answer of the model, or the next token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Weight of later advantages in ``gae``, for each step."""
    loss: Loss | Target | None = None
    """Policy loss, or your own as ``package.module:function``; None: the algorithm's."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip of the ratio is ``1 - clip_low``; None: 0.2, with ``gspo`` 0.0003."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip of the ratio is ``1 + clip_high``; None: 0.28, with ``gspo`` 0.0004, with ``cispo`` 4."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss where the advantage is negative, as a ratio; None: 3 with ``clip``. A large one is no bound."""
    aggregation: Aggregation | None = None
    """How token losses are averaged; None: the algorithm's."""
    aggregation_length: int | None = Field(default=None, ge=1)
    """With ``fixed_length``: tokens each session counts for, whatever its length."""
    epochs: int = Field(default=1, ge=1)
    """Times each batch is trained."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch: the groups of a batch are dealt out to so many."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """``recompute``: the trainer's weights before the update give the old log-probs. ``engine``: those of sampling.
    With ``recompute`` the ratio of a batch's first optimizer step is 1, so with one step none of the clips acts."""
    correction: Literal["none", "truncate", "mask"] | None = None
    """What is done with exp(recomputed - engine), which tells how far off policy a token is: weights cut at a cap, or
    tokens outside a band left out. None: ``truncate`` with ``recompute``, else ``none``."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """That ratio of the token, the product over its sequence, or the product's root of the sequence's length."""
    correction_cap: float | None = Field(default=None, gt=0)
    """Upper end; None: 2 with ``truncate``, 5 with ``mask``."""
    correction_floor: float | None = Field(default=None, gt=0)
    """Lower end of the band; None: 0.5 with ``mask``."""
    sequence: Literal["session", "turn"] = "session"
    """What a sequence is, for ``gspo`` and for corrections by sequence."""
    token_staleness: int | None = Field(default=None, ge=0)
    """Tokens more updates old than this are not trained; None: no such limit."""
    stale_tokens: Literal["drop", "mask"] = "drop"
    """``drop``: tokens too old are context, as a prompt is. ``mask``: they still count where losses are averaged."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL divergence from the reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is added: to the token's loss, or subtracted from the reward."""
    kl_coefficient: float | None = Field(default=None, gt=0)
    """Its weight; needed with ``kl``."""
    reference: str | None = None
    """Directory of the reference model; None: the run's initial weights. Kept by each rank that computes it; with ZeRO
    stage 3 it is split over the ranks of its gang."""
    reference_on: Literal["trainer", "own"] = "trainer"
    """``trainer``: the trainer's ranks hold the reference. ``own``: the nodes with the tag ``reference`` do, which do
    nothing else for the run; each batch is shared among them, and the nodes that roll out go on meanwhile."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    critic: str | None = None
    """Directory of the model that the critic of ``gae`` starts from, with a new head; None: the run's model."""
    critic_on: Literal["trainer", "own"] = "trainer"
    """``trainer``: the trainer's ranks hold and train the critic. ``own``: the nodes with the tag ``critic`` do, all of
    them together, and nothing else for the run."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Of the critic's AdamW; None: 1e-5."""
    critic_warmup: int = Field(default=0, ge=0)
    """Steps in which the critic alone is trained."""
    value_clip: float | None = Field(default=None, gt=0)
    """A value counts as moved by at most this much in one batch; None: no such limit."""

    @property
    def advantage_used(self) -> str:
        return self.advantage or _NAMED[self.name].advantage

    @property
    def loss_used(self) -> str:
        return self.loss or _NAMED[self.name].loss

    @property
    def aggregation_used(self) -> Aggregation:
        return self.aggregation or _NAMED[self.name].aggregation

    @property
    def correction_used(self) -> Literal["none", "truncate", "mask"]:
        return self.correction or ("truncate" if self.old_logprobs == "recompute" else "none")

    @property
    def has_critic(self) -> bool:
        return self.advantage_used == "gae"

    @property
    def companions(self) -> tuple[Companion, ...]:
        """Models beside the policy that each batch is shown to."""
        needed = {"reference": self.kl != "none", "critic": self.has_critic}
        return tuple(name for name in COMPANIONS if needed[name])

    @property
    def companions_apart(self) -> tuple[Companion, ...]:
        """Those of :attr:`companions` that are on nodes of their own, with a lease of their own."""
        own = {"reference": self.reference_on == "own", "critic": self.critic_on == "own"}
        return tuple(name for name in self.companions if own[name])

    @property
    def relative_to_group(self) -> bool:
        """Whether equal rewards of a group are known to give advantages of 0."""
        return self.advantage_used in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")

    @property
    def drops_zero_variance(self) -> bool:
        return self.relative_to_group if self.drop_zero_variance is None else self.drop_zero_variance

    @property
    def several_steps(self) -> bool:
        """Whether a batch is more than one optimizer step."""
        return self.epochs * self.minibatches > 1

    def bound(self, key: str) -> float:
        """A clip of the loss used, or an end of the correction's band: what is set, else the default there.

        >>> AlgorithmSpec(name="gspo").bound("clip_low")
        0.0003
        """
        set_to: float | None = getattr(self, key)
        return self._bounds()[key] if set_to is None else set_to

    def _bounds(self) -> dict[str, float]:
        return _CLIPS.get(self.loss_used, {}) | _BANDS[self.correction_used]

    @model_validator(mode="after")
    def _every_key_acts(self) -> AlgorithmSpec:
        for key, needs, acts in self._conditions():
            if not acts and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} does nothing here: {needs}, or remove it")
        return self

    def _conditions(self) -> list[tuple[str, str, bool]]:
        """Key, what it needs, and whether that holds."""
        ratio = self.several_steps or self.old_logprobs == "engine"
        bounds, correction, by_sequence = self._bounds(), self.correction_used, self.correction_level != "token"
        clips = "set a loss that has it, and epochs, minibatches or old_logprobs so that ratios differ from 1"
        turns = self.discount < 1 or self.gae_lambda < 1
        kl, critic = self.kl != "none", self.has_critic
        return [
            *((key, clips, ratio and key in bounds) for key in ("clip_low", "clip_high", "dual_clip")),
            ("old_logprobs", "policy_gradient has no ratio; set another loss", self.loss_used != "policy_gradient"),
            ("correction", "it needs old_logprobs: recompute", self.old_logprobs == "recompute"),
            ("correction_level", "set correction", correction != "none"),
            *((key, "set a correction that has it", key in bounds) for key in ("correction_cap", "correction_floor")),
            (
                "sequence",
                "set loss: gspo or correction_level",
                by_sequence or self.loss_used not in ("clip", "cispo", "policy_gradient"),
            ),
            ("stale_tokens", "set token_staleness", self.token_staleness is not None),
            ("aggregation_length", "set aggregation: fixed_length", self.aggregation_used == "fixed_length"),
            ("discount_per", "set discount or gae_lambda below 1", turns),
            ("gae_lambda", "set advantage: gae", critic),
            *((key, "set kl", kl) for key in ("kl_in", "kl_coefficient", "reference", "reference_on")),
            *(
                (key, "set advantage: gae", critic)
                for key in ("critic", "critic_on", "critic_learning_rate", "critic_warmup")
            ),
            ("value_clip", "set advantage: gae and epochs or minibatches", critic and self.several_steps),
        ]

    @model_validator(mode="after")
    def _nothing_is_missing(self) -> AlgorithmSpec:
        if self.relative_to_group and self.group_size < 2:
            raise ValueError(
                f"advantage {self.advantage_used!r} is relative to the group: group_size must be at least 2"
            )
        if self.aggregation_used == "fixed_length" and self.aggregation_length is None:
            raise ValueError("aggregation fixed_length needs aggregation_length: tokens that a session counts for")
        if self.kl != "none" and self.kl_coefficient is None:
            raise ValueError(f"kl {self.kl!r} needs kl_coefficient")
        if (self.kl, self.kl_in) == ("k1", "loss"):
            raise ValueError("kl k1 in the loss has an expected gradient of 0: use k2 or k3, or kl_in: reward")
        if self.minibatches > self.groups_per_step:
            raise ValueError(f"minibatches {self.minibatches} exceed the {self.groups_per_step} groups of a step")
        if self.correction_used == "mask" and self.bound("correction_floor") >= self.bound("correction_cap"):
            raise ValueError("correction_floor must be below correction_cap (5 if not set)")
        return self
