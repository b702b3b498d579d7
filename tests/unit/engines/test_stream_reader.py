"""What the adapter accepts from an engine's stream, and what it refuses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from storage.errors import EngineProtocolError
from workers.engines.base import Finish, VersionSpan
from workers.engines.stream import SseDecoder, StreamReader, parse_version


def event(ids: list[int], total: int, *, logprobs: Any = "match", finish: Any = None, **meta: Any) -> bytes:
    entries = [[-0.5, i, None] for i in ids] if logprobs == "match" else logprobs
    meta = {"finish_reason": finish, "completion_tokens": total, "weight_version": "3", **meta}
    if entries is not None:
        meta["output_token_logprobs"] = entries
    return orjson.dumps({"output_ids": ids, "meta_info": meta})


def reader(vocab_size: int | None = 100) -> StreamReader:
    return StreamReader("r" * 32, vocab_size)


def test_incremental_and_cumulative_streams_give_the_same_tokens() -> None:
    incremental, cumulative = reader(), reader()
    assert [incremental.read(event(ids, n)).ids for ids, n in (([1], 1), ([2, 3], 3), ([4], 4))] == [(1,), (2, 3), (4,)]
    assert [cumulative.read(event(ids, len(ids))).ids for ids in ([1], [1, 2, 3], [1, 2, 3, 4])] == [(1,), (2, 3), (4,)]


def test_a_final_event_carries_finish_and_exact_version_spans() -> None:
    stream = reader()
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    chunk = stream.read(event([1, 2, 3], 3, finish={"type": "stop", "matched": 3}, weight_versions=spans))
    assert chunk.finish == Finish("stop", matched=3)
    assert chunk.spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    assert stream.finished


def test_an_abort_that_repeats_the_last_token_and_all_log_probs_adds_nothing() -> None:
    stream = reader()
    for n in (1, 2, 3):
        stream.read(event([n], n))
    everything = [[-0.5, i, None] for i in (1, 2, 3)]
    chunk = stream.read(event([3], 3, logprobs=everything, finish={"type": "abort", "message": "Aborted"}))
    assert (chunk.ids, chunk.logprobs) == ((), ())
    assert chunk.finish == Finish("abort", message="Aborted")


@pytest.mark.parametrize("seen", [1, 2])
def test_an_abort_that_repeats_the_last_token_behind_new_ones_gives_the_new_ones_once(seen: int) -> None:
    stream = reader()
    for n in range(1, seen + 1):
        stream.read(event([n], n))
    everything = [[-0.1 * i, i, None] for i in range(1, seen + 2)]
    last = seen + 1
    spans = [{"version": "3@aa", "start": 0, "end": last}]
    logprobs = [everything[-1], *everything]  # the event of the new token, and the abort's full list, in one
    chunk = stream.read(event([last, last], last, logprobs=logprobs, finish={"type": "abort"}, weight_versions=spans))
    assert chunk.ids == (last,)
    assert chunk.logprobs == pytest.approx([-0.1 * last])
    assert chunk.spans == (VersionSpan(3, 0, last),)


def test_an_abort_before_the_first_token_has_a_span_of_no_tokens() -> None:
    spans = [{"version": "3", "start": 0, "end": 0}]
    chunk = reader().read(event([], 0, finish={"type": "abort"}, weight_versions=spans))
    assert (chunk.ids, chunk.spans) == ((), ())


def test_an_abort_out_of_the_queue_without_log_prob_key_is_an_empty_chunk() -> None:
    payload = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}
    chunk = reader().read(orjson.dumps(payload))
    assert chunk.ids == ()
    assert chunk.finish is not None
    assert chunk.finish.kind == "abort"


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (event([1, 2, 3], 3, logprobs=[[-0.5, i, None] for i in (1, 2, 3, 4, 5)]), "5 log-probs for 3"),
        (event([1], 1, logprobs=[[-0.5, 2, None]]), "log-prob entry"),
        (event([1], 1, logprobs=None), "0 log-probs for 1"),
        (event([1], 1, logprobs=[[-9999.0, 1, None]]), "log-prob -9999"),
        (event([1], 1, logprobs=[[None, 1, None]]), "log-prob None"),
        (event([1], 1, logprobs=[[0.5, 1, None]]), "log-prob 0.5"),
        (event([1], 1).replace(b"-0.5", b"NaN"), "not JSON"),
        (event([100], 1), "outside the vocabulary of 100"),
        (event([-1], 1), "outside the vocabulary"),
        (event([1], 2), "1 output_ids where 2 new"),
        (event([1], 1, finish={"type": "exploded"}), "finish_reason"),
        (b'{"error": {"message": "x"}}', "error event"),
        (b"[]", "not an object"),
        (b"{}", "without meta_info"),
    ],
)
def test_a_bad_event_is_refused_with_its_cause(payload: bytes, cause: str) -> None:
    with pytest.raises(EngineProtocolError, match=cause):
        reader().read(payload)


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "1", "start": 1, "end": 2}],
        [{"version": "1", "start": 0, "end": 1}],
        [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 0, "end": 2}],
        [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 2}],
    ],
)
def test_version_spans_that_do_not_cover_the_output_are_refused(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineProtocolError, match="weight_versions"):
        reader().read(event([1, 2], 2, finish={"type": "length", "length": 2}, weight_versions=spans))


def test_completion_tokens_never_fall() -> None:
    stream = reader()
    stream.read(event([1, 2], 2))
    with pytest.raises(EngineProtocolError, match="fell from 2 to 1"):
        stream.read(event([1], 1))


def test_events_survive_any_split_of_the_byte_stream() -> None:
    data = b'data: {"a":1}\n\n: keep-alive\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    for cut in range(len(data)):
        decoder = SseDecoder()
        assert [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])] == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    decoder = SseDecoder(limit=100)
    assert decoder.feed(b"data: 1\n\ndata: " + b"2" * 90) == [b"1"]
    with pytest.raises(EngineProtocolError, match="more than 100 bytes"):
        decoder.feed(b"2" * 90)


@pytest.mark.parametrize(("label", "version"), [("0", 0), ("17", 17), ("default", None), ("", None), (3, None)])
def test_only_integer_labels_are_versions_of_ours(label: object, version: int | None) -> None:
    assert parse_version(label) == version
