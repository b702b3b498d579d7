"""One attempt at one sample, as the simulator sees it: how much is read, written and waited for, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.engine import Engine


@dataclass(slots=True, eq=False)
class Session:
    """Made by a workload; its state below is changed by the engine it is on and by the run.

    ``answers[i]`` tokens are written in turn ``i``; behind it come ``tools_s[i]`` seconds without a request, and
    ``observations[i]`` new prompt tokens.
    """

    ordinal: int
    index: int
    prompt: float
    answers: list[float]
    observations: list[float] = field(default_factory=list)
    tools_s: list[float] = field(default_factory=list)
    reset_s: float = 0.0
    reward_s: float = 0.0

    turn: int = 0
    context: float = 0.0
    """Tokens of the conversation; while a turn decodes, those it will have at the turn's end."""
    unread: float = 0.0
    """Of them, those that are not in the KV of ``engine``."""
    remaining: float = 0.0
    """Tokens of the turn still to be written, when it last left a batch."""
    ends_at: float = 0.0
    """Step counter of the engine at which the turn ends."""
    began_at: float = 0.0
    """Step counter of the engine when the turn joined its batch."""
    engine: Engine | None = None
    """Where its KV is."""
    first_version: int | None = None
    """Weights of its first token."""
    version_tokens: float = 0.0
    """Sum over its tokens of their weight version: what the mean staleness follows from."""

    @property
    def tokens(self) -> float:
        """Tokens written over all turns."""
        return sum(self.answers)

    def begin_turn(self) -> None:
        """The agent sends its next request: the whole conversation, of which the new part is unread."""
        new = self.prompt if self.turn == 0 else self.observations[self.turn - 1]
        self.context += new
        self.unread += new
        self.remaining = self.answers[self.turn]
