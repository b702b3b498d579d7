"""SGLang's native wire as our own engines speak it, beyond what the contract asks of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from storage.errors import EngineRejected
from storage.weights import folder_digest
from tests.contract.engines.driver import Checkpoints
from workers.engines.base import FEATURES, Chunk, PauseMode, Sampling
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import Settings
from workers.engines.scripted import ScriptedEngine
from workers.engines.server import Server
from workers.engines.sglang import GATHER_S, SglangEngine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 400


@asynccontextmanager
async def _embedded(checkpoints: Checkpoints) -> AsyncIterator[str]:
    engine = await EmbeddedEngine.start(Settings(checkpoints.first))
    server = Server(engine)
    yield await server.start()
    await server.stop()
    await engine.stop()


@asynccontextmanager
async def _scripted(checkpoints: Checkpoints) -> AsyncIterator[str]:
    engine = ScriptedEngine(
        vocab_size=checkpoints.vocab_size,
        max_context=checkpoints.max_context,
        model_path=str(checkpoints.first),
        delay_s=0.0005,
        strict_loads=True,
    )
    async with engine:
        yield engine.url


SERVERS = {"embedded": _embedded, "scripted": _scripted}


@pytest.fixture(params=sorted(SERVERS))
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of engine under test."""
    return str(request.param)


@pytest.fixture
async def engine(kind: str, checkpoints: Checkpoints) -> AsyncIterator[SglangEngine]:
    """Each engine in turn, through the adapter; the adapter checks no ids, so that the engine must."""
    async with SERVERS[kind](checkpoints) as url:
        adapter = SglangEngine(url, deadline_s=20.0, stall_s=20.0)
        yield adapter
        await adapter.close()


def rid(n: int) -> str:
    return f"{n:032d}"


@dataclass
class Generation:
    """A running request and what it has given so far."""

    chunks: list[Chunk] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def ids(self) -> list[int]:
        return [i for chunk in self.chunks for i in chunk.ids]

    @property
    def finish(self) -> str | None:
        last = self.chunks[-1].finish
        return last.kind if last is not None else None

    @property
    def versions(self) -> list[int | None]:
        return [span.version for span in self.chunks[-1].spans or () for _ in range(span.start, span.end)]

    async def end(self) -> Generation:
        assert self.task is not None
        await asyncio.wait_for(self.task, 30)
        return self


def generate(
    engine: SglangEngine, n: int = 0, *, tokens: int = 8, prompt: list[int] | None = None, **options: Any
) -> Generation:
    generation = Generation()
    sampling = Sampling(max_new_tokens=tokens, seed=options.pop("seed", 1), **options)

    async def read() -> None:
        async for chunk in engine.generate(prompt or PROMPT, sampling, request_id=rid(n), salt="0"):
            generation.chunks.append(chunk)
            if chunk.ids:
                generation.begun.set()

    generation.task = asyncio.create_task(read())
    return generation


async def running(engine: SglangEngine, n: int = 0) -> Generation:
    """A long request that has given its first tokens."""
    generation = generate(engine, n, tokens=LONG)
    await asyncio.wait_for(generation.begun.wait(), 20)
    return generation


async def post(engine: SglangEngine, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/{path}", json=body) as response:
        return response.status, await response.read()


async def get(engine: SglangEngine, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/{path}") as response:
        return response.status, await response.read()


async def calm(engine: SglangEngine) -> None:
    """Returns when what a paused engine has made is read: the adapter lets its socket rest for a moment."""
    await engine.stats()
    await asyncio.sleep(10 * GATHER_S)


async def idle(engine: SglangEngine) -> None:
    """Returns when the engine has no request left."""
    async with asyncio.timeout(20):
        while (stats := await engine.stats()).running or stats.waiting:  # noqa: ASYNC110 - the engine tells no one
            await asyncio.sleep(0.01)


async def test_a_generation_gives_its_tokens_with_log_probs_and_versions(engine: SglangEngine) -> None:
    generation = await generate(engine).end()
    assert len(generation.ids) == 8
    assert generation.finish == "length"
    assert generation.versions == [0] * 8
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in generation.chunks)
    assert all(chunk.finish is None for chunk in generation.chunks[:-1])


async def test_a_stop_id_ends_a_generation_and_is_part_of_it(engine: SglangEngine) -> None:
    free = await generate(engine, 0).end()
    stop = free.ids[3]
    stopped = await generate(engine, 1, stop_token_ids=(stop,)).end()
    finish = stopped.chunks[-1].finish
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert finish is not None
    assert (finish.kind, finish.matched) == ("stop", stop)


async def test_a_cut_generation_continues_as_if_never_cut(engine: SglangEngine) -> None:
    assert engine.continuable(Sampling(max_new_tokens=8, seed=1))
    whole = (await generate(engine, 0).end()).ids
    rest = (await generate(engine, 1, prompt=PROMPT + whole[:3], tokens=5).end()).ids
    assert rest == whole[3:]


async def test_thirty_two_requests_at_once_each_get_their_own_answer(engine: SglangEngine) -> None:
    prompts = [[n, *PROMPT[: n % 8]] for n in range(32)]
    alone = [(await generate(engine, n, prompt=prompts[n]).end()).ids for n in range(4)]
    generations = [generate(engine, n, prompt=prompts[n]) for n in range(32)]
    answers = [(await generation.end()).ids for generation in generations]
    assert [len(ids) for ids in answers] == [8] * 32
    assert answers[:4] == alone


async def test_an_aborted_request_gives_what_it_has_and_leaves_others_alone(engine: SglangEngine) -> None:
    first, second = await running(engine, 0), await running(engine, 1)
    await engine.abort(rid(0))
    await first.end()
    assert first.finish == "abort"
    assert 0 < len(first.ids) < LONG
    assert len(first.versions) == len(first.ids)
    assert (await second.end()).finish == "length"


async def test_aborting_all_ends_all_and_the_engine_serves_on(engine: SglangEngine) -> None:
    generations = [await running(engine, n) for n in range(3)]
    await engine.abort(None)
    assert [(await generation.end()).finish for generation in generations] == ["abort"] * 3
    assert len((await generate(engine, 9).end()).ids) == 8


async def test_aborting_an_unknown_request_is_harmless(engine: SglangEngine) -> None:
    await engine.abort(rid(99))
    assert len((await generate(engine).end()).ids) == 8


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_stops_generation_and_loses_nothing(engine: SglangEngine, mode: PauseMode) -> None:
    undisturbed = await generate(engine, 0, tokens=LONG).end()
    generation = await running(engine, 1)
    await engine.pause(mode)
    await engine.pause(mode)
    assert await engine.ready()
    assert (await get(engine, "ready"))[0] == 503
    late = generate(engine, 2)
    await calm(engine)
    stopped_at = len(generation.ids)
    await calm(engine)
    assert len(generation.ids) == stopped_at < LONG
    assert not late.chunks
    await engine.resume()
    await engine.resume()
    assert (await get(engine, "ready"))[0] == 200
    assert (await generation.end()).ids == undisturbed.ids
    assert len((await late.end()).ids) == 8


async def test_a_pause_with_abort_ends_running_requests_and_holds_new_ones(engine: SglangEngine) -> None:
    generation = await running(engine, 0)
    await engine.pause("abort")
    assert (await generation.end()).finish == "abort"
    late = generate(engine, 1)
    await engine.stats()
    assert not late.chunks
    await engine.resume()
    assert len((await late.end()).ids) == 8


async def test_a_request_can_be_aborted_while_the_engine_is_paused(engine: SglangEngine) -> None:
    generation = await running(engine, 0)
    await engine.pause("in_place")
    await engine.abort(rid(0))
    assert (await generation.end()).finish == "abort"
    await engine.resume()


@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
async def test_weights_change_under_a_running_request_and_each_token_knows_its_version(
    engine: SglangEngine, mode: PauseMode | None, checkpoints: Any
) -> None:
    generation = await running(engine)
    if mode is not None:
        await engine.pause(mode)
    loaded = await engine.load_weights(str(checkpoints.second), 1)
    assert (loaded.version, loaded.checksum) == (1, folder_digest(checkpoints.second))
    info = await engine.info()
    assert (info.model_path, info.weight_version) == (str(checkpoints.second), 1)
    await engine.resume()
    await generation.end()
    assert len(generation.ids) == LONG
    assert generation.versions == sorted(generation.versions)
    if mode is not None:  # unpaused, the request may have ended before the weights were read
        assert set(generation.versions) == {0, 1}
    assert (await generate(engine, 1).end()).versions == [1] * 8


async def test_a_checkpoint_that_is_broken_or_missing_is_refused_and_the_old_weights_stay(
    engine: SglangEngine, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(EngineRejected, match=str(path)):
            await engine.load_weights(str(path), 1)
    assert (await engine.info()).weight_version == 0
    assert (await generate(engine).end()).versions == [0] * 8


async def test_bad_input_is_refused_and_the_engine_lives(engine: SglangEngine, checkpoints: Any) -> None:
    for prompt, tokens, cause in (
        ([checkpoints.vocab_size], 8, "vocabulary"),
        ([-1], 8, "vocabulary"),
        ([1] * checkpoints.max_context, 1, "context"),
    ):
        with pytest.raises(EngineRejected, match=cause):
            await generate(engine, prompt=prompt, tokens=tokens).end()
    assert len((await generate(engine).end()).ids) == 8


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"tempreature": 1}, "tempreature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "a lot"}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_new_tokens": 2}, "min_new_tokens"),
        ({"json_schema": "no schema"}, "json_schema"),
        ({"json_schema": {}}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"logit_bias": {"64": 1}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
async def test_a_sampling_parameter_that_is_wrong_or_unsupported_is_refused_by_name(
    engine: SglangEngine, parameters: dict[str, Any], named: str
) -> None:
    status, body = await post(engine, "generate", {"input_ids": PROMPT, "sampling_params": parameters})
    assert status == 400
    assert named in orjson.loads(body)["error"]["message"]


FEATURE_EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("grammar", {"sampling_params": {"json_schema": '{"type": "object"}'}}),
    ("penalties", {"sampling_params": {"frequency_penalty": 0.5}}),
    ("penalties", {"sampling_params": {"presence_penalty": -0.5}}),
    ("logit_bias", {"sampling_params": {"logit_bias": {"5": 1.5}}}),
    ("top_logprobs", {"top_logprobs_num": 2}),
]


@pytest.mark.parametrize(("feature", "asked"), FEATURE_EXAMPLES)
async def test_an_engine_takes_the_features_that_it_is_said_to_have_and_refuses_the_others_by_name(
    engine: SglangEngine, kind: str, feature: str, asked: dict[str, Any]
) -> None:
    status, body = await post(engine, "generate", {"input_ids": PROMPT, **asked})
    name = next(iter(asked.get("sampling_params", asked)))
    assert status == (200 if feature in FEATURES[kind] else 400)
    assert (name in str(orjson.loads(body).get("error", ""))) == (status == 400)


def test_every_feature_has_an_example() -> None:
    assert {feature for feature, _ in FEATURE_EXAMPLES} == frozenset().union(*FEATURES.values())


@pytest.mark.parametrize("wanted", [1, 5])
async def test_the_likeliest_tokens_come_with_each_token_in_every_chunk(engine: SglangEngine, wanted: int) -> None:
    generation = await generate(engine, tokens=30, top_logprobs=wanted).end()
    assert len(generation.ids) == 30
    for chunk in generation.chunks:
        assert len(chunk.tops) == len(chunk.ids)
        for token, logprob, top in zip(chunk.ids, chunk.logprobs, chunk.tops, strict=True):
            assert len({token for token, _ in top}) == wanted
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True)
            assert values[0] >= logprob
            assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-6)


@pytest.mark.parametrize("body", [{}, {"input_ids": []}, {"input_ids": ["a"]}, {"text": "hello"}, {"input_ids": [[1]]}])
async def test_a_request_without_one_list_of_ids_is_refused(engine: SglangEngine, body: dict[str, Any]) -> None:
    status, answer = await post(engine, "generate", body)
    assert (status, b"input_ids" in answer) == (400, True)


async def test_a_request_id_that_is_live_is_refused(engine: SglangEngine) -> None:
    generation = await running(engine, 0)
    with pytest.raises(EngineRejected, match="Duplicate"):
        await generate(engine, 0).end()
    assert (await generation.end()).finish == "length"


async def test_a_client_that_goes_away_aborts_its_request(engine: SglangEngine) -> None:
    stream = engine.generate(PROMPT, Sampling(max_new_tokens=LONG), request_id=rid(0), salt="0")
    await anext(stream)
    await engine.pause("in_place")  # so that the request cannot just end
    await stream.aclose()
    await idle(engine)
    await engine.resume()


async def test_memory_is_released_when_idle_only_and_requests_wait_for_it(engine: SglangEngine) -> None:
    generation = await running(engine, 0)
    with pytest.raises(EngineRejected):
        await engine.release_memory()
    await engine.abort(None)
    await generation.end()
    await engine.release_memory()
    assert await engine.ready()
    late = generate(engine, 1)
    await engine.stats()
    assert not late.chunks
    await engine.resume_memory()
    assert len((await late.end()).ids) == 8


async def test_the_cache_is_flushed_when_idle_only(engine: SglangEngine) -> None:
    generation = await running(engine, 0)
    with pytest.raises(EngineRejected):
        await engine.flush_cache()
    await engine.abort(None)
    await generation.end()
    await idle(engine)
    await engine.flush_cache()


async def test_load_counts_requests_that_run_and_wait(engine: SglangEngine) -> None:
    await idle(engine)
    generations = [await running(engine, n) for n in range(2)]
    await engine.pause("retract")
    stats = await engine.stats()
    assert stats.running + stats.waiting == 2
    await engine.abort(None)
    await engine.resume()
    for generation in generations:
        await generation.end()


async def test_without_stream_the_answer_is_one_object_with_all_tokens(engine: SglangEngine) -> None:
    streamed = await generate(engine, 0).end()
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 8, "sampling_seed": 1}}
    status, raw = await post(engine, "generate", body)
    answer = orjson.loads(raw)
    assert status == 200
    assert answer["output_ids"] == streamed.ids
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == streamed.ids
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]


async def test_a_stream_is_sse_with_cumulative_counts_and_a_done_mark(engine: SglangEngine) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 8}}
    status, raw = await post(engine, "generate", body)
    *events, done, rest = raw.split(b"\n\n")
    counts = [orjson.loads(event.removeprefix(b"data: "))["meta_info"]["completion_tokens"] for event in events]
    assert (status, done, rest) == (200, b"data: [DONE]", b"")
    assert counts == sorted(counts)
    assert counts[-1] == 8


@pytest.mark.parametrize("path", ["health", "ready", "model_info", "get_model_info", "server_info", "v1/loads"])
async def test_information_is_served(engine: SglangEngine, path: str) -> None:
    assert (await get(engine, path))[0] == 200


async def test_an_unknown_pause_mode_is_refused(engine: SglangEngine) -> None:
    status, body = await post(engine, "pause_generation", {"mode": "gently"})
    assert (status, b"gently" in body) == (400, True)
