"""The parts of ``make bench-proxy`` that compute, without a process."""

from __future__ import annotations

import json
import sqlite3

import pytest

from benchmarks.proxy.client import Reply
from benchmarks.proxy.growth import Growth, database_bytes, shape
from benchmarks.proxy.held import Held, judge
from benchmarks.proxy.measure import Result, check
from benchmarks.proxy.report import ENGINE, OURS, POWER, RLLM, growth_table, headline, held_table, scenario_table
from benchmarks.proxy.scenarios import ALONE_STREAM, LONG, STREAM, WHOLE, full, quick
from benchmarks.proxy.statistics import median, percentile, table
from benchmarks.proxy.traffic import ANSWER_TOKENS, Shape, conversations, later_turns
from benchmarks.proxy.wires import Answer, make_wires, mixed_end
from workers.engines.stream import SseDecoder, StreamReader

ANSWERS = {"long": "the long answer", "short": "short"}
GROWTH = Growth(tokens=100_000, resident_mb=1.5, written_mb=1.0, bytes_per_token=(9.0, 9.5))
HELD = Held(requests=300, errors=0, duplicates=0, tokens_again=0, unproved=0)


def result(cpu: float, rate: float = 10.0, first: float = 5.0) -> Result:
    return Result([cpu, cpu + 1, cpu + 2], [rate], [first], [first + 1])


@pytest.fixture
def results() -> dict[str, dict[str, Result]]:
    stream = {
        ENGINE: result(0),
        OURS: result(1, rate=90),
        POWER: result(2),
        RLLM: result(14, rate=30),
        "smg": result(3),
        "vllm-router": result(0),
    }
    alone = {ENGINE: result(0, first=1.0), OURS: result(1, first=3.5)}
    return {STREAM: stream, WHOLE: stream, LONG: stream, ALONE_STREAM: alone}


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert median([3, 1, 2]) == 2
    assert percentile([0, 10], 0.25) == 2.5
    assert percentile([7], 0.99) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_headline_has_the_keys_that_are_judged(results) -> None:
    line = json.loads(json.dumps(headline(results, GROWTH, HELD)))
    assert list(line) == [
        "bench",
        "stream_cpu_ms_4k",
        "nonstream_cpu_ms_4k",
        "stream_cpu_ms_100k",
        "ttft_added_ms_p50",
        "throughput_ratio_rllm",
        "cpu_ratio_best_router",
        "session_mb_64x100k",
        "journal_bytes_per_token",
        "held_errors",
        "held_duplicates",
    ]
    assert (line["bench"], line["stream_cpu_ms_4k"], line["ttft_added_ms_p50"]) == ("proxy", 2, 2.5)
    assert (line["throughput_ratio_rllm"], line["cpu_ratio_best_router"]) == (3, 2)
    assert (line["session_mb_64x100k"], line["journal_bytes_per_token"]) == (1.5, 9.5)


def test_a_peer_that_does_not_run_has_no_ratio(results) -> None:
    for name in (RLLM, "smg", "vllm-router"):
        del results[STREAM][name]
    line = headline(results, GROWTH, HELD)
    assert (line["throughput_ratio_rllm"], line["cpu_ratio_best_router"]) == (None, None)


def test_tables_say_what_was_added_to_the_engine_alone(results) -> None:
    text = scenario_table(full().scenarios[0], results[STREAM])
    assert f"{OURS}    2.00" in text
    assert "1.00-3.00" in text
    assert "1.50" in growth_table({OURS: GROWTH}, 64)
    assert "300" in held_table(HELD, 30.0)
    assert table(("a", "b"), [("x", "10")]) == "a   b\nx  10"


def test_a_lost_or_doubled_answer_is_counted() -> None:
    texts = ["whole", "whole", RuntimeError("cut")]
    held = judge(texts, "whole", finished=4, tokens=3 * ANSWER_TOKENS["long"] + 7, unproved=2)
    assert (held.errors, held.duplicates, held.tokens_again, held.unproved) == (1, 1, 7, 2)
    assert "cut" in held.first_error


def test_a_later_turn_repeats_the_whole_history() -> None:
    talk = next(conversations(later_turns(4_000, 3), 1, ANSWERS, seed=1))
    bodies = [json.loads(body) for body in talk.bodies(0, 3)]
    messages = [[(message["role"], message["content"]) for message in body["messages"]] for body in bodies]
    assert [len(found) for found in messages] == [2, 4, 6]
    assert messages[2][:4] == messages[1]
    assert messages[1][2] == ("assistant", ANSWERS["long"])
    assert bodies[0]["max_tokens"] == ANSWER_TOKENS["long"]


def test_siblings_share_their_first_prompt_and_nobody_else_does() -> None:
    talks = list(conversations(Shape(2_000, 2, group=2), 4, ANSWERS, seed=1))
    first = [talk.body(0) for talk in talks]
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert first[0] != first[2]
    assert talks[0].body(1) != talks[1].body(1)
    assert first[0] not in [talk.body(0) for talk in conversations(Shape(2_000, 2, group=2), 4, ANSWERS, seed=2)]


def test_a_session_grows_to_its_size_in_equal_turns() -> None:
    growing = shape(64, 100_000)
    a_turn = growing.observation_tokens + ANSWER_TOKENS["long"]
    assert growing.prompt_tokens + 63 * a_turn == pytest.approx(100_000, abs=63)


def test_both_plans_measure_the_same_scenarios() -> None:
    assert [scenario.name for scenario in full().scenarios] == [scenario.name for scenario in quick().scenarios]


def test_an_answer_must_be_whole() -> None:
    good = b'data: {"choices":[{"delta":{"content":"ye"}}]}\n\ndata: {"choices":[{"delta":{"content":"s"}}]}\n\n'
    check([Reply(200, 0.0, 0.0, good + b"data: [DONE]\n\n")], "yes")
    check([Reply(200, 0.0, 0.0, b'{"choices":[{"message":{"content":"yes"}}]}')], "yes")
    with pytest.raises(ValueError, match="wrong answer"):
        check([Reply(200, 0.0, 0.0, good + b"data: [DONE]\n\n")], "yes!")
    with pytest.raises(ValueError, match="stream ends with"):
        check([Reply(200, 0.0, 0.0, good)], "yes")
    with pytest.raises(ValueError, match="status 500"):
        check([Reply(500, 0.0, 0.0, b"")], "yes")


def test_the_engine_speaks_the_native_wire_of_which_our_adapter_reads_every_token() -> None:
    answer = Answer([5, 6, 7, 2], ["a", "b", "c", ""])
    wires = make_wires(answer, "3")
    decoder, reader = SseDecoder(), StreamReader("rid", 100)
    chunks = [reader.read(payload) for event in wires.native for payload in decoder.feed(b"rid".join(event))]
    assert [token for chunk in chunks for token in chunk.ids] == answer.ids
    assert {chunk.version for chunk in chunks} == {3}
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.kind == "stop"


def test_an_answer_over_a_weight_update_ends_with_both_versions() -> None:
    answer = Answer([5, 6, 7, 2], ["a", "b", "c", ""])
    before, now = make_wires(answer, "3"), make_wires(answer, "4")
    decoder, reader = SseDecoder(), StreamReader("rid", 100)
    events = [b"rid".join(event) for event in (*before.native[:3], *now.native[3:3])] + [
        mixed_end(b"rid", [("3", 3)], now)
    ]
    chunks = [reader.read(payload) for event in events for payload in decoder.feed(event)]
    assert [(span.version, span.start, span.end) for span in chunks[-1].spans or ()] == [(3, 0, 3), (4, 3, 4)]


def test_both_wires_tell_the_same_answer_in_as_many_events() -> None:
    answer = Answer([5, 6, 7, 2], ["a", "b", "c", ""])
    wires = make_wires(answer, "0")
    for events in (wires.chat, wires.chat_ids):
        assert Reply(200, 0.0, 0.0, b"".join(events) + b"data: [DONE]\n\n").text() == "abc"
        assert len(events) == len(wires.native)
    assert Reply(200, 0.0, 0.0, wires.whole).text() == "abc"
    assert json.loads(wires.whole_ids)["choices"][0]["token_ids"] == answer.ids


def test_the_size_of_a_database_counts_what_is_not_yet_in_the_file(tmp_path) -> None:
    path = tmp_path / "journal.db"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE t (x BLOB)")
    empty = database_bytes(path)
    writer.execute("INSERT INTO t VALUES (?)", (b"x" * 100_000,))
    grown = database_bytes(path) - empty
    writer.close()
    assert 90_000 <= grown < 120_000
