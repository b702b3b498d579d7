"""What a session may do, and how its generations are sampled whatever the agent asked for."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from proxy.dialects.base import TurnRequest
from storage.errors import ContextLengthExceeded


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
    seed: int | None = None
    max_turns: int | None = None
    hold_limit_s: float = 600.0
    tool_parser: str = "none"
    tool_open: str = ""
    tool_close: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Policy:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Used:
    """Sampling in force for one generation. ``seed`` None: the engine draws its own."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]


def asked(request: TurnRequest) -> dict[str, Any]:
    """What the agent asked for, for the record; fields it left out are missing."""
    fields = {
        "model": request.model or None,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "stop": list(request.stop) or None,
        "labels": request.labels or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def decide(policy: Policy, request: TurnRequest, turn: int, prompt_tokens: int) -> Used:
    """The sampling of one generation. Raises ContextLengthExceeded if the prompt leaves no room for a token."""
    room = policy.max_context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {policy.max_context} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
    limits = [limit for limit in (request.max_tokens, policy.max_tokens, room) if limit is not None]
    return Used(
        max_new_tokens=min(limits),
        temperature=_first(policy.temperature, request.temperature, 1.0),
        top_p=_first(policy.top_p, request.top_p, 1.0),
        seed=request.seed if policy.seed is None else derive_seed(policy.seed, "turn", turn),
        stop=request.stop,
    )


def derive_seed(*parts: object) -> int:
    """A seed in ``[0, 2**31)`` that depends on all parts."""
    text = "\x00".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def segment_seed(seed: int | None, segment: int) -> int | None:
    """Seed of one segment: an engine's random state cannot move, so a later segment draws anew."""
    return seed if seed is None or segment == 0 else derive_seed(seed, "segment", segment)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
