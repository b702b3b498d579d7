"""vLLM's wire: what is sent, what is refused before it is sent, what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from storage.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import Finish, Sampling, VersionSpan
from workers.engines.vllm_stream import Served, VllmStreamReader, check_request, generate_body, version_of

SERVED = Served(Path("model"), vocab_size=64, max_context=100, max_top_logprobs=20, sleeps=False, workers=1)


def body(**options: Any) -> dict[str, Any]:
    data: dict[str, Any] = orjson.loads(generate_body([1, 2], Sampling(8, **options), "r-1", "salt"))
    return data


def event(*tokens: tuple[int, float], **choice: Any) -> bytes:
    content = [{"token_id": token, "logprob": value, "rank": 1} for token, value in tokens]
    fields = {"index": 0, "token_ids": [token for token, _ in tokens], "logprobs": {"content": content}, **choice}
    return orjson.dumps({"request_id": "generate-tokens-r-1", "choices": [fields]})


def reader(top_logprobs: int = 0) -> VllmStreamReader:
    return VllmStreamReader("r-1", 64, top_logprobs)


def test_a_request_says_its_length_and_log_probs_and_asks_for_text_only_where_a_stop_string_needs_it() -> None:
    sent = body()
    assert (sent["token_ids"], sent["request_id"], sent["cache_salt"], sent["stream"]) == ([1, 2], "r-1", "salt", True)
    parameters = sent["sampling_params"]
    assert (parameters["max_tokens"], parameters["logprobs"], parameters["detokenize"]) == (8, 0, False)
    stopped = body(stop=("</s>",))["sampling_params"]
    assert (stopped["stop"], stopped["detokenize"], stopped["skip_special_tokens"]) == (["</s>"], True, False)


def test_without_a_salt_none_is_sent() -> None:
    assert "cache_salt" not in orjson.loads(generate_body([1], Sampling(1), "r", ""))


def test_every_parameter_has_its_name_of_vllm_s() -> None:
    schema = '{"type": "object"}'
    sent = body(
        top_k=-1, min_p=0.1, seed=3, logit_bias={5: 1.5}, json_schema=schema, top_logprobs=2, stop_token_ids=(2,)
    )
    parameters = sent["sampling_params"]
    assert parameters["top_k"] == 0
    assert (parameters["min_p"], parameters["seed"], parameters["stop_token_ids"]) == (0.1, 3, [2])
    assert parameters["logit_bias"] == {"5": 1.5}
    assert parameters["structured_outputs"] == {"json": schema}
    assert parameters["logprobs"] == 3


@pytest.mark.parametrize(
    ("ids", "options", "named"),
    [
        ([], {}, "empty"),
        ([64], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([1] * 93, {}, "context"),
        ([1], {"temperature": 0.005}, "temperature"),
        ([1], {"temperature": 2.5}, "temperature"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"seed": 2**63}, "seed"),
        ([1], {"stop_token_ids": (64,)}, "stop_token_ids"),
        ([1], {"logit_bias": {64: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {1: float("inf")}}, "logit_bias"),
        ([1], {"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_vllm_would_change_or_ignore_is_refused_before_it_is_sent(
    ids: list[int], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineRejected, match=named):
        check_request(ids, Sampling(8, **options), SERVED)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_a_prompt_that_just_fits_at_a_temperature_that_vllm_leaves_alone_passes(temperature: float) -> None:
    check_request([0, 63] * 46, Sampling(8, temperature=temperature), SERVED)


def test_several_tokens_of_one_event_are_one_chunk_and_the_last_one_brings_the_versions() -> None:
    stream = reader()
    first = stream.read(event((5, -0.5), (6, -1.5)))
    assert (first.ids, first.logprobs, first.spans, first.finish) == ((5, 6), (-0.5, -1.5), None, None)
    versions = [{"version": "default", "start": 0, "end": 2}, {"version": "7@0a1b2c3d", "start": 2, "end": 3}]
    last = stream.read(event((7, -2.0), finish_reason="length", weight_versions=versions))
    assert last.spans == (VersionSpan(0, 0, 2), VersionSpan(7, 2, 3))
    assert last.finish == Finish("length")
    assert (stream.seen, stream.finished) == (3, True)


@pytest.mark.parametrize(("reason", "matched"), [(28, 28), ("ab", "ab"), (None, 9)])
def test_a_stop_names_what_matched_and_the_end_of_sequence_is_the_last_token(reason: Any, matched: Any) -> None:
    chunk = reader().read(event((9, -0.1), finish_reason="stop", stop_reason=reason))
    assert chunk.finish == Finish("stop", matched=matched)


def test_an_abort_ends_the_stream_without_a_token() -> None:
    stream = reader()
    stream.read(event((5, -0.5)))
    spans = [{"version": "3@00000000", "start": 0, "end": 1}]
    chunk = stream.read(event(finish_reason="abort", weight_versions=spans))
    assert (chunk.ids, chunk.finish, chunk.spans) == ((), Finish("abort"), (VersionSpan(3, 0, 1),))


def test_an_error_event_means_that_the_generation_can_go_on_elsewhere() -> None:
    with pytest.raises(EngineUnavailable, match=r"after 0 tokens: EngineCore"):
        reader().read(b'{"error": {"message": "EngineCore encountered an issue", "code": 500}}')


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (event((5, -9999.0)), "log-prob"),
        (event((5, 0.5)), "log-prob"),
        (event((64, -1.0)), "vocabulary"),
        (event((5, -1.0), token_ids=[6]), "log-prob entry"),
        (event((5, -1.0), token_ids=[5, 6]), "1 log-probs for 2 tokens"),
        (event((5, -1.0), logprobs=None), "0 log-probs for 1 tokens"),
        (event((5, -1.0), finish_reason="repetition"), "repetition"),
        (
            event((5, -1.0), finish_reason="stop", weight_versions=[{"version": "1", "start": 0, "end": 2}]),
            "cover 2 of 1",
        ),
        (b'{"choices": []}', "one choice"),
        (b"[1]", "one choice"),
        (b"{", "not JSON"),
    ],
)
def test_an_event_that_breaks_the_contract_is_refused(payload: bytes, named: str) -> None:
    with pytest.raises(EngineProtocolError, match=named):
        reader().read(payload)


@pytest.mark.parametrize("rest", [[(5, -0.25), (6, -0.5)], [(6, -0.5), (5, -0.25)]])
def test_the_likeliest_tokens_come_in_order_and_the_drawn_one_only_if_it_is_one_of_them(
    rest: list[tuple[int, float]],
) -> None:
    listed = [{"token_id": token, "logprob": value, "rank": 1} for token, value in [(9, -4.0), *rest]]
    entry = {"token_id": 9, "logprob": -4.0, "rank": 30, "top_logprobs": listed}
    chunk = reader(top_logprobs=2).read(event((9, -4.0), logprobs={"content": [entry]}))
    assert chunk.tops == (((5, -0.25), (6, -0.5)),)


@pytest.mark.parametrize(
    ("label", "version"), [("default", 0), ("0", 0), ("12@0a1b2c3d", 12), ("unknown", None), (None, None)]
)
def test_labels_are_versions_or_unknown(label: object, version: int | None) -> None:
    assert version_of(label) == version
