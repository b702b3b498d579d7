"""What a scheduler decided, and the facts it used: the unit of every explanation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Decision(BaseModel):
    """Built by the pure decision functions; read by people, in ``status``, ``why``, the log and the Temporal UI.

    *Example*

    >>> Decision(what="train now", why="16 of 16 groups are complete", facts={"groups": 16}).line()
    'train now: 16 of 16 groups are complete (groups 16)'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    """What happens now, as an order."""
    why: str
    """The rule that led to it, in words."""
    facts: dict[str, float] = {}
    """The numbers the rule compared; names end with their unit."""
    predicted_gain_s: float | None = None
    """Seconds that it is expected to save; None: no prediction was made."""

    def line(self) -> str:
        """One line for a log or a page."""
        facts = ", ".join(f"{name} {value:g}" for name, value in self.facts.items())
        gain = "" if self.predicted_gain_s is None else f"; predicted gain {self.predicted_gain_s:.1f} s"
        return f"{self.what}: {self.why}" + (f" ({facts})" if facts else "") + gain
