"""vLLM's ``/inference/v1/generate``: requests out, checked, and one event stream in. Pure: no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from storage.errors import EngineRejected, EngineUnavailable
from workers.engines.base import Chunk, Finish, Sampling, TokenIds, in_json, outside
from workers.engines.stream import StreamReader, parse_version

PREFIX = "generate-tokens-"
"""What vLLM puts before a request id; its other calls want it so."""
INITIAL = "default"
"""The label of the weights a server was started with, until it is told another."""
UNKNOWN = "unknown"
"""Our label while weights are being changed, and for ever if that fails beyond repair."""
COLDEST = 0.01
"""vLLM raises a temperature between 0 and this one to it without a word."""
HOTTEST = 2.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a server was started with; it does not change while it lives."""

    model_path: Path
    """The checkpoint that it was started from."""
    vocab_size: int
    max_context: int
    max_top_logprobs: int
    sleeps: bool
    """Whether it can give memory back."""
    workers: int


def version_of(label: object) -> int | None:
    """The weight version behind a label; None if nobody knows."""
    return 0 if label == INITIAL else parse_version(label)


def generate_body(ids: TokenIds, sampling: Sampling, request_id: str, salt: str) -> bytes:
    """Only keys that vLLM knows: it ignores others. What it would add by itself is said."""
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        # The token that was drawn is listed first and counts: one more for the likeliest.
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): change for token, change in sampling.logit_bias.items()}
    if sampling.json_schema is not None:
        parameters["structured_outputs"] = {"json": sampling.json_schema}
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": in_json(ids),
        "sampling_params": parameters,
        "stream": True,
    }
    if salt:
        body["cache_salt"] = salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def check_request(ids: TokenIds, sampling: Sampling, served: Served) -> None:
    """Refuse what vLLM would change in silence, cut short or not survive. Raises :class:`EngineRejected`."""
    if not len(ids):
        raise EngineRejected("the prompt is empty: an engine needs at least one token")
    for what, tokens in (
        ("prompt", ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
    ):
        if (wrong := outside(tokens, served.vocab_size)) is not None:
            raise EngineRejected(f"{what}: id {wrong} is outside the vocabulary of {served.vocab_size}")
    total = len(ids) + sampling.max_new_tokens
    if total > served.max_context:
        raise EngineRejected(
            f"{len(ids)} prompt tokens + max_new_tokens {sampling.max_new_tokens} = {total} "
            f"exceed the context of {served.max_context} tokens"
        )
    if sampling.temperature and not COLDEST <= sampling.temperature <= HOTTEST:
        raise EngineRejected(f"temperature is {sampling.temperature}: vLLM takes 0 and {COLDEST} to {HOTTEST}")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**63:
        raise EngineRejected(f"seed is {sampling.seed}: vLLM takes 0 to 2**63 - 1")
    if sampling.top_logprobs > served.max_top_logprobs:
        raise EngineRejected(f"top_logprobs is {sampling.top_logprobs}: this server gives {served.max_top_logprobs}")
    if not all(math.isfinite(change) for change in sampling.logit_bias.values()):
        raise EngineRejected("logit_bias holds a number that is not finite")


class VllmStreamReader(StreamReader):
    """State of one generation's stream. Every event holds new tokens only, often several; versions come last."""

    def __init__(self, request_id: str, vocab_size: int, top_logprobs: int) -> None:
        super().__init__(request_id, vocab_size)
        self._top_logprobs = top_logprobs

    def read(self, payload: bytes) -> Chunk:
        """Turn one event into a chunk.

        Raises:
            EngineUnavailable: an error event; vLLM sends one when its engine dies.
            EngineProtocolError: the event breaks the contract.
        """
        choice = self._choice(payload)
        ids = tuple(choice.get("token_ids") or ())
        entries = (choice.get("logprobs") or {}).get("content") or []
        if len(entries) != len(ids):
            raise self._error(f"{len(entries)} log-probs for {len(ids)} tokens")
        logprobs = tuple(
            self._logprob(token, [entry.get("logprob"), entry.get("token_id")], self.seen + index)
            for index, (token, entry) in enumerate(zip(ids, entries, strict=True))
        )
        tops = tuple(self._likeliest(entry) for entry in entries) if self._top_logprobs else ()
        self.seen += len(ids)
        finish = self._ending(choice, ids)
        self.finished = finish is not None
        return Chunk(ids, logprobs, None, self._versions(choice) if finish else None, finish, tops)

    def read_all(self, payloads: Sequence[bytes]) -> Iterator[Chunk]:
        return map(self.read, payloads)

    def _choice(self, payload: bytes) -> dict[str, Any]:
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise self._error(f"an event that is not JSON ({error}): {payload[:80]!r}") from None
        if isinstance(event, dict) and (failure := event.get("error")):
            message = failure.get("message") if isinstance(failure, dict) else failure
            raise EngineUnavailable(f"request {self.request_id}: the engine failed after {self.seen} tokens: {message}")
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._error(f"an event without its one choice: {payload[:80]!r}")
        return choices[0]

    def _likeliest(self, entry: dict[str, Any]) -> tuple[tuple[int, float], ...]:
        """The drawn token is among them only if it is one of the likeliest."""
        try:
            pairs = [(int(top["token_id"]), min(float(top["logprob"]), 0.0)) for top in entry["top_logprobs"]]
        except (KeyError, TypeError, ValueError):
            raise self._error(f"top log-probs {str(entry)[:80]}") from None
        return tuple(sorted(pairs, key=lambda pair: -pair[1])[: self._top_logprobs])

    def _ending(self, choice: dict[str, Any], ids: tuple[int, ...]) -> Finish | None:
        reason = choice.get("finish_reason")
        if reason is None:
            return None
        if reason not in ("stop", "length", "abort"):
            raise self._error(f"finish_reason {reason!r}")
        if reason != "stop":
            return Finish(reason)
        matched = choice.get("stop_reason")
        return Finish("stop", matched=matched if matched is not None or not ids else ids[-1])

    def _versions(self, choice: dict[str, Any]) -> Any:
        spans = choice.get("weight_versions") or []
        return self._spans(
            [{**span, "version": "0" if span.get("version") == INITIAL else span.get("version")} for span in spans]
        )
