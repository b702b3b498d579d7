"""How one call of user code ended: the one record between those who run it and those who report it."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Status = Literal["ok", "error", "timeout", "infra", "missing", "invalid", "end"]
DETAIL_LIMIT = 4000


@dataclass(frozen=True)
class Outcome:
    """``ok`` with a value, or why there is none.

    ``error`` and ``timeout`` are the user code's own doing; ``infra`` is not, and is tried again; ``missing`` and
    ``invalid`` are rewards that are no finite number; ``end`` means that the data has no such task.
    ``detail`` is the end of a traceback or of stderr.
    """

    status: Status
    value: Any = None
    detail: str = ""


class Runner(Protocol):
    """Runs user code on JSON payloads, many at a time. Built by :mod:`workers.agents.runners`, used by the streams."""

    async def run(self, job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        """Run one job to its end or its time limit; only a broken set-up raises (:class:`ConfigError`)."""

    async def close(self) -> None:
        """End everything at once; running jobs are lost."""


def tail(text: str, limit: int = DETAIL_LIMIT) -> str:
    """The last ``limit`` characters: where an error says what it is."""
    return text if len(text) <= limit else "…" + text[-limit:]


def judge_reward(value: Any) -> Outcome:
    """``ok`` with a float, ``missing`` for None, ``invalid`` for all that is no finite number. Never a default."""
    if value is None:
        return Outcome("missing", detail="the reward returned None")
    if not isinstance(value, numbers.Real):
        return Outcome("invalid", detail=f"the reward returned {value!r:.200}, not a number")
    if not math.isfinite(value):
        return Outcome("invalid", detail=f"the reward returned {float(value)}, not a finite number")
    return Outcome("ok", float(value))
