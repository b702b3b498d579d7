"""Reading one ``/generate`` event stream of the SGLang native wire: bytes in, checked :class:`Chunk` out.

Pure: no I/O. Handles both stream forms of SGLang, *cumulative* (every event repeats all output so far) and
*incremental* (an event holds only what is new), by the cumulative ``completion_tokens`` that both carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from storage.errors import EngineError, EngineProtocolError, EngineRejected
from workers.engines.base import Chunk, Finish, VersionSpan

_SENTINEL = -9000.0  # engines write values such as -9999 where they have no log-prob
_ROUNDING = 1e-4  # a log-prob of a near certain token may come out a little above 0


class SseDecoder:
    """Splits server-sent events out of arbitrary byte chunks; gives their ``data`` payloads.

    Raises EngineProtocolError if ``limit`` bytes are no whole event.
    """

    def __init__(self, limit: int = 64 * 2**20) -> None:
        self._buffer = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        whole, separator, self._buffer = (self._buffer + data).rpartition(b"\n\n")
        if len(self._buffer) > self._limit:
            raise EngineProtocolError(f"the engine sent an event of more than {self._limit} bytes")
        if whole.startswith(b"data: "):
            payloads = whole[6:].split(b"\n\ndata: ")
            if b"\n" not in b"".join(payloads):  # events of one line, as engines write them
                return payloads
        return [line[5:].strip() for line in whole.split(b"\n") if line.startswith(b"data:")] if separator else []


def joined(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same tokens in as few chunks as can be: neighbours of one version are one; what came before an error is told
    before it."""
    held: Chunk | None = None
    try:
        for chunk in chunks:
            if held is None:
                held = chunk
            elif held.version == chunk.version and bool(held.tops) == bool(chunk.tops) and held.spans is None:
                ids, logprobs, tops = held.ids + chunk.ids, held.logprobs + chunk.logprobs, held.tops + chunk.tops
                held = chunk._replace(ids=ids, logprobs=logprobs, tops=tops)
            else:
                yield held
                held = chunk
    except EngineError:
        if held is not None:
            yield held
        raise
    if held is not None:
        yield held


def parse_version(label: object) -> int | None:
    """The integer weight version behind an engine's label; None if the label is not a version of ours.

    *Example*: ``"7"`` and ``"7@3f9c02aa"`` (see :func:`version_label`) are both 7.
    """
    number = label.partition("@")[0] if isinstance(label, str) else ""
    return int(number) if number.isdecimal() else None


def version_label(version: int, digest: str) -> str:
    """What an engine is told to call its weights. SGLang notes a change only where the label changes, so it names the
    weights too: a version that is made again after a rewind has another label."""
    return f"{version}@{digest[:8]}"


class StreamReader:
    """State of one generation's stream.

    Args:
        request_id: named in errors.
        vocab_size: output ids at or above it are refused; None skips the check.
    """

    def __init__(self, request_id: str, vocab_size: int | None) -> None:
        self.request_id = request_id
        self._vocab_size = vocab_size
        self._limit = math.inf if vocab_size is None else vocab_size
        self.seen = 0
        """Output tokens handed out so far."""
        self.finished = False

    def read(self, payload: bytes) -> Chunk:
        """Turn one event into a chunk; raises :class:`EngineProtocolError`, :class:`KeyError` never."""
        return self._chunk(self._parse(payload))

    def read_all(self, payloads: Sequence[bytes]) -> Iterator[Chunk]:
        """Turn events that came together into chunks, plain tokens of one version in one chunk.

        All else, and every error, is as of :meth:`read` for one after the other. Ends with the final event.
        """
        ids: list[int] = []
        logprobs: list[float] = []
        version: object = None
        try:
            for event in self._parse_all(payloads):
                plain = self._plain(event)
                if ids and (plain is None or plain[2] != version):
                    told, ids = Chunk(tuple(ids), tuple(logprobs), parse_version(version)), []
                    logprobs = []
                    yield told
                if plain is None:
                    yield self._chunk(event)
                    if self.finished:
                        return
                else:
                    ids.append(plain[0])
                    logprobs.append(plain[1])
                    version = plain[2]
                    self.seen += 1
        except EngineError:
            if ids:
                yield Chunk(tuple(ids), tuple(logprobs), parse_version(version))
            raise
        if ids:
            yield Chunk(tuple(ids), tuple(logprobs), parse_version(version))

    def _plain(self, event: Any) -> tuple[int, float, object] | None:
        """Token, log-prob and version label of an event that holds one sound token and no more; None: look closer."""
        try:
            meta = event["meta_info"]
            (token,) = event["output_ids"]
            (entry,) = meta["output_token_logprobs"]
            value, total = entry[0], meta["completion_tokens"]
            if (
                meta["finish_reason"] is None
                and type(total) is type(token) is int
                and total == self.seen + 1
                and entry[1] == token
                and 0 <= token < self._limit
                and type(value) is float
                and _SENTINEL < value < _ROUNDING
                and not meta.get("output_top_logprobs")
                and "error" not in event
            ):
                return token, value if value <= 0.0 else 0.0, meta.get("weight_version")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            pass  # of another form
        return None

    def _chunk(self, event: Any) -> Chunk:
        if not isinstance(event, dict):
            raise self._error(f"an event that is not an object: {str(event)[:80]!r}")
        if "error" in event:
            raise self._refusal(event["error"])
        try:
            return self._checked(event)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise self._error(f"an event of another form ({error!r}): {str(event)[:80]}") from error

    def _checked(self, event: dict[str, Any]) -> Chunk:
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise self._error("an event without meta_info")
        finish = self._finish(meta.get("finish_reason"))
        ids, logprobs = self._new_tokens(event, meta, finish)
        tops = self._tops(meta.get("output_top_logprobs"), len(ids), finish)
        self.seen += len(ids)
        self.finished = finish is not None
        spans = self._spans(meta.get("weight_versions")) if finish else None
        return Chunk(ids, logprobs, parse_version(meta.get("weight_version")), spans, finish, tops)

    def _parse(self, payload: bytes) -> Any:
        try:
            return orjson.loads(payload)
        except orjson.JSONDecodeError as error:  # also how a NaN log-prob shows
            raise self._error(f"an event that is not JSON ({error}): {payload[:80]!r}") from None

    def _parse_all(self, payloads: Sequence[bytes]) -> Iterable[Any]:
        """In one call: one for each costs as much again as what it parses."""
        try:
            events: list[Any] = orjson.loads(b"[%b]" % b",".join(payloads))
        except orjson.JSONDecodeError:
            events = []
        return events if len(events) == len(payloads) else map(self._parse, payloads)

    def _refusal(self, error: Any) -> EngineError:
        """SGLang finds some faults of a request only when the stream's head is sent."""
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            return EngineRejected(f"request {self.request_id}: {error.get('message')}")
        return self._error(f"an error event: {error}")

    def _new_tokens(
        self, event: dict[str, Any], meta: dict[str, Any], finish: Finish | None
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ids = event.get("output_ids") or []
        total = meta.get("completion_tokens", None if ids else self.seen)
        if not isinstance(total, int):
            raise self._error(f"completion_tokens is {total!r}")
        new = total - self.seen
        aborted = finish is not None and finish.kind == "abort"
        if aborted and new <= 0:
            # SGLang sends the last token again when a retracted request is aborted, and no counts from its queue.
            return (), ()
        if new < 0:
            raise self._error(f"completion_tokens fell from {self.seen} to {total}")
        if len(ids) == new + 1 and aborted and len(ids) != total:
            ids = ids[:new]  # the last token again, in one event with new ones
        if len(ids) not in (new, total):
            raise self._error(f"{len(ids)} output_ids where {new} new of {total} tokens are due")
        fresh = tuple(ids[len(ids) - new :])
        return fresh, self._logprobs(fresh, meta.get("output_token_logprobs") or [], total, aborted)

    def _logprobs(self, ids: tuple[int, ...], entries: list[Any], total: int, aborted: bool) -> tuple[float, ...]:
        """The end of ``entries``: of the new tokens, of all or, with an abort, of the new ones and then all."""
        new = len(ids)
        if not new:
            return ()
        if len(entries) not in (new, total, new + total if aborted else total):
            raise self._error(f"{len(entries)} log-probs for {new} new of {total} tokens")
        return tuple(
            self._logprob(token, entry, self.seen + index)
            for index, (token, entry) in enumerate(zip(ids, entries[len(entries) - new :], strict=True))
        )

    def _logprob(self, token: object, entry: Any, position: int) -> float:
        if not isinstance(token, int) or token < 0 or (self._vocab_size is not None and token >= self._vocab_size):
            raise self._error(f"output token {position} has id {token!r}, outside the vocabulary of {self._vocab_size}")
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise self._error(f"output token {position} has id {token} but log-prob entry {entry!r}")
        value = entry[0]
        if not isinstance(value, float | int) or not math.isfinite(value) or not _SENTINEL < value < _ROUNDING:
            raise self._error(f"output token {position} has log-prob {value!r}")
        return min(float(value), 0.0)

    def _tops(self, entries: Any, new: int, finish: Finish | None) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The likeliest tokens of each new token; ``entries`` are as those of :meth:`_logprobs`."""
        if not entries or not new:
            return ()
        total = self.seen + new
        aborted = finish is not None and finish.kind == "abort"
        if len(entries) not in (new, total, new + total if aborted else total):
            raise self._error(f"{len(entries)} top log-probs for {new} new tokens")
        try:
            return tuple(
                tuple((int(entry[1]), min(float(entry[0]), 0.0)) for entry in top)
                for top in entries[len(entries) - new :]
            )
        except (TypeError, ValueError, IndexError):
            raise self._error(f"top log-probs {str(entries[-1])[:80]}") from None

    def _finish(self, reason: Any) -> Finish | None:
        if reason is None:
            return None
        kind = reason.get("type") if isinstance(reason, dict) else None
        if kind not in ("stop", "length", "abort"):
            raise self._error(f"finish_reason {reason!r}")
        return Finish(kind, matched=reason.get("matched"), message=str(reason.get("message") or ""))

    def _spans(self, spans: Any) -> tuple[VersionSpan, ...] | None:
        if not spans:
            return None
        result = []
        end = 0
        for span in spans if self.seen else ():  # SGLang gives a request without output one span of no tokens
            if span.get("start") != end or not isinstance(span.get("end"), int) or span["end"] <= end:
                raise self._error(f"weight_versions with a gap or overlap: {spans!r}")
            result.append(VersionSpan(parse_version(span.get("version")), end, span["end"]))
            end = span["end"]
        if end != self.seen:
            raise self._error(f"weight_versions cover {end} of {self.seen} output tokens")
        return tuple(result)

    def _error(self, what: str) -> EngineProtocolError:
        return EngineProtocolError(f"request {self.request_id}: the engine sent {what}")
