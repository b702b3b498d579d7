"""Continuous batching: which sequences run, what the next forward pass computes, and what its result means.

Everything here belongs to one thread, the model thread (:mod:`workers.engines.embedded.thread`), and runs between two
forward passes; so a change of weights always falls between two tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch

from storage.errors import EngineRejected
from workers.engines.base import FinishKind
from workers.engines.embedded.batch import Batch
from workers.engines.embedded.model import Forward, KvRows
from workers.engines.embedded.prefix_cache import PrefixCache, common_prefix
from workers.engines.embedded.sampler import Draw, sample, uniform
from workers.engines.embedded.sequence import Sequence, Sink
from workers.engines.embedded.tokenlog import TokenLog
from workers.engines.embedded.weights import Weights
from workers.engines.wire import GenerateRequest

Outbox = list[tuple[Sink, dict[str, Any]]]
StopStrings = Callable[[list[int], tuple[str, ...]], str | None]
"""Finds the first of some strings in the text of output ids."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much runs at a time."""

    max_running: int
    kv_tokens: int
    """Rows times their longest possible length stays below; the prefix cache holds as many again."""
    prefill_tokens: int
    """Prompt tokens of one forward pass, so that a long prompt does not stop those who decode."""


class Scheduler:
    """State of the engine between two forward passes.

    Args:
        stop_ids: the model's end-of-sequence ids.
        random: gives seeds to requests that bring none.
    """

    _SCAN = 64  # waiting sequences looked at per step
    _WORTH_WAITING = 8  # tokens shared with a running prefill for which a sequence waits instead of computing them too

    def __init__(
        self,
        weights: Weights,
        forward: Forward,
        rows: KvRows,
        capacity: Capacity,
        *,
        version: str,
        stop_ids: frozenset[int],
        stop_strings: StopStrings,
        log: TokenLog,
        random: Random,
    ) -> None:
        self.weights: Weights | None = weights
        self.version = version
        self.paused = False
        self.released = False
        self.batch = Batch(rows)
        self.waiting: deque[Sequence] = deque()
        self.cache = PrefixCache(capacity.kv_tokens)
        self.generated = 0
        """Tokens sampled since the start."""
        self.prefilled = 0
        """Prompt tokens computed since the start, cache hits left out."""
        self._outbox: Outbox = []
        self._forward = forward
        self._capacity = capacity
        self._stop_ids = stop_ids
        self._stop_strings = stop_strings
        self._log = log
        self._random = random

    # --- requests ---

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if any(sequence.request.rid == request.rid for sequence in self._live()):
            raise EngineRejected(f"Duplicate request ID detected: {request.rid}")
        reserve = len(request.ids) + request.max_new_tokens
        if reserve > self._capacity.kv_tokens:
            raise EngineRejected(f"{reserve} tokens do not fit into the KV cache of {self._capacity.kv_tokens}")
        seed = request.seed if request.seed is not None else self._random.getrandbits(63)
        self.waiting.append(Sequence(request, sink, seed, list(request.ids)))

    def abort(self, rid: str | None) -> None:
        """End one request, or all, with what it has."""
        for sequence in [s for s in self._live() if rid in (None, s.request.rid)]:
            self._drop(sequence)
            self._finish(sequence, "abort")

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract(self.batch.members)
        self.flush()

    def resume(self) -> None:
        self.paused = False

    # --- weights and memory ---

    def swap(self, weights: Weights, version: str) -> None:
        """Put new weights in force. Running sequences keep the KV they have, unless they have no output yet."""
        self.flush()
        self.weights, self.version = weights, version
        self.cache.clear()
        for sequence in self.batch.members:
            sequence.pure = False
        self._retract(s for s in self.batch.members if not s.output_tokens)

    def flush_cache(self) -> None:
        if self.running or self.waiting:
            raise EngineRejected("Flush cache failed: requests are running or queued")
        self.cache.clear()

    def release(self) -> None:
        """Drop weights and KV."""
        if self.running or self.waiting:
            raise EngineRejected("memory cannot be released while requests are live: abort them first")
        self.released = True
        self.weights = None
        self.cache.clear()
        self.batch.rows.free()

    def restore(self, weights: Weights | None = None) -> None:
        """Undo :meth:`release`; without ``weights`` those stay that were swapped in meanwhile."""
        self.weights = weights or self.weights
        self.released = False

    def close(self) -> None:
        """Close the token log."""
        self._log.close()

    @property
    def running(self) -> int:
        return len(self.batch.members)

    @property
    def used_tokens(self) -> int:
        return self.cache.tokens + self.running_tokens

    @property
    def running_tokens(self) -> int:
        return sum(s.computed for s in self.batch.members)

    # --- the step ---

    @property
    def serving(self) -> bool:
        return not self.paused and not self.released

    @property
    def runnable(self) -> bool:
        return self.serving and bool(self.batch.members or self.waiting)

    def step(self) -> None:
        """Admit what fits, prefill one portion, sample one token for every decoding sequence."""
        if self.weights is None:
            raise AssertionError("step without weights: ask `runnable` first")
        self._admit()
        if self.batch.prefillers:
            self._prefill(self.weights)
        if self.batch.decoding:
            self._decode(self.weights)

    def flush(self) -> None:
        """Put all tokens not sent yet into the outbox."""
        for sequence in self._live():
            if sequence.pending_ids:
                self._log.sampled(sequence)
                self._outbox.append((sequence.sink, sequence.take_event(self.version)))

    def take_outbox(self) -> Outbox:
        """Events to be delivered now; their tokens are in the token log."""
        if self._outbox:
            self._log.flush()
        outbox, self._outbox = self._outbox, []
        return outbox

    def _admit(self) -> None:
        scanned: list[Sequence] = []
        while self.waiting and len(scanned) < self._SCAN:
            sequence = self.waiting.popleft()
            if not self._fits(sequence):
                scanned.append(sequence)
                break
            if self._better_later(sequence):
                scanned.append(sequence)
                continue
            segments = self.cache.match(sequence.request.salt, sequence.prefix())
            sequence.pure = True
            self.batch.add(sequence, segments)
            if not sequence.output_tokens:
                sequence.cached_tokens = sequence.computed
            self._log.admitted(sequence)
        self.waiting.extendleft(reversed(scanned))

    def _fits(self, sequence: Sequence) -> bool:
        count = self.running + 1
        longest = max([sequence.reserve, *(s.reserve for s in self.batch.members)])
        return count <= self._capacity.max_running and count * longest <= self._capacity.kv_tokens

    def _better_later(self, sequence: Sequence) -> bool:
        """Whether a prefill that runs now will leave much of this sequence's prompt in the cache."""
        mine = sequence.prefix()
        known: int | None = None
        for other in self.batch.prefillers:
            if other.request.salt != sequence.request.salt or not other.pure:
                continue
            if known is None:
                known = self.cache.match_length(sequence.request.salt, mine)
            if common_prefix(mine, other.prefix()) - known >= self._WORTH_WAITING:
                return True
        return False

    def _prefill(self, weights: Weights) -> None:
        group = self._prefill_group()
        sizes = [min(len(s.ids) - 1 - s.computed, self._capacity.prefill_tokens) for s in group]
        width = max(sizes)
        starts = [s.computed for s in group]
        length = max(starts) + width
        self.batch.rows.ensure(self.running, length + 1)
        ids = [(s.ids[s.computed : s.computed + n] + [0] * width)[:width] for s, n in zip(group, sizes, strict=True)]
        self._forward(weights, self.batch.rows, self.batch.decoding, torch.tensor(ids), torch.tensor(starts), length)
        for sequence, n in zip(group, sizes, strict=True):
            sequence.computed += n
            self.prefilled += n
        done = [s for s in group if s.ready]
        self.batch.promote(len(done))
        for sequence in done:
            self._remember(sequence)

    def _prefill_group(self) -> list[Sequence]:
        """The first prefilling sequences that fit into one padded pass; all of them complete, or there is only one."""
        group: list[Sequence] = []
        width = 0
        for sequence in self.batch.prefillers:
            width = max(width, len(sequence.ids) - 1 - sequence.computed)
            if group and (len(group) + 1) * width > self._capacity.prefill_tokens:
                break
            group.append(sequence)
        return group

    def _decode(self, weights: Weights) -> None:
        sequences = self.batch.decoders
        starts = [s.computed for s in sequences]
        length = max(starts) + 1
        self.batch.rows.ensure(self.running, length)
        ids = torch.tensor([[s.ids[-1]] for s in sequences])
        hidden = self._forward(weights, self.batch.rows, 0, ids, torch.tensor(starts), length)
        sampled = sample(self._forward.logits(weights, hidden[:, -1]), [_draw(s) for s in sequences])
        self.generated += len(sequences)
        for sequence, (token, logprob, top) in zip(sequences, sampled, strict=True):
            sequence.computed += 1
            sequence.add(token, logprob, self.version, top)
        for sequence in sequences:
            kind, matched = self._end(sequence)
            if kind is not None:
                self._drop(sequence)
                self._finish(sequence, kind, matched)

    def _end(self, sequence: Sequence) -> tuple[FinishKind | None, int | str | None]:
        request, token = sequence.request, sequence.ids[-1]
        if not request.ignore_eos and (token in self._stop_ids or token in request.stop_token_ids):
            return "stop", token
        if request.stop:
            found = self._stop_strings(sequence.ids[len(request.ids) :], request.stop)
            if found is not None:
                return "stop", found
        if sequence.output_tokens >= request.max_new_tokens:
            return "length", None
        return None, None

    def _finish(self, sequence: Sequence, kind: FinishKind, matched: int | str | None = None) -> None:
        self._log.sampled(sequence)
        self._log.finished(sequence, kind)
        self._outbox.append((sequence.sink, sequence.take_event(self.version, kind, matched)))

    def _retract(self, sequences: Iterable[Sequence]) -> None:
        """Back to the head of the queue, in order; their KV is computed anew or found in the cache."""
        retracted = list(sequences)
        for sequence in retracted:
            self._drop(sequence)
            sequence.computed = 0
            sequence.retractions += 1
        self.waiting.extendleft(reversed(retracted))

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch or the queue; its KV goes to the cache."""
        if sequence in self.batch.members:
            self._remember(sequence)
            self.batch.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Put a sequence's KV into the prefix cache, unless old weights had a part in it."""
        if not sequence.pure or not sequence.computed:
            return
        row = self.batch.members.index(sequence)
        ids = sequence.prefix()[: sequence.computed]
        self.cache.insert(sequence.request.salt, ids, lambda start, end: self.batch.rows.read(row, start, end))

    def _live(self) -> list[Sequence]:
        return [*self.batch.members, *self.waiting]


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    return Draw(
        request.temperature,
        request.top_p,
        request.top_k,
        request.min_p,
        uniform(sequence.seed, len(sequence.ids)) if request.temperature else 0.0,
        request.logit_bias,
        request.top_logprobs,
    )
