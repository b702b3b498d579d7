"""What an inference engine is to the rest of the system.

One protocol, :class:`Engine`, with frozen records in and out. Adapters turn an
engine's wire format into it and check everything the engine says; all of them
pass the same conformance suite (``tests/contract/engines``). Nothing here
imports torch or an HTTP library.

Tokens are always ids. An engine never sees text, except in :attr:`Sampling.stop`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

PauseMode = Literal["abort", "retract", "in_place"]
"""``abort`` ends running requests with what they have; ``retract`` drops their KV and computes it anew under the
weights in force at resumption; ``in_place`` keeps their KV. In all modes new requests are accepted and wait."""

FinishKind = Literal["stop", "length", "abort"]

TokenIds = Sequence[int] | NDArray[np.int32]
"""A prompt. The array is what the proxy has; adapters send it without a list in between."""


class WrittenIds(NDArray[np.int32]):
    """A prompt whose JSON is known already; made by :func:`written`. A part of it, or a copy, has none."""

    json: bytes = b""


def written(ids: NDArray[np.int32], json: bytes) -> WrittenIds:
    """``ids``, which are ``json``: for who sends the same beginning again and again."""
    prompt = ids.view(WrittenIds)
    prompt.json = json
    return prompt


def in_json(ids: TokenIds) -> Any:
    """A prompt as a value that orjson writes with ``OPT_SERIALIZE_NUMPY``."""
    if isinstance(ids, WrittenIds) and ids.json:
        return orjson.Fragment(ids.json)
    if isinstance(ids, np.ndarray):
        return np.asarray(ids)
    return ids if isinstance(ids, list) else list(ids)


def outside(ids: TokenIds | Iterable[int], vocab_size: int) -> int | None:
    """The first id that is not of a vocabulary of this size."""
    values = np.asarray(ids if isinstance(ids, Sequence | np.ndarray) else list(ids))
    wrong = values[(values < 0) | (values >= vocab_size)]
    return int(wrong[0]) if wrong.size else None


class Sampling(NamedTuple):
    """How one generation is sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy. Log-probs are of ``softmax(logits / temperature)``; of ``softmax(logits)`` when greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are never drawn."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids; the matched token is part of the output."""
    seed: int | None = None
    """Of this request's draws. Real servers draw their own, unless ``engine.deterministic`` is set."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    """Token id -> number added to its logit; log-probs are of the distribution that comes of it."""
    json_schema: str | None = None
    """JSON text of the schema that the output must follow."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report at each position."""
    whole: bool = False
    """Nobody reads the output before its end: it may be handed over in few chunks."""


FEATURES: dict[str, frozenset[str]] = {
    "embedded": frozenset({"logit_bias", "top_logprobs"}),
    "scripted": frozenset({"grammar", "penalties", "logit_bias", "top_logprobs"}),
    "sglang": frozenset({"grammar", "penalties", "logit_bias", "top_logprobs"}),
    "vllm": frozenset({"grammar", "penalties", "logit_bias", "top_logprobs"}),
}
"""Kind of engine -> what it supports of :class:`Sampling` beyond temperature, top-p, top-k, stops and seeds."""


class VersionSpan(NamedTuple):
    """Output tokens ``[start, end)`` of one request were sampled under ``version``; None: the engine cannot say."""

    version: int | None
    start: int
    end: int


class Finish(NamedTuple):
    """Why a generation ended."""

    kind: FinishKind
    matched: int | str | None = None
    """``stop``: the token id or stop string that matched."""
    message: str = ""
    """``abort``: what the engine said."""


class Chunk(NamedTuple):
    """Newly generated tokens of one generation.

    Built by an adapter, read by the generation's owner. ``len(ids) == len(logprobs)``; both may be empty, e.g. on the
    last chunk. Log-probs are finite and not positive.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int | None
    """The engine's weight version when it sent this chunk; a hint until ``spans`` confirm or amend it."""
    spans: tuple[VersionSpan, ...] | None = None
    """On the last chunk: the exact version of every output token since the first, in order and without a gap. Before,
    from an engine whose chunks carry no version: that of the first tokens, as far as it is certain by now."""
    finish: Finish | None = None
    """Set on the last chunk only."""
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    """``top_logprobs`` of each token, as (token, log-prob), likeliest first; empty if they were not asked for."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A confirmed weight update."""

    version: int
    checksum: str | None
    """Digest of the loaded files by the rule of the weights store, if the engine reports one."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A group of processes in which rank 0 broadcasts weights; built by whoever syncs, read by sender and engines."""

    group: str
    """Its name: one for each broadcast, never used again."""
    address: str
    port: int
    """Where rank 0 listens for the others."""
    rank: int
    """Of the engine's first device; the further ones follow."""
    world_size: int
    """Ranks of the whole group, the sender's included."""
    backend: Literal["gloo", "nccl"] = "gloo"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves."""

    model_path: str
    weight_version: int | None
    vocab_size: int | None = None
    max_context: int | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Load of an engine at one moment."""

    running: int
    waiting: int
    used_tokens: int = 0
    """Tokens in the KV cache."""
    running_tokens: int | None = None
    """Those of them that belong to running requests; None where it does not tell."""
    generated: int | None = None
    """Tokens sampled since the engine started; None where it does not tell."""


class Engine(Protocol):
    """An inference engine that serves one model.

    Every call has a deadline. Errors: :class:`EngineUnavailable` (no connection, broken or stalled stream, deadline),
    :class:`EngineRejected` (bad input), :class:`EngineProtocolError` (the answer breaks the contract).
    """

    def generate(self, ids: TokenIds, sampling: Sampling, *, request_id: str, salt: str) -> AsyncGenerator[Chunk, None]:
        """Generate after the prompt ``ids``; the last chunk has ``finish``.

        ``request_id`` is unique among live requests and of fixed length (engines may match by prefix). ``salt`` keeps
        prefix caches apart: KV is shared only between requests of equal salt. Closing the generator aborts the request.
        """
        ...

    def continuable(self, sampling: Sampling) -> bool:
        """Whether a cut generation may go on, here or elsewhere, with prompt + output so far as its prompt."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating before the next token; returns when it has stopped."""
        ...

    async def resume(self) -> None:
        """Go on after :meth:`pause`; harmless if not paused."""
        ...

    async def abort(self, request_id: str | None) -> None:
        """End one request (None: all) with the tokens it has; unknown ids are ignored."""
        ...

    async def load_weights(self, path: str, version: int, transfer: Transfer | None = None) -> Loaded:
        """Serve the checkpoint directory ``path`` as ``version``; on an error the old weights stay.

        With ``transfer`` the tensors come from its rank 0 instead, which broadcasts those of ``path`` in the order of
        :func:`workers.engines.checkpoint.stored_tensors`. A broadcast that fails midway leaves weights that nobody
        knows: :class:`EngineUnavailable`, and the engine has to be ended. Refused without such a way.
        """
        ...

    async def release_memory(self) -> None:
        """Give weights and KV memory back; refused while requests are live."""
        ...

    async def resume_memory(self) -> None:
        """Undo :meth:`release_memory`; the engine serves the version it had."""
        ...

    async def ready(self) -> bool:
        """Whether the engine process answers; true also while paused."""
        ...

    async def info(self) -> EngineInfo: ...

    async def stats(self) -> Stats: ...

    async def close(self) -> None:
        """Release the adapter's connections; the engine itself goes on."""
        ...
