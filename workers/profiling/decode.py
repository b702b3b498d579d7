"""Decode steps of the embedded engine's own scheduler, without its HTTP server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from statistics import median

import torch

from workers.engines.embedded.engine import PREFILL_TOKENS, compute_type
from workers.engines.embedded.model import Forward, KvRows
from workers.engines.embedded.scheduler import Capacity, Scheduler
from workers.engines.embedded.tokenlog import TokenLog
from workers.engines.embedded.weights import load
from workers.engines.wire import GenerateRequest
from workers.profiling.clock import now_s
from workflows.scheduling.calibration import DecodePoint

STEPS = 12
"""Decode steps that are timed for a point."""
MIN_S = 0.2
"""More of them are, until so many seconds have passed."""


def measure(path: Path, dtype: str, loads: Iterable[tuple[int, int]]) -> Iterator[DecodePoint]:
    """One point for each load (sequences, tokens of context each)."""
    weights = load(path, dtype=getattr(torch, dtype), compute=compute_type(dtype))
    loads = list(loads)
    largest = max(batch for batch, _ in loads)
    longest = max(context for _, context in loads)
    for batch, context in loads:
        scheduler = Scheduler(
            weights,
            Forward(weights.config, compute_type(dtype), 4 * longest + PREFILL_TOKENS),
            KvRows(weights.config, compute_type(dtype)),
            Capacity(largest, 4 * largest * longest + 4096, PREFILL_TOKENS),
            version="0",
            stop_ids=frozenset(),
            stop_strings=lambda ids, stops: None,
            log=TokenLog(None),
            random=Random(0),  # noqa: S311 - sampling, not secrets
        )
        yield _point(scheduler, weights.config.vocab_size, batch, context)


def _point(scheduler: Scheduler, vocabulary: int, batch: int, context: int) -> DecodePoint:
    draw = Random(0)  # noqa: S311 - as above
    with torch.inference_mode():
        for number in range(batch):
            ids = tuple(draw.randrange(vocabulary) for _ in range(context))
            scheduler.submit(_request(number, ids, context), lambda event: None)
        while not _decoding(scheduler, batch):
            scheduler.step()
        seconds: list[float] = []
        contexts: list[int] = []
        while len(seconds) < STEPS or (sum(seconds) < MIN_S and len(seconds) < context - STEPS):
            contexts.append(sum(sequence.computed for sequence in scheduler.batch.decoders))
            start = now_s()
            scheduler.step()
            seconds.append(now_s() - start)
    return DecodePoint(batch, median(contexts), median(seconds))


def _decoding(scheduler: Scheduler, batch: int) -> bool:
    """Whether all sequences decode, and have for two tokens: what was allocated at first is paid."""
    members = scheduler.batch.decoders
    return len(members) == batch and all(sequence.output_tokens >= 2 for sequence in members)


def _request(number: int, ids: tuple[int, ...], new_tokens: int) -> GenerateRequest:
    return GenerateRequest(f"profile-{number}", ids, new_tokens, ignore_eos=True, logprobs=True, salt=str(number))
