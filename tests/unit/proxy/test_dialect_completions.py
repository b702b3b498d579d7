"""OpenAI's legacy completions, checked with the types of the vendor's own client. Numbers are rows of the case list."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from pydantic import BaseModel

from proxy.dialects.base import AnswerHead, ChoiceAnswer, TokenInfo, TurnRequest
from proxy.dialects.completions import CompletionsDialect
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import Message
from storage import errors

DIALECT = CompletionsDialect()
GENERATION = "0123456789abcdef"
TOKENS = (
    TokenInfo("He", -0.1, (("He", -0.1), ("Ho", -2.5))),
    TokenInfo("y", -3.0, (("llo", -0.5), ("l", -1.0))),
    TokenInfo("!", -0.2, (("!", -0.2), ("?", -4.0))),
)


def parse(**more):
    return DIALECT.parse(json.dumps({"model": "any", "prompt": "Once", **more}).encode())


def head(**request):
    return AnswerHead(GENERATION, 1700000000, "policy", 4, TurnRequest((), prompt="Once", **request))


def answer_of(text, index=0, tokens=None, reason="stop"):
    return ChoiceAnswer(index, GENERATION, Message("assistant", text), reason, None, completion_tokens=3, tokens=tokens)


def chunks(data):
    """The JSON of each chunk; the stream must end as the vendor's does."""
    *found, end = data.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in found]


def declared(model):
    """Whether every field is one that the vendor's types declare."""
    values = [getattr(model, name) for name in type(model).model_fields]
    nested = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return not model.model_extra and all(declared(v) for v in nested if isinstance(v, BaseModel))


def test_a_request_is_its_prompt():
    request = parse(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 1},
        seed=3,
        stop="END",
        n=2,
        best_of=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=2,
        user="me",
        echo=False,
        suffix=None,
    )
    assert request == TurnRequest(
        (),
        prompt="Once",
        model="any",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={5: 1.0},
        seed=3,
        stop=("END",),
        n=2,
        stream=True,
        include_usage=True,
        logprobs=True,
        top_logprobs=2,
        labels={"user": "me"},
    )


def test_what_is_left_out_is_the_vendor_s_default():
    request = parse()
    assert (request.max_tokens, request.n, request.logprobs, request.stream) == (16, 1, False, False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Once", "Once"), (["Once"], "Once"), ([5, 6, 0], (5, 6, 0)), ([[5, 6, 0]], (5, 6, 0)), ([0], (0,))],
)
def test_a_prompt_is_text_or_ids_alone_or_in_a_list_of_one(prompt, expected):
    assert parse(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a", [1]]])
def test_several_prompts_are_refused_by_name(prompt):
    with pytest.raises(errors.UnsupportedParameter) as failure:
        parse(prompt=prompt)
    assert failure.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [True], [1, "a"], [1, [2]], [-1], [1.5], {"a": 1}])
def test_a_prompt_that_is_none_is_refused(prompt):
    with pytest.raises(errors.InvalidRequest) as failure:
        parse(prompt=prompt)
    assert failure.value.param == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("suffix", "the end"),
        ("best_of", 3),
        ("tools", []),
        ("messages", []),
        ("response_format", {"type": "json_object"}),
        ("stream_options.extra", {"extra": 1}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    with pytest.raises(errors.UnsupportedParameter) as failure:
        parse(stream=True, **{name.split(".")[0]: value})
    assert failure.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 6),
        ("logprobs", -1),
        ("logprobs", True),
        ("max_tokens", 0),
        ("n", 0),
        ("temperature", 2.5),
        ("stop", [""]),
        ("logit_bias", {"a": 1}),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(errors.InvalidRequest) as failure:
        parse(**{name: value})
    assert failure.value.param == name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 7) | st.floats(0, 2) | st.sampled_from(["", "a", "5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["5", "a", "include_usage"]), inner),
    max_leaves=6,
)
FIELDS = [
    *("max_tokens", "temperature", "logit_bias", "seed", "stop", "n", "best_of", "stream", "stream_options"),
    *("logprobs", "echo", "suffix", "user", "unknown"),
]


@given(JSON, st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_any_request_is_understood_or_refused(prompt, more):
    with contextlib.suppress(errors.RequestError):
        assert parse(prompt=prompt, **more).prompt


def test_a_whole_answer_of_two_choices():
    body = DIALECT.answer(head(n=2), [answer_of(" upon"), answer_of(" more", 1, reason="length")])
    assert declared(Completion.model_validate_json(body))
    assert json.loads(body) == {
        "id": f"cmpl-{GENERATION}",
        "object": "text_completion",
        "created": 1700000000,
        "model": "policy",
        "choices": [
            {"index": 0, "text": " upon", "logprobs": None, "finish_reason": "stop"},
            {"index": 1, "text": " more", "logprobs": None, "finish_reason": "length"},
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
    }


def test_57_log_probabilities_come_in_the_schema_of_completions():
    body = DIALECT.answer(head(logprobs=True, top_logprobs=2), [answer_of("Hey!", tokens=TOKENS)])
    assert declared(Completion.model_validate_json(body))
    assert json.loads(body)["choices"][0]["logprobs"] == {
        "tokens": ["He", "y", "!"],
        "token_logprobs": [-0.1, -3.0, -0.2],
        "top_logprobs": [{"He": -0.1, "Ho": -2.5}, {"y": -3.0, "llo": -0.5, "l": -1.0}, {"!": -0.2, "?": -4.0}],
        "text_offset": [0, 2, 3],
    }


def test_57_without_alternatives_only_the_drawn_tokens_are_told():
    body = DIALECT.answer(head(logprobs=True), [answer_of("Hey!", tokens=TOKENS)])
    logprobs = json.loads(body)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.1, -3.0, -0.2]
    assert logprobs["top_logprobs"] is None


def test_57_likeliest_tokens_of_the_same_text_keep_the_higher_value():
    token = TokenInfo("\ufffd", -5.0, (("\ufffd", -0.5), ("\ufffd", -1.0)))
    body = DIALECT.answer(head(logprobs=True, top_logprobs=2), [answer_of("\ufffd", tokens=(token,))])
    assert json.loads(body)["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]


@pytest.mark.parametrize("include_usage", [False, True])
def test_21_75_a_stream_has_null_reasons_until_the_last_and_usage_only_when_asked(include_usage):
    writer = DIALECT.stream(head(n=2, include_usage=include_usage))
    data = [writer.opening(), writer.delta(0, Delta(" up"), ()), writer.delta(1, Delta(" more"), ())]
    data += [writer.finish(answer_of(" more", 1)), writer.delta(0, Delta("on"), ()), writer.finish(answer_of(" upon"))]
    found = chunks(b"".join([*data, writer.closing()]))
    if include_usage:
        usage = found.pop()
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
        assert all(chunk.pop("usage", "missing") is None for chunk in found)
    assert all("usage" not in chunk for chunk in found)
    assert [tuple(chunk["choices"][0].values()) for chunk in found] == [
        (0, " up", None, None),
        (1, " more", None, None),
        (1, "", None, "stop"),
        (0, "on", None, None),
        (0, "", None, "stop"),
    ]


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_56_any_chunking_tells_each_token_once_at_its_place(sizes):
    whole = json.loads(DIALECT.answer(head(logprobs=True, top_logprobs=2), [answer_of("Hey!", tokens=TOKENS)]))[
        "choices"
    ][0]
    writer = DIALECT.stream(head(logprobs=True, top_logprobs=2))
    data, told = [writer.opening()], 0
    for size in sizes:
        part = TOKENS[told : told + size]
        told += len(part)
        data.append(writer.delta(0, Delta("".join(token.text for token in part)), part))
    rest = TOKENS[told:]
    data.append(writer.delta(0, Delta("".join(token.text for token in rest)), ()))
    data += [writer.finish(answer_of("Hey!", tokens=rest)), writer.closing()]
    choices = [chunk["choices"][0] for chunk in chunks(b"".join(data))]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for choice in choices for value in (choice["logprobs"] or {}).get(name, ())] == values


def test_30_errors_are_the_vendor_s():
    reply = DIALECT.error(errors.ContextLengthExceeded("too long"))
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["code"] == "context_length_exceeded"
    writer = DIALECT.stream(head())
    assert json.loads(writer.failure(errors.InvalidRequest("no", param="stop")).removeprefix(b"data: ")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "stop", "code": None}
    }
