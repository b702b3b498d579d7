"""One request inside the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from workers.engines.embedded.prefix_cache import Ids
from workers.engines.wire import GenerateRequest, VersionSpans, event, finish_reason

Sink = Callable[[dict[str, Any]], None]
"""Takes the events of one request; called on the server's event loop."""
Top = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position, with their log-probs."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens and where their KV is. Owned by the model thread."""

    request: GenerateRequest
    sink: Sink
    seed: int
    ids: list[int]
    """Prompt and output."""
    computed: int = 0
    """Leading tokens whose KV stands in the sequence's row."""
    pure: bool = True
    """All that KV was computed by the weights now in force."""
    pending_ids: list[int] = field(default_factory=list)
    """Sampled, not sent yet; all under one weight version."""
    pending_logprobs: list[float] = field(default_factory=list)
    pending_tops: list[Top] = field(default_factory=list)
    spans: VersionSpans = field(default_factory=VersionSpans)
    cached_tokens: int = 0
    retractions: int = 0
    logged: bool = False

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - len(self.request.ids)

    @property
    def reserve(self) -> int:
        """Tokens the sequence may come to."""
        return len(self.request.ids) + self.request.max_new_tokens

    @property
    def ready(self) -> bool:
        """Only the KV of the last token is missing: the next forward pass gives the next token."""
        return self.computed == len(self.ids) - 1

    def prefix(self) -> Ids:
        """What must stand in the row before the next token can be sampled."""
        return np.array(self.ids[:-1], np.int32)

    def add(self, token: int, logprob: float, version: str, top: Top = ()) -> None:
        self.ids.append(token)
        self.pending_ids.append(token)
        self.pending_logprobs.append(logprob)
        self.pending_tops.append(top)
        self.spans.add(version, 1)

    def take_event(
        self, version: str, kind: Literal["stop", "length", "abort"] | None = None, matched: int | str | None = None
    ) -> dict[str, Any]:
        """An event with all pending tokens; final if ``kind`` is given."""
        finish = None
        if kind is not None:
            finish = finish_reason(kind, matched=matched, length=self.output_tokens)
            version = self.spans.runs[-1][0] if self.spans.runs else version
        ids, logprobs, tops = self.pending_ids, self.pending_logprobs, self.pending_tops
        self.pending_ids, self.pending_logprobs, self.pending_tops = [], [], []
        return event(
            self.request,
            ids,
            logprobs,
            completion_tokens=self.output_tokens,
            version=version,
            finish=finish,
            spans=self.spans,
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            tops=tops,
        )
