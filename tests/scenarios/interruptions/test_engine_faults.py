"""An engine fails before, within and after a generation: nothing is lost, repeated or made up."""

from __future__ import annotations

import asyncio

import openai
import pytest
from interruptions import assert_as_logged, busy, sent

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play
from workers.engines.scripted import ScriptedEngine

TEXT = "Hello, w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld \N{GRINNING FACE}!"
WHOLE = toy_ids(TEXT)
EXTRA = (5,)
"""Behind the end of turn, so that a fault can strike between that token and the engine's word that it ended there."""
MOMENTS = {"before": 0, "within a character": 16, "after": len(WHOLE)}
assert b"\xf0\x9f\x98\x80" in bytes(token - 3 for token in WHOLE[:-1])


async def said(answer, bench, *, stream):
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in await bench.read(answer))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["stall", "drop", "death", "no_final"])
async def test_a_generation_goes_on_elsewhere_from_its_last_token(start_bench, kind, moment, stream):
    after = MOMENTS[moment]
    bench = await start_bench(Play((*WHOLE, *EXTRA), fault=Fault(kind, after)), stall_s=0.3)
    async with ScriptedEngine([Play(WHOLE[after:])], vocab_size=259) as other:
        await bench.route("open", lease="lease-b", engine=other)
        answer = await bench.ask(stream=stream)
        assert await said(answer, bench, stream=stream) == TEXT
        choice = (await bench.recorded()).turns[0].choices[0]
        assert tuple(choice.recording.ids) == WHOLE
        assert choice.status == "finished"
        assert_as_logged(choice, bench.engine, other)
        # Nobody is asked for what is there already.
        assert [len(other.requests), len(bench.engine.requests)] == [moment != "after", 1]
        assert not busy(bench.proxy)


async def test_an_engine_that_comes_back_goes_on_with_what_it_had_begun(start_bench, until):
    bench = await start_bench(Play(WHOLE, fault=Fault("death", 5)), Play(WHOLE[5:]))
    asking = asyncio.create_task(bench.ask())
    await until(lambda: bench.engine.dead, "the engine is dead")
    bench.engine.revive()
    assert (await asking).choices[0].message.content == TEXT
    assert len(bench.engine.requests) == 2


async def test_an_engine_that_never_comes_back_fails_the_turn_by_name_within_the_limit(start_bench):
    bench = await start_bench(Play(WHOLE, fault=Fault("death", 5)), pipeline={"hold_limit_s": 0.5})
    with pytest.raises(openai.InternalServerError, match="hold_limit_s") as failure:
        await bench.ask()
    assert failure.value.response.headers["x-should-retry"] == "false"
    choice = (await bench.recorded()).turns[0].choices[0]
    assert (choice.status, choice.infra, len(choice.recording.ids)) == ("failed", True, 5)
    assert not busy(bench.proxy)


async def test_a_stream_that_fails_within_says_so_in_an_event(start_bench):
    bench = await start_bench(Play(WHOLE, fault=Fault("death", 5)), pipeline={"hold_limit_s": 0.5})
    stream = await bench.ask(stream=True)
    with pytest.raises(openai.APIError, match="hold_limit_s"):
        await bench.read(stream)


async def test_closing_the_route_of_a_silent_engine_drops_its_connection(start_bench, until, monkeypatch):
    """The engine does not even answer the abort."""
    monkeypatch.setattr("proxy.upstream.DRAIN_S", 0.1)
    bench = await start_bench(Play(WHOLE, fault=Fault("stall", 5)))

    async def deaf(rid):
        await asyncio.sleep(60)

    bench.engine.abort = deaf
    asking = asyncio.create_task(bench.ask())
    await until(sent(bench.engine, 5), "five tokens")
    async with ScriptedEngine([Play(WHOLE[5:])], vocab_size=259) as other:
        await bench.route("open", lease="lease-b", engine=other)
        await bench.route("closed")
        assert (await asking).choices[0].message.content == TEXT
        await until(lambda: not bench.engine._live, "the dropped connection ended the request")
    del bench.engine.abort
