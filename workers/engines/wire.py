"""The server side of SGLang's native wire: request bodies in, event objects out.

Pure and shared by the engines of ours that speak it (embedded, scripted), so that both accept, refuse and answer alike.
Wire facts: SGLang 0.5.23, incremental streaming.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from storage.errors import EngineRejected

_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "stop_regex": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
}
"""Sampling parameters of SGLang that our engines accept at the value that does nothing, and refuse otherwise."""

_IGNORED = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")
"""They shape text or pacing, of which there is none here."""


_GREEDY_BELOW = 1e-6  # as in SGLang


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One validated ``/generate`` request."""

    rid: str
    ids: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """As in SGLang: neither the model's end-of-sequence ids nor ``stop_token_ids`` end the generation."""
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    salt: str = ""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to report at each position."""

    def features(self) -> Iterator[tuple[str, str]]:
        """(feature of :data:`workers.engines.base.FEATURES`, field of the wire) that the request needs."""
        if self.json_schema is not None:
            yield "grammar", "sampling_params.json_schema"
        if self.presence_penalty:
            yield "penalties", "sampling_params.presence_penalty"
        if self.frequency_penalty:
            yield "penalties", "sampling_params.frequency_penalty"
        if self.logit_bias:
            yield "logit_bias", "sampling_params.logit_bias"
        if self.top_logprobs:
            yield "top_logprobs", "top_logprobs_num"


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine and its model can take."""

    vocab_size: int
    max_context: int
    stop_strings: bool = False
    """Whether the engine can decode its tokens and so honour ``stop``."""
    features: frozenset[str] = frozenset()
    """Of :data:`workers.engines.base.FEATURES`."""

    def check(self, request: GenerateRequest) -> None:
        """Raise :class:`EngineRejected` if the model cannot serve ``request``."""
        for feature, name in request.features():
            if feature not in self.features:
                raise EngineRejected(f"{name}: not supported by this engine")
        every = (
            ("input_ids", request.ids),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", request.logit_bias),
        )
        for what, ids in every:
            for i in ids:
                if not 0 <= i < self.vocab_size:
                    raise EngineRejected(f"{what}: id {i} is outside the vocabulary of {self.vocab_size}")
        total = len(request.ids) + request.max_new_tokens
        if total > self.max_context:
            raise EngineRejected(
                f"{len(request.ids)} prompt tokens + max_new_tokens {request.max_new_tokens} = {total} "
                f"exceed the context of {self.max_context} tokens: shorten the prompt or ask for fewer"
            )
        if request.stop and not self.stop_strings:
            raise EngineRejected("stop: this engine has no tokenizer, use stop_token_ids")


def parse_generate(raw: bytes, default_rid: str) -> GenerateRequest:
    """Read a ``/generate`` body; raises :class:`EngineRejected` that names the field at fault."""
    body = parse_object(raw)
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise EngineRejected("input_ids: a non-empty list of token ids is needed (text and batches are not supported)")
    for name, neutral in (("logprob_start_len", -1), ("token_ids_logprob", None)):
        if body.get(name, neutral) not in (neutral, None):
            raise EngineRejected(f"{name}: only {neutral!r} is supported")
    rid = body.get("rid", default_rid)
    if not isinstance(rid, str) or not rid:
        raise EngineRejected(f"rid: a non-empty string is needed, not {rid!r}")
    return GenerateRequest(
        rid=rid,
        ids=tuple(ids),
        stream=bool(body.get("stream", False)),
        logprobs=bool(body.get("return_logprob", False)),
        salt=f"{body.get('extra_key') or ''}\0{body.get('cache_salt') or ''}",
        top_logprobs=_integer(body, "top_logprobs_num", 0, 0, where=""),
        **_sampling(body.get("sampling_params") or {}),
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty object."""
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise EngineRejected(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise EngineRejected("the body must be a JSON object")
    return body


def _sampling(parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, dict):
        raise EngineRejected("sampling_params: an object is needed")
    values = dict(parameters)
    for name in _IGNORED:
        values.pop(name, None)
    for name, neutral in _NEUTRAL.items():
        value = values.pop(name, neutral)
        if value is not None and value != neutral:
            raise EngineRejected(f"sampling_params.{name}: {value!r} is not supported, only {neutral!r}")
    result: dict[str, Any] = {
        "max_new_tokens": _integer(values, "max_new_tokens", 128, 1),
        "temperature": _number(values, "temperature", 1.0, 0.0, float("inf")),
        "top_p": _number(values, "top_p", 1.0, 0.0, 1.0),
        "top_k": _integer(values, "top_k", -1, -1),
        "min_p": _number(values, "min_p", 0.0, 0.0, 1.0),
        "ignore_eos": bool(values.pop("ignore_eos", False)),
        "seed": _seed(values.pop("sampling_seed", None)),
        "stop": _strings(values.pop("stop", None)),
        "stop_token_ids": frozenset(_ids(values.pop("stop_token_ids", None))),
        "presence_penalty": _number(values, "presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": _number(values, "frequency_penalty", 0.0, -2.0, 2.0),
        "logit_bias": _bias(values.pop("logit_bias", None)),
        "json_schema": _schema(values.pop("json_schema", None)),
    }
    if result["temperature"] < _GREEDY_BELOW:
        result["temperature"] = 0.0
    if values:
        raise EngineRejected(f"sampling_params: unknown parameter {sorted(values)[0]!r}")
    if result["top_p"] == 0.0 or result["top_k"] == 0:
        raise EngineRejected("sampling_params: top_p and top_k must not be 0")
    return result


def _number(values: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = values.pop(name, default)
    value = default if value is None else value
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= high
        or value == float("inf")
    ):
        raise EngineRejected(f"sampling_params.{name}: {value!r} is not a number in [{low:g}, {high:g}]")
    return float(value)


def _integer(values: dict[str, Any], name: str, default: int, low: int, *, where: str = "sampling_params.") -> int:
    value = values.pop(name, default)
    value = default if value is None else value
    if type(value) is not int or value < low:
        raise EngineRejected(f"{where}{name}: {value!r} is not an integer of at least {low}")
    return value


def _seed(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise EngineRejected(f"sampling_params.sampling_seed: {value!r} is not an integer")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise EngineRejected(f"sampling_params.stop: {value!r} is neither a non-empty string nor a list of them")
    return tuple(values)


def _ids(value: Any) -> list[int]:
    values = value or []
    if not isinstance(values, list) or not all(type(item) is int for item in values):
        raise EngineRejected(f"sampling_params.stop_token_ids: {value!r} is not a list of token ids")
    return values


def _bias(value: Any) -> dict[int, float]:
    """``{"<token id>": change}``; keys are strings, since JSON has no others."""
    try:
        bias = {int(token): float(change) for token, change in (value or {}).items()}
        if not all(math.isfinite(change) for change in bias.values()):
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise EngineRejected(f"sampling_params.logit_bias: {value!r} does not map token ids to numbers") from None
    return bias


def _schema(value: Any) -> str | None:
    """A JSON schema as text, as SGLang takes it."""
    if value is None:
        return None
    try:
        if isinstance(value, str) and isinstance(orjson.loads(value), dict):
            return value
    except orjson.JSONDecodeError:
        pass
    raise EngineRejected(f"sampling_params.json_schema: {value!r} is not the text of a JSON schema")


def finish_reason(
    kind: Literal["stop", "length", "abort"], *, matched: int | str | None = None, length: int = 0
) -> dict[str, Any]:
    """The wire form of why a generation ended."""
    if kind == "stop":
        return {"type": "stop", "matched": matched}
    if kind == "length":
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@dataclass(slots=True)
class VersionSpans:
    """Run-length record of the weight version label of each output token."""

    runs: list[tuple[str, int]] = field(default_factory=list)
    """(label, number of tokens)"""

    def add(self, label: str, count: int) -> None:
        if not count:
            return
        if self.runs and self.runs[-1][0] == label:
            self.runs[-1] = (label, self.runs[-1][1] + count)
        else:
            self.runs.append((label, count))

    def wire(self) -> list[dict[str, Any]]:
        """``weight_versions`` of the final event: half-open, in order."""
        spans = []
        start = 0
        for label, count in self.runs:
            spans.append({"version": label, "start": start, "end": start + count})
            start += count
        return spans


def event(
    request: GenerateRequest,
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    completion_tokens: int,
    version: str,
    finish: dict[str, Any] | None = None,
    spans: VersionSpans | None = None,
    cached_tokens: int = 0,
    retractions: int = 0,
    tops: Sequence[Sequence[tuple[int, float]]] = (),
) -> dict[str, Any]:
    """One stream event: ``ids``, ``logprobs`` and ``tops`` are new, ``completion_tokens`` counts all so far."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.ids),
        "completion_tokens": completion_tokens,
        "cached_tokens": cached_tokens,
        "weight_version": version,
        "num_retractions": retractions,
    }
    if request.logprobs:
        meta["output_token_logprobs"] = [[value, token, None] for token, value in zip(ids, logprobs, strict=True)]
        meta["output_token_logprobs_length"] = completion_tokens
    if request.logprobs and request.top_logprobs:
        meta["output_top_logprobs"] = [[[value, token, None] for token, value in top] for top in tops]
    if finish is not None and spans is not None:
        meta["weight_versions"] = spans.wire()
    return {"output_ids": list(ids), "meta_info": meta}
