"""Reading many events at once gives what reading one after the other gives, whatever the engine sends."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from storage.errors import EngineProtocolError
from workers.engines.base import Chunk
from workers.engines.http_answer import Answer
from workers.engines.stream import SseDecoder, StreamReader

VOCAB = 50
LABELS = ("0", "1", "1@3f9c02aa", "default")
STRANGE: list[Any] = [
    None,
    True,
    0,
    1,
    2,
    -1,
    1.0,
    VOCAB,
    2**63 - 1,
    -0.0,
    5e-5,
    0.5,
    -9999.0,
    "",
    "1",
    "x",
    [],
    [1],
    [[-0.5, 1, None]],
    [-0.5],
    {},
    {"1": 1},
    {"error": "x"},
]
Path = tuple[str | int, ...]
PATHS: list[Path] = [
    (),
    ("output_ids",),
    ("output_ids", 0),
    ("meta_info",),
    ("error",),
    *(
        ("meta_info", key)
        for key in ("finish_reason", "completion_tokens", "weight_version", "output_top_logprobs", "weight_versions")
    ),
    *(("meta_info", "output_token_logprobs", *rest) for rest in ((), (0,), (0, 0), (0, 1))),
    ("meta_info", "output_top_logprobs", 0),
    ("meta_info", "weight_versions", 0),
]


@st.composite
def payloads(draw: st.DrawFn) -> list[bytes]:
    """Events of one generation, mostly sound, and what else may lie between them."""
    cumulative, with_tops = draw(st.booleans()), draw(st.integers(0, 9)) == 0
    ids: list[int] = []
    values: list[float] = []
    labels: list[str] = []
    label, events = draw(st.sampled_from(LABELS)), []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 5)) == 0:
            label = draw(st.sampled_from(LABELS))
        new = draw(st.sampled_from([1, 1, 1, 1, 0, 2]))
        ids += draw(st.lists(st.integers(0, VOCAB - 1), min_size=new, max_size=new))
        values += draw(st.lists(st.sampled_from([-0.5, -2.25, -0.0, 5e-5, -3]), min_size=new, max_size=new))
        labels += [label] * new
        events.append(_event(ids, values, label, 0 if cumulative else len(ids) - new, with_tops))
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["stop", "length", "abort"]))
        last = _event(
            ids,
            values,
            label,
            draw(st.sampled_from([0, len(ids), max(len(ids) - 1, 0) if kind == "abort" else len(ids)])),
            with_tops,
        )
        spans = [{"version": label, "start": at, "end": at + 1} for at, label in enumerate(labels)]
        last["meta_info"] |= {"finish_reason": {"type": kind, "matched": 3}, "weight_versions": spans}
        events.append(last)
    if events and draw(st.integers(0, 2)) == 0:
        at = draw(st.integers(0, len(events) - 1))
        events[at] = _changed(events[at], draw(st.sampled_from(PATHS)), draw(st.sampled_from(STRANGE)))
    raw = [orjson.dumps(item) for item in events]
    strange = st.sampled_from([b"", b"[]", b"nonsense", b'{"error": {"message": "x"}}', b'{"meta_info": NaN}'])
    if draw(st.integers(0, 4)) == 0:
        raw.insert(draw(st.integers(0, len(raw))), draw(strange))
    if raw and draw(st.integers(0, 9)) == 0:
        raw.append(draw(st.sampled_from(raw)))
    return raw


def _event(ids: list[int], values: list[float], label: str, start: int, with_tops: bool) -> dict[str, Any]:
    pairs = list(zip(ids, values, strict=True))[start:]
    meta: dict[str, Any] = {
        "finish_reason": None,
        "completion_tokens": len(ids),
        "weight_version": label,
        "output_token_logprobs": [[value, token, None] for token, value in pairs],
    }
    if with_tops:
        meta["output_top_logprobs"] = [[[value, token, None], [-7.5, 1, None]] for token, value in pairs]
    return {"output_ids": ids[start:], "meta_info": meta}


def _changed(item: Any, path: Path, value: Any) -> Any:
    """``item`` with ``value`` at ``path``, as far as there is such a place."""
    if not path:
        return value
    item = copy.deepcopy(item)
    with contextlib.suppress(TypeError, LookupError):
        item[path[0]] = _changed(item[path[0]] if len(path) > 1 else None, path[1:], value)
    return item


def split(data: list[Any] | bytes, cuts: list[int]) -> Iterator[Any]:
    """``data`` in pieces, cut where ``cuts`` say."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return (data[start:end] for start, end in itertools.pairwise(places))


def told(reader: StreamReader, chunks: Iterable[Chunk]) -> dict[str, Any]:
    """All that a generation's owner learns, token by token, and how it ends."""
    tokens: list[Any] = []
    ends: list[Any] = []
    error = ""
    try:
        for chunk in chunks:
            assert len(chunk.ids) == len(chunk.logprobs)
            tops = chunk.tops or ((),) * len(chunk.ids)
            tokens += [
                (token, str(value), chunk.version, top)
                for token, value, top in zip(chunk.ids, chunk.logprobs, tops, strict=True)
            ]
            if chunk.finish is not None:
                ends.append((chunk.finish, chunk.spans, chunk.version))
    except EngineProtocolError as fault:
        error = str(fault)
    return {"tokens": tokens, "ends": ends, "error": error, "seen": reader.seen, "finished": reader.finished}


def one_by_one(reader: StreamReader, raw: list[bytes]) -> Iterator[Chunk]:
    for payload in raw:
        yield reader.read(payload)
        if reader.finished:
            return


@given(raw=payloads(), cuts=st.lists(st.integers(0, 20)), vocab=st.sampled_from([VOCAB, None]))
@settings(max_examples=500)
def test_events_read_together_tell_what_they_tell_one_by_one(
    raw: list[bytes], cuts: list[int], vocab: int | None
) -> None:
    alone, together = StreamReader("r", vocab), StreamReader("r", vocab)
    expected = told(alone, one_by_one(alone, raw))
    event(f"ends {bool(expected['ends'])}, fails {bool(expected['error'])}")
    groups = (group for group in split(raw, cuts) if not together.finished)
    assert told(together, (chunk for group in groups for chunk in together.read_all(group))) == expected


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_an_event_that_is_strange_in_one_place_is_read_alike(path: Path, at: int) -> None:
    sound = [_event([1] * total, [-0.5] * total, "0", total - 1, False) for total in range(1, 4)]
    sound.append(_event([1] * 3, [-0.5] * 3, "0", 3, True))
    sound[3]["meta_info"] |= {
        "finish_reason": {"type": "stop"},
        "weight_versions": [{"version": "0", "start": 0, "end": 3}],
    }
    for value in STRANGE:
        events = [*sound[:at], _changed(sound[at], path, value), *sound[at + 1 :]]
        raw = [orjson.dumps(item) for item in events]
        alone, together = StreamReader("r", VOCAB), StreamReader("r", VOCAB)
        assert told(together, together.read_all(raw)) == told(alone, one_by_one(alone, raw)), value


@given(length=st.integers(2, 300), change=st.integers(1, 300))
@settings(max_examples=30)
def test_plain_events_of_one_version_become_one_chunk(length: int, change: int) -> None:
    versions = ["0" if at < change else "1" for at in range(length)]
    raw = [
        orjson.dumps(_event([7] * (at + 1), [-0.5] * (at + 1), version, at, False))
        for at, version in enumerate(versions)
    ]
    chunks = list(StreamReader("r", VOCAB).read_all(raw))
    assert [len(chunk.ids) for chunk in chunks] == [versions.count(version) for version in dict.fromkeys(versions)]


@given(
    raw=st.lists(st.sampled_from([b'{"a":1}', b"[DONE]", b'"\\n\\n"', b"x" * 300]), max_size=8),
    framing=st.sampled_from(["chunked", "length", "close"]),
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 10**4), max_size=30),
    informational=st.booleans(),
)
@settings(max_examples=300)
def test_an_answer_in_any_framing_and_any_pieces_gives_its_events(
    raw: list[bytes], framing: str, sizes: list[int], cuts: list[int], informational: bool
) -> None:
    body = b"".join(b"data: %s\n\n: note\n\n" % payload for payload in raw)
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if informational else b"") + framed(body, framing, sizes)
    answer, sse, got = Answer(), SseDecoder(), list[bytes]()
    for piece in split(data, cuts):
        answer.feed(piece)
        got += [payload for part in answer.pieces for payload in sse.feed(part)]
        answer.pieces.clear()
    if framing == "close":
        assert not answer.complete
        answer.end("")
    assert (answer.complete, answer.fault, answer.status) == (True, "", 200)
    assert answer.reusable == (framing != "close")
    assert got == raw


def framed(body: bytes, framing: str, sizes: list[int]) -> bytes:
    """A whole answer with status 200."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    if framing == "close":
        return head + b"\r\n" + body
    chunks = []
    while body:
        size = sizes[len(chunks) % len(sizes)]
        piece, body = body[:size], body[size:]
        chunks.append(b"%x;note=1\r\n%s\r\n" % (len(piece), piece))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\nTrailer: x\r\n\r\n"
