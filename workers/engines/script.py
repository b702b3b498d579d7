"""Scripts of the scripted engine: what it plays, and what goes wrong while it does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from storage.errors import ConfigError
from workers.engines.base import FinishKind
from workers.engines.wire import GenerateRequest

FaultKind = Literal[
    "abort",  # ends with finish "abort" and what it has
    "abort_bare",  # the same, and the final event has no log-prob key
    "duplicate_last",  # the same, and the final event sends the last token and all log-probs again, as SGLang may
    "stall",  # silence until aborted or ScriptedEngine.release()
    "death",  # the connection drops; the engine stays dead until revive()
    "drop",  # only this connection drops
    "no_final",  # the stream ends without a final event
    "extra_logprobs",  # one event with two log-probs more than ids
    "sentinel",  # one log-prob of -9999
    "nan",  # one log-prob that is NaN
]

LoadFault = Literal[
    "refuse",  # the old weights stay
    "wrong_checksum",  # loaded, but other weights than those that were asked for
    "death",  # the connection drops; the engine stays dead until revive()
    "hang",  # no answer, and no end, until ScriptedEngine.release_loads()
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong once ``after`` tokens were sent (or, for bad log-probs, with the token after them)."""

    kind: FaultKind
    after: int = 0


@dataclass(frozen=True, slots=True)
class Play:
    """One generation."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """None: -0.5, -0.25 and so on, exact in float32."""
    versions: tuple[str, ...] | None = None
    """Version label of each token; None: the engine's label when the token is sent."""
    finish: FinishKind | None = None
    """None: ``length`` at ``max_new_tokens``, else ``stop``."""
    chunk: int = 1
    """Tokens per event."""
    fault: Fault | None = None

    def logprob(self, position: int) -> float:
        return self.logprobs[position] if self.logprobs is not None else -0.25 * (1 + position % 7)


def hash_play(request: GenerateRequest, vocab_size: int) -> Play:
    """Tokens that depend on all tokens before them and on nothing else."""
    ids: list[int] = []
    logprobs: list[float] = []
    state = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in request.ids))
    for _ in range(request.max_new_tokens):
        digest = state.digest()
        ids.append(int.from_bytes(digest[:4], "little") % vocab_size)
        logprobs.append(-(1 + digest[4]) / 256)
        state.update(ids[-1].to_bytes(4, "little"))
        if ids[-1] in request.stop_token_ids and not request.ignore_eos:
            break
    return Play(tuple(ids), tuple(logprobs))


def top_of(request: GenerateRequest, vocab_size: int, token: int, logprob: float) -> list[tuple[int, float]]:
    """The likeliest tokens at one position: the sampled one, then its neighbours, each less likely by 1."""
    return [((token + n) % vocab_size, logprob - n) for n in range(request.top_logprobs)]


_PLAYS = TypeAdapter(tuple[Play, ...])
_LOADS = TypeAdapter(dict[str, LoadFault])


def load_script(file: Path) -> dict[str, Any]:
    """Read ``{"plays": [{"ids": [...], "fault": {"kind": ..., "after": n}, ...}], "loads": {"3": "refuse"}}``.

    The keys of a play are the fields of :class:`Play`, those of ``loads`` weight versions; all other keys are arguments
    of the engine.
    """
    try:
        script = json.loads(file.read_text())
        plays, loads = script.get("plays", []), script.get("loads", {})
        checked = {"plays": _PLAYS.validate_python(plays), "loads": _LOADS.validate_python(loads)}
        return {**script, **checked}
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise ConfigError(f"script {file}: {error}") from error
