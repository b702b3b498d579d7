"""Rows about tokens: what is recorded is what the engine wrote, whatever the agent is shown."""

from __future__ import annotations

import asyncio

import openai
import pytest
from interruptions import Call
from spoken import CALLING, CHAT

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play
from workers.engines.scripted import ScriptedEngine

HELLO = toy_ids("Hello")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 41}}\n</tool_call>'
THINK = {"model": {"reasoning_parser": "think"}}
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def recording_of(bench):
    return (await bench.recorded()).turns[0].choices[0].recording


class Mute(ScriptedEngine):
    """It counts its tokens and tells their text's log-probs, but not which they are."""

    def _event(self, *arguments):
        item = super()._event(*arguments)
        del item["output_ids"]
        return item


async def test_case_02_an_answer_without_ids_is_never_recorded_and_the_agent_gets_one_from_elsewhere(start_bench):
    bench = await start_bench(Play(HELLO), engine_class=Mute)
    async with ScriptedEngine([Play(HELLO)], vocab_size=259) as other:
        await bench.route("open", lease="lease-b", engine=other)
        assert (await bench.ask()).choices[0].message.content == "Hello"
        (output,) = other.outputs.values()
    recording = await recording_of(bench)
    assert [segment.rid for segment in recording.segments] == [output.request.rid]
    assert tuple(recording.ids) == HELLO


async def test_case_02_engines_that_only_answer_without_ids_make_the_attempt_void(start_bench):
    bench = await start_bench(engine_class=Mute)
    with pytest.raises(openai.InternalServerError, match="output_ids"):
        await bench.ask()
    session = await bench.recorded()
    assert (session.turns[0].choices[0].infra, session.trainable()) == (True, set())


@each_way
@pytest.mark.parametrize("spoken", CALLING, ids=str)
@pytest.mark.parametrize("text", [CALL, f"<think>\nHm.\n</think>\n\nSo: {CALL}\n{CALL}", "<think>Hm", "plain"])
async def test_case_01_54_the_count_that_is_told_is_that_of_the_recorded_tokens(start_bench, spoken, text, stream):
    bench = await start_bench(Play(toy_ids(text), chunk=3), **THINK)
    await bench.client()
    options = {"stream_options": {"include_usage": True}} if stream and spoken is CHAT else {}
    call = Call(bench, spoken, spoken.body(stream=stream, tools=list(spoken.tools), **options))
    await call.task
    assert "tool_call" not in spoken.said(call.data)
    assert tuple((await recording_of(bench)).ids) == toy_ids(text)
    assert spoken.tokens(call.data) == len(toy_ids(text))


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_case_01_tokens_of_a_tool_call_that_the_parser_hides_are_all_recorded(start_bench, add_tool, chunk):
    bench = await start_bench(Play(toy_ids(CALL), chunk=chunk))
    chunks = await bench.read(await bench.ask(stream=True, tools=[add_tool], stream_options={"include_usage": True}))
    session = await bench.recorded()
    assert tuple(session.turns[0].choices[0].recording.ids) == toy_ids(CALL)
    assert chunks[-1].usage.completion_tokens == len(toy_ids(CALL))
    assert "tool_call" not in text_of(chunks)


@pytest.mark.parametrize("kind", ["abort", "abort_bare", "duplicate_last"])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_case_04_06_an_aborted_segment_neither_loses_nor_repeats_a_token(start_bench, kind, after):
    whole = HELLO
    bench = await start_bench(Play(whole, fault=Fault(kind, after)), Play(whole[after:]))
    answer = await bench.ask()
    session = await bench.recorded()
    assert tuple(session.turns[0].choices[0].recording.ids) == whole
    assert answer.choices[0].message.content == "Hello"
    assert list(bench.engine.requests[1].ids) == list(bench.engine.requests[0].ids) + list(whole[:after])


@pytest.mark.parametrize("kind", ["extra_logprobs", "sentinel", "nan"])
async def test_case_08_39_a_chunk_with_broken_logprobs_is_never_recorded_and_the_agent_does_not_notice(
    start_bench, kind
):
    whole = HELLO
    bench = await start_bench(Play(whole, fault=Fault(kind, 2)), Play(whole[2:]))
    answer = await bench.ask()
    recording = (await bench.recorded()).turns[0].choices[0].recording
    assert answer.choices[0].message.content == "Hello"
    assert tuple(recording.ids) == whole
    assert len(recording.logprobs) == len(whole)
    assert all(-100 < value <= 0 for value in recording.logprobs)


async def test_case_08_an_engine_that_only_sends_broken_chunks_fails_the_turn_as_infrastructure(start_bench):
    bench = await start_bench(*[Play(toy_ids("Hello"), fault=Fault("extra_logprobs", 0)) for _ in range(5)])
    with pytest.raises(openai.InternalServerError) as failure:
        await bench.ask()
    assert failure.value.response.headers["x-should-retry"] == "false"
    assert (await bench.turns())[0]["status"] == "failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_case_26_a_character_split_over_tokens_reaches_the_agent_whole(start_bench, stream):
    bench = await start_bench(Play(toy_ids("a\N{GRINNING FACE}b")))
    answer = await bench.ask(stream=stream)
    if stream:
        deltas = [c.choices[0].delta.content for c in await bench.read(answer)]
        assert "".join(delta or "" for delta in deltas) == "a\N{GRINNING FACE}b"
        assert not any("\N{REPLACEMENT CHARACTER}" in (delta or "") for delta in deltas)
    else:
        assert answer.choices[0].message.content == "a\N{GRINNING FACE}b"


async def test_case_26_65_a_cut_within_a_character_does_not_harm_it(start_bench):
    whole = toy_ids("\N{GRINNING FACE}")
    bench = await start_bench(Play(whole, fault=Fault("abort", 1)), Play(whole[1:]))
    assert (await bench.ask()).choices[0].message.content == "\N{GRINNING FACE}"


async def test_case_26_an_answer_that_ends_within_a_character_shows_one_replacement_and_keeps_its_ids(start_bench):
    bench = await start_bench(Play(toy_ids("ok\N{GRINNING FACE}")))
    answer = await bench.ask(max_tokens=5)
    assert answer.choices[0].message.content == "ok\N{REPLACEMENT CHARACTER}"
    assert answer.choices[0].finish_reason == "length"
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == toy_ids("ok\N{GRINNING FACE}")[:5]


async def test_case_30_a_prompt_that_does_not_fit_is_told_in_openai_s_words_and_is_no_turn(start_bench):
    bench = await start_bench(model={"max_context": 50})
    with pytest.raises(openai.BadRequestError) as failure:
        await bench.ask(messages=[{"role": "user", "content": "x" * 50}])
    assert failure.value.code == "context_length_exceeded"
    assert failure.value.param == "messages"
    assert failure.value.type == "invalid_request_error"
    assert await bench.turns() == []


async def test_case_30_an_engine_that_finds_the_prompt_too_long_is_translated(start_bench):
    bench = await start_bench(route=False)
    async with ScriptedEngine(vocab_size=259, max_context=8) as small:
        await bench.proxy.open_route(small.url)
        with pytest.raises(openai.BadRequestError) as failure:
            await bench.ask()
    assert failure.value.code == "context_length_exceeded"


async def test_case_43_versions_are_per_token_when_weights_change_under_a_generation(start_bench, until):
    bench = await start_bench(Play(toy_ids("abcdef"), fault=Fault("stall", 3)))
    asking = asyncio.create_task(bench.ask())
    await until(lambda: any(len(o.ids) == 3 for o in bench.engine.outputs.values()), "three tokens")
    bench.engine.version = "1"
    await bench.engine.release()
    await asking
    assert (await bench.turns())[0]["versions"] == [[0, 3], [1, 4]]


async def test_case_43_a_span_list_that_contradicts_the_labels_makes_the_tokens_context_only(start_bench):
    bench = await start_bench(Play(toy_ids("abcdef"), versions=("3",) * 7))
    await bench.ask()
    assert (await bench.turns())[0]["versions"] == [[-1, 7]]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_59_special_tokens_are_recorded_but_not_shown(start_bench, stream):
    ids = (*toy_ids("a", end=False), 0, 1, *toy_ids("b"))
    bench = await start_bench(Play(ids))
    answer = await bench.ask(stream=stream)
    text = text_of(await bench.read(answer)) if stream else answer.choices[0].message.content
    assert text == "ab"
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == ids


async def test_case_68_an_empty_generation_is_no_parent_of_its_repetition(start_bench):
    bench = await start_bench(Play((), finish="stop"), Play(toy_ids("x")))
    client = await bench.client()
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    first = await client.chat.completions.create(**request)
    assert first.choices[0].message.content == ""
    await client.chat.completions.create(**request)
    session = await bench.recorded()
    assert [turn.outcome.value for turn in session.turns] == ["root", "root"]
    assert session.turns[0].choices[0].end == session.turns[0].prompt_end == session.turns[1].prompt_end


@pytest.mark.parametrize("stop", ["lo", "o W"])
@pytest.mark.parametrize("chunk", [1, 4])
async def test_case_47_a_stop_string_ends_the_answer_even_across_a_cut(start_bench, stop, chunk):
    whole = toy_ids("Hello World")
    bench = await start_bench(Play(whole, chunk=chunk, fault=Fault("abort", 4)), Play(whole[4:], chunk=chunk))
    answer = await bench.ask(stop=[stop])
    assert answer.choices[0].message.content == "Hello World".split(stop)[0]
    assert answer.choices[0].finish_reason == "stop"
    recorded = bytes(token - 3 for token in (await bench.recorded()).turns[0].choices[0].recording.ids).decode()
    assert recorded.endswith(stop)
    assert "Hello World".startswith(recorded)


async def test_case_35_a_special_token_within_an_answer_is_kept_and_compared_by_its_id(start_bench):
    ids = (*toy_ids("a", end=False), 1, 0, *toy_ids("b"))
    bench = await start_bench(Play(ids), Play(toy_ids("ok")))
    client = await bench.client()
    user = {"role": "user", "content": "hi"}
    first = await client.chat.completions.create(model="any", messages=[user])
    said = {"role": "assistant", "content": first.choices[0].message.content}
    assert said["content"] == "ab"
    await client.chat.completions.create(model="any", messages=[user, said, user])
    one, two = bench.engine.requests
    assert two.ids[: len(one.ids) + len(ids)] == (*one.ids, *ids)


async def test_case_36_the_engine_s_ids_say_how_long_an_answer_is(start_bench):
    """It wrote one word in two tokens, which a tokenizer would write in one."""
    json, p = 261, 3 + ord("p")
    bench = await start_bench(Play((json, p, json, p, 2)), merges=("jsonp",))
    answer = await bench.ask(max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("jsonpjson", "length")
    assert answer.usage.completion_tokens == 3
    assert (await recording_of(bench)).ids == [json, p, json]


async def ask_twice(bench, text):
    """A first turn and one that goes on from it."""
    client = await bench.client()
    user = {"role": "user", "content": "hi"}
    first = await client.chat.completions.create(model="any", messages=[user], tools=[CHAT.tools[0]])
    said = first.choices[0].message.model_dump(exclude_none=True)
    assert text in str(said)
    await client.chat.completions.create(model="any", messages=[user, said, user], tools=[CHAT.tools[0]])
    return [turn["outcome"] for turn in await bench.turns()]


@pytest.mark.parametrize(("history", "second"), [("keep", "extend"), ("template", "fork")])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((261, 3 + ord("p"), 2), "jsonp"),
        (toy_ids(CALL.replace('{"a": 7, "b": 41}', '{"a":7,"b":41}')), '{"a":7,"b":41}'),
        ((*toy_ids("no", end=False), 0, *toy_ids(" text")), "no text"),
    ],
    ids=["tokens joined otherwise", "arguments written otherwise", "a token without text"],
)
async def test_case_34_40_the_same_text_in_other_ids_is_another_path(start_bench, history, second, answer, text):
    """Kept history never renders an answer again; the template's does, and forks by the ids."""
    bench = await start_bench(Play(answer), Play((2,)), merges=("jsonp",), model={"history": history})
    assert await ask_twice(bench, text) == ["root", second]
    first, following = bench.engine.requests
    recorded = (*first.ids, *answer)
    assert (following.ids[: len(recorded)] == recorded) == (history == "keep")


async def test_case_34_a_prompt_of_equal_text_and_other_ids_extends_nothing(start_bench):
    json, p, whole = 261, 3 + ord("p"), 262
    bench = await start_bench(Play((json, p)), Play((2,)), Play((2,)), merges=("jsonp",))
    client = await bench.client()
    await client.completions.create(model="any", prompt="x", max_tokens=2)
    await client.completions.create(model="any", prompt="xjsonp!", max_tokens=2)
    await client.completions.create(model="any", prompt=[3 + ord("x"), json, p, 3 + ord("!")], max_tokens=2)
    assert whole in bench.engine.requests[1].ids
    assert [turn["outcome"] for turn in await bench.turns()] == ["root", "root", "extend"]


async def test_case_41_each_choice_has_the_versions_of_its_own_tokens(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 3)), Play(HELLO, fault=Fault("stall", 0)))
    asking = asyncio.create_task(bench.ask(n=2))
    await until(lambda: [len(o.ids) for o in bench.engine.outputs.values()] == [3, 0], "they stand at different tokens")
    bench.engine.version = "1"
    await bench.engine.release()
    await asking
    assert [choice["versions"] for choice in (await bench.turns())[0]["choices"]] == [[[0, 3], [1, 3]], [[1, 6]]]


class Terse(ScriptedEngine):
    """Its last event says one version for the whole request."""

    def _event(self, *arguments):
        item = super()._event(*arguments)
        item["meta_info"].pop("weight_versions", None)
        return item


@pytest.mark.parametrize(("served", "versions"), [("0", [[0, 6]]), ("1", [[-1, 6]])])
async def test_case_43_one_label_for_a_whole_request_proves_only_the_version_it_began_with(
    start_bench, served, versions
):
    bench = await start_bench(Play(HELLO), engine_class=Terse, scripted={"weight_version": served})
    await bench.ask()
    assert (await bench.turns())[0]["versions"] == versions


@pytest.mark.parametrize("chunk", [1, 4, 100])
async def test_case_47_tokens_that_an_engine_wrote_past_the_stop_string_are_not_the_answer_s(start_bench, chunk):
    bench = await start_bench(Play(toy_ids("abSTOPcdef"), chunk=chunk))
    answer = await bench.ask(stop=["STOP"])
    assert answer.choices[0].message.content == "ab"
    ids = (await recording_of(bench)).ids
    assert bytes(token - 3 for token in ids) == b"abSTOP"
    assert answer.usage.completion_tokens == len(ids)
