"""What a session may do, and how its generations are sampled whatever the agent asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from proxy.dialects.base import TurnRequest
from storage.errors import ContextLengthExceeded, InvalidRequest, LimitReached, UnsupportedParameter

_TOKENS_KEY = " (agent.max_session_tokens)"


@dataclass(frozen=True, slots=True)
class Policy:
    """Made with the session, kept in the ledger. None: the agent decides.

    ``seed`` is of the session; each segment of each generation draws its own
    from it, so a run repeated with the same requests is sampled the same way.
    """

    model: str
    max_context: int
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_turns: int | None = None
    max_session_tokens: int | None = None
    """Tokens that all prompts (each token of the tree once) and answers may hold together."""
    expires: float | None = None
    """Unix time at which the session ends by itself."""
    hold_limit_s: float = 600.0
    version: int | None = None
    """Weight version that makes the session's tokens, e.g. that of an evaluation; None: whichever an engine serves."""
    history: Literal["keep", "template"] = "keep"
    """``keep`` continues from recorded ids; ``template`` renders every prompt as the deployed server would."""
    train_unused: bool = False
    """Whether an answer counts that its agent asked for twice and went on from the other."""
    tool_parser: str = "none"
    tool_open: str = ""
    tool_close: str = ""
    reasoning_parser: str = "none"
    engine_features: tuple[str, ...] = ()
    """What the run's engines support beyond plain sampling (:data:`workers.engines.base.FEATURES`)."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Policy:
        return cls(**{**data, "engine_features": tuple(data.get("engine_features", ()))})

    def tightened(self, limits: Limits, now: float) -> Policy:
        """With narrower limits from ``now`` on. Raises InvalidRequest for one that is wider than it was."""
        end = None if limits.time_limit_s is None else now + limits.time_limit_s
        changes = {"max_turns": limits.max_turns, "max_session_tokens": limits.max_session_tokens, "expires": end}
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        for name, value in given.items():
            bound = getattr(self, name)
            if bound is not None and value > bound:
                param = "time_limit_s" if name == "expires" else name
                raise InvalidRequest(f"{param} may only narrow what is in force: {name} {bound}", param=param)
        return replace(self, **given)


@dataclass(frozen=True, slots=True)
class Limits:
    """What whoever opens a session lets it use up. None: as much as the run (or the parent session) does."""

    max_turns: int | None = None
    max_session_tokens: int | None = None
    time_limit_s: float | None = None


class Used(NamedTuple):
    """Sampling in force for one turn. ``seed`` None: the engine draws its own."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    top_k: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    json_schema: dict[str, Any] | None = None
    top_logprobs: int = 0

    @property
    def truncated(self) -> bool:
        """The log-probs are of a distribution that was cut to its likeliest tokens."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def shaped(self) -> bool:
        """The log-probs are of a distribution that a bias, a penalty or a grammar changed: not the policy's alone."""
        changed = (self.presence_penalty, self.frequency_penalty, self.logit_bias)
        return any(changed) or self.json_schema is not None

    def to_json(self) -> dict[str, Any]:
        """Without what is not in force; :meth:`from_json` is the inverse."""
        fixed = ("max_new_tokens", "temperature", "top_p", "seed", "stop")
        data: dict[str, Any] = {name: getattr(self, name) for name in fixed}
        for name in ("top_k", "presence_penalty", "frequency_penalty", "json_schema", "top_logprobs"):
            if (value := getattr(self, name)) not in (-1, 0, None):
                data[name] = value
        if self.logit_bias:
            data["logit_bias"] = {str(token): change for token, change in self.logit_bias.items()}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Used:
        bias = {int(token): change for token, change in data.get("logit_bias", {}).items()}
        return cls(**{**data, "stop": tuple(data["stop"]), "logit_bias": bias})


def asked(request: TurnRequest) -> dict[str, Any]:
    """What the agent asked for, for the record; fields it left out are missing."""
    fields = {
        "model": request.model or None,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stop": list(request.stop) or None,
        "n": request.n if request.n > 1 else None,
        "tool_choice": list(request.tool_choice) if request.tool_choice.kind != "auto" else None,
        "thinking": request.thinking,
        "labels": request.labels or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def decide(
    policy: Policy, request: TurnRequest, turn: int, prompt_tokens: int, session_tokens: int | None = None
) -> Used:
    """The sampling of one turn, whose every choice may have at most ``session_tokens`` of what the session has left.

    Raises ContextLengthExceeded if the prompt leaves no room for a token, LimitReached if the session's limit does,
    UnsupportedParameter for what the run's engines cannot do.
    """
    _check_features(policy, request)
    if session_tokens is not None and session_tokens < 1:
        raise LimitReached(f"the prompt leaves none of the session's {policy.max_session_tokens} tokens{_TOKENS_KEY}")
    room = policy.max_context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {policy.max_context} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
            tokens=prompt_tokens,
            limit=policy.max_context,
        )
    limits = [limit for limit in (request.max_tokens, policy.max_tokens, room, session_tokens) if limit is not None]
    return Used(
        max_new_tokens=min(limits),
        temperature=_first(policy.temperature, request.temperature, 1.0),
        top_p=_first(policy.top_p, request.top_p, 1.0),
        seed=request.seed if policy.seed is None else derive_seed(policy.seed, "turn", turn),
        stop=request.stop,
        top_k=int(_first(policy.top_k, request.top_k, -1)),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        json_schema=request.json_schema,
        top_logprobs=request.top_logprobs,
    )


def check_limits(policy: Policy, *, turns: int, tokens: int, now: float) -> None:
    """Raises LimitReached when the session has used up its turns, tokens or time."""
    if policy.max_turns is not None and turns >= policy.max_turns:
        raise LimitReached(f"the session has used its {policy.max_turns} turns (agent.max_turns)")
    if policy.max_session_tokens is not None and tokens >= policy.max_session_tokens:
        raise LimitReached(f"the session has used {tokens} of its {policy.max_session_tokens} tokens{_TOKENS_KEY}")
    if policy.expires is not None and now >= policy.expires:
        raise LimitReached("the session's time is over (agent.time_limit_s)")


def _check_features(policy: Policy, request: TurnRequest) -> None:
    wanted = (
        ("grammar", "response_format", request.json_schema is not None),
        ("penalties", "presence_penalty", request.presence_penalty != 0),
        ("penalties", "frequency_penalty", request.frequency_penalty != 0),
        ("logit_bias", "logit_bias", bool(request.logit_bias)),
        ("top_logprobs", "top_logprobs", request.top_logprobs > 0),
    )
    for feature, name, asked_for in wanted:
        if asked_for and feature not in policy.engine_features:
            raise UnsupportedParameter(f"{name} is not supported by this run's engine: leave it out", param=name)


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Seed of one of several choices."""
    return seed if seed is None or choice == 0 else derive_seed(seed, "choice", choice)


def derive_seed(*parts: object) -> int:
    """A seed in ``[0, 2**31)`` that depends on all parts."""
    text = "\x00".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def segment_seed(seed: int | None, segment: int) -> int | None:
    """Seed of one segment: an engine's random state cannot move, so a later segment draws anew."""
    return seed if seed is None or segment == 0 else derive_seed(seed, "segment", segment)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
