"""The scripted engine plays what it is told, and the adapter turns each fault into the right error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import Chunk, Sampling, VersionSpan
from workers.engines.script import Fault, FaultKind, Play, load_script
from workers.engines.scripted import ScriptedEngine
from workers.engines.sglang import SglangEngine

RID = "a" * 32
PROMPT = [1, 2, 3]


@asynccontextmanager
async def playing(*plays: Play, **options: Any) -> AsyncIterator[tuple[ScriptedEngine, SglangEngine]]:
    async with ScriptedEngine(plays, **options) as scripted:
        engine = SglangEngine(scripted.url, vocab_size=64, deadline_s=5.0, stall_s=options.pop("stall_s", 5.0))
        try:
            yield scripted, engine
        finally:
            await engine.close()


async def collect(engine: SglangEngine, *, prompt: list[int] = PROMPT, rid: str = RID, tokens: int = 16) -> list[Chunk]:
    return [c async for c in engine.generate(prompt, Sampling(max_new_tokens=tokens), request_id=rid, salt="0")]


async def collect_into(got: list[int], engine: SglangEngine) -> None:
    async for chunk in engine.generate(PROMPT, Sampling(max_new_tokens=9), request_id=RID, salt=""):
        got += chunk.ids


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [i for chunk in chunks for i in chunk.ids]


async def test_ids_log_probs_and_versions_are_those_of_the_play() -> None:
    play = Play(ids=(7, 8, 9), logprobs=(-1.0, -2.0, -3.0), versions=("0", "0", "1"), chunk=2)
    async with playing(play) as (_, engine):
        chunks = await collect(engine)
    assert [chunk.ids for chunk in chunks] == [(7, 8), (9,)]
    assert [p for chunk in chunks for p in chunk.logprobs] == [-1.0, -2.0, -3.0]
    assert chunks[-1].spans == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3))
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.kind == "stop"


async def test_an_unscripted_answer_is_the_same_when_continued_from_any_cut() -> None:
    async with playing() as (_, engine):
        whole = ids_of(await collect(engine, tokens=8))
        for cut in range(1, 8):
            assert ids_of(await collect(engine, prompt=PROMPT + whole[:cut], tokens=8 - cut)) == whole[cut:]


@pytest.mark.parametrize("kind", ["abort", "abort_bare", "duplicate_last"])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_an_abort_in_any_form_keeps_exactly_the_tokens_before_it(kind: FaultKind, after: int) -> None:
    async with playing(Play(ids=(7, 8, 9, 10), fault=Fault(kind, after))) as (_, engine):
        chunks = await collect(engine)
    assert ids_of(chunks) == [7, 8, 9][:after]
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.kind == "abort"


@pytest.mark.parametrize("kind", ["extra_logprobs", "sentinel", "nan"])
async def test_a_bad_log_prob_is_refused_and_the_tokens_before_it_stand(kind: FaultKind) -> None:
    async with playing(Play(ids=(7, 8, 9, 10), fault=Fault(kind, 2))) as (_, engine):
        got: list[int] = []
        with pytest.raises(EngineProtocolError):
            await collect_into(got, engine)
    assert got == [7, 8]


@pytest.mark.parametrize("kind", ["death", "drop", "no_final"])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_stream_without_a_final_event_is_an_engine_that_went_away(kind: FaultKind, after: int) -> None:
    async with playing(Play(ids=(7, 8, 9), fault=Fault(kind, after))) as (_, engine):
        got: list[int] = []
        with pytest.raises(EngineUnavailable):
            await collect_into(got, engine)
    assert got == [7, 8][:after]


async def test_a_dead_engine_refuses_until_it_is_revived() -> None:
    async with playing() as (scripted, engine):
        await scripted.die()
        with pytest.raises(EngineUnavailable):
            await collect(engine)
        scripted.revive()
        assert len(ids_of(await collect(engine, tokens=4))) == 4


async def test_a_stalled_stream_ends_at_the_adapters_deadline() -> None:
    async with ScriptedEngine([Play(ids=(7, 8, 9), fault=Fault("stall", 1))]) as scripted:
        engine = SglangEngine(scripted.url, stall_s=0.1)
        with pytest.raises(EngineUnavailable, match="stalled"):
            await collect(engine)
        await engine.close()


async def test_a_stalled_request_goes_on_when_released() -> None:
    async with playing(Play(ids=(7, 8, 9), fault=Fault("stall", 1))) as (scripted, engine):
        stream = engine.generate(PROMPT, Sampling(max_new_tokens=9), request_id=RID, salt="")
        assert (await anext(stream)).ids == (7,)
        await scripted.release(RID)
        assert [token async for chunk in stream for token in chunk.ids] == [8, 9]


async def test_abort_matches_request_ids_by_prefix_as_sglang_does() -> None:
    plays = [Play(ids=(7, 8), fault=Fault("stall", 1)) for _ in range(2)]
    async with playing(*plays) as (scripted, engine):
        streams = [
            engine.generate(PROMPT, Sampling(max_new_tokens=9), request_id=rid, salt="") for rid in ("p-1", "p-10")
        ]
        for stream in streams:
            await anext(stream)
        await engine.abort("p-1")
        last = [[chunk async for chunk in stream][-1] for stream in streams]
    assert [chunk.finish.kind for chunk in last if chunk.finish] == ["abort", "abort"]
    assert all(output.aborted for output in scripted.outputs.values())


async def test_a_client_that_goes_away_ends_its_request() -> None:
    async with playing(Play(ids=(7, 8), fault=Fault("stall", 1))) as (scripted, engine):
        stream = engine.generate(PROMPT, Sampling(max_new_tokens=9), request_id=RID, salt="")
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(5):
            while scripted.loads()["loads"][0]["num_running_reqs"]:  # noqa: ASYNC110 - the server tells no one
                await asyncio.sleep(0.01)


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    async with ScriptedEngine() as scripted:
        url = scripted.url
    engine = SglangEngine(url, deadline_s=2.0)
    assert not await engine.ready()
    with pytest.raises(EngineUnavailable):
        await collect(engine)
    await engine.close()


async def test_a_strict_engine_refuses_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header")
    async with playing(strict_loads=True) as (scripted, engine):
        with pytest.raises(EngineRejected, match="safetensors"):
            await engine.load_weights(str(tmp_path), 1)
        assert scripted.version == "0"


def test_a_script_file_is_read_with_its_faults(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    play = {"ids": [1, 2], "fault": {"kind": "death", "after": 1}, "chunk": 2}
    file.write_text(json.dumps({"vocab_size": 9, "plays": [play], "loads": {"3": "hang"}}))
    plays = (Play(ids=(1, 2), chunk=2, fault=Fault("death", 1)),)
    assert load_script(file) == {"vocab_size": 9, "plays": plays, "loads": {"3": "hang"}}


def test_a_script_with_an_unknown_fault_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"plays": [{"ids": [1], "fault": {"kind": "gremlin"}}]}))
    with pytest.raises(ConfigError, match="gremlin"):
        load_script(file)
