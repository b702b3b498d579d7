"""What the embedded engine promises: right log-probs, honoured seeds, shared prefixes, exact versions, nothing lost."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from storage.errors import EngineRejected
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import Settings
from workers.engines.server import LoadRequest
from workers.engines.wire import GenerateRequest

MakeModel = Callable[..., Path]
Reference = Callable[..., list[float]]
Distributions = Callable[..., list[list[float]]]


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """Version label of the event that brought each token."""
    meta: dict[str, Any] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        self.ids += event["output_ids"]
        self.meta = event["meta_info"]
        self.logprobs += [entry[0] for entry in self.meta["output_token_logprobs"]]
        self.tops += self.meta.get("output_top_logprobs", [])
        self.labels += [self.meta["weight_version"]] * len(event["output_ids"])

    @property
    def finish(self) -> str:
        return str(self.meta["finish_reason"]["type"])

    @property
    def versions(self) -> list[str]:
        spans = self.meta["weight_versions"]
        return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


@asynccontextmanager
async def serving(path: Path, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = await EmbeddedEngine.start(Settings(path, **{"max_running": 32, "kv_tokens": 8192, **settings}))
    try:
        yield engine
    finally:
        await engine.stop()


def request(rid: str, ids: list[int], tokens: int = 8, **options: Any) -> GenerateRequest:
    return GenerateRequest(rid=rid, ids=tuple(ids), max_new_tokens=tokens, logprobs=True, **options)


async def ask(engine: EmbeddedEngine, what: GenerateRequest) -> Answer:
    answer = Answer()
    async for event in engine.generate(what):
        answer.add(event)
    return answer


async def started(engine: EmbeddedEngine, what: GenerateRequest, tokens: int) -> tuple[Answer, asyncio.Task[None]]:
    """A running request that has given at least ``tokens`` tokens."""
    answer, enough = Answer(), asyncio.Event()

    async def read() -> None:
        async for event in engine.generate(what):
            answer.add(event)
            if len(answer.ids) >= tokens:
                enough.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(enough.wait(), 20)
    return answer, task


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 5 * i * i + 3 * i) % 64 for i in range(length)]


@pytest.mark.parametrize("model", ["llama", "llama-tied-bias-rope3", "qwen2", "qwen3"])
async def test_log_probs_equal_a_plain_forward_pass_in_ragged_batches(
    model: str, make_model: MakeModel, reference: Reference
) -> None:
    path = make_model(model)
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 2, 7, 30, 75, 30))]
    async with serving(path) as engine:
        answers = await asyncio.gather(
            *(ask(engine, request(f"r{i}", ids, tokens=4 + 5 * i, ignore_eos=True)) for i, ids in enumerate(prompts))
        )
    for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.ids) == 4 + 5 * i
        assert answer.logprobs == pytest.approx(reference(path, ids, answer.ids), abs=1e-4)


async def test_log_probs_are_temperature_scaled_and_raw_when_greedy(
    make_model: MakeModel, reference: Reference
) -> None:
    path, ids = make_model("llama"), prompt(9)
    async with serving(path) as engine:
        warm, cold, greedy = await asyncio.gather(
            ask(engine, request("warm", ids, temperature=1.7)),
            ask(engine, request("cold", ids, temperature=0.6, top_p=0.9, top_k=20, min_p=0.01)),
            ask(engine, request("greedy", ids, temperature=0.0)),
        )
    assert warm.logprobs == pytest.approx(reference(path, ids, warm.ids, 1.7), abs=1e-4)
    assert cold.logprobs == pytest.approx(reference(path, ids, cold.ids, 0.6), abs=1e-4)
    assert greedy.logprobs == pytest.approx(reference(path, ids, greedy.ids), abs=1e-4)
    assert max(greedy.logprobs) <= 0


async def test_the_likeliest_tokens_equal_those_of_a_plain_forward_pass(
    make_model: MakeModel, distributions: Distributions
) -> None:
    path, ids, bias = make_model("qwen3"), prompt(9), {3: 2.5, 60: -4.0}
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"logit_bias": bias, "temperature": 1.3},
    ]
    async with serving(path) as engine:
        answers = await asyncio.gather(
            *(ask(engine, request(f"r{n}", ids, top_logprobs=4, **options)) for n, options in enumerate(asked))
        )
    for options, answer in zip(asked, answers, strict=True):
        assert len(answer.tops) == len(answer.ids) == 8
        plain = distributions(path, ids, answer.ids, options.get("temperature") or 1.0, options.get("logit_bias"))
        for top, logprobs, token, logprob in zip(answer.tops, plain, answer.ids, answer.logprobs, strict=True):
            assert logprob == pytest.approx(logprobs[token], abs=1e-4)
            assert [value for value, _, _ in top] == pytest.approx(sorted(logprobs, reverse=True)[:4], abs=1e-4)
            assert [value for value, _, _ in top] == pytest.approx([logprobs[at] for _, at, _ in top], abs=1e-4)


async def test_a_long_prompt_is_prefilled_in_portions_with_the_same_result(
    make_model: MakeModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("qwen3")
    monkeypatch.setattr("workers.engines.embedded.engine.PREFILL_TOKENS", 16)
    prompts = [prompt(n, seed) for seed, n in enumerate((100, 5, 17, 6, 90))]
    async with serving(path) as engine:
        answers = await asyncio.gather(*(ask(engine, request(f"r{i}", ids)) for i, ids in enumerate(prompts)))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs == pytest.approx(reference(path, ids, answer.ids), abs=1e-4)


async def test_a_prompt_shared_by_eight_samples_is_prefilled_once(make_model: MakeModel, reference: Reference) -> None:
    path, ids = make_model("qwen3"), prompt(40)
    async with serving(path) as engine:
        answers = await asyncio.gather(*(ask(engine, request(f"r{i}", ids, seed=i)) for i in range(8)))
        assert engine.server_info()["prefilled_tokens"] == len(ids) - 1
    assert len({tuple(answer.ids) for answer in answers}) > 1
    for answer in answers:
        assert answer.logprobs == pytest.approx(reference(path, ids, answer.ids), abs=1e-4)


async def test_a_second_turn_reuses_prompt_and_output_of_the_first(make_model: MakeModel, reference: Reference) -> None:
    path, first_ids, result = make_model("qwen3"), prompt(20), [1, 2, 3, 4]
    async with serving(path) as engine:
        first = await ask(engine, request("turn-1", first_ids))
        second_ids = first_ids + first.ids + result
        second = await ask(engine, request("turn-2", second_ids))
        # The first turn's prompt, and what the second added: the first turn's last token and the result.
        assert engine.server_info()["prefilled_tokens"] == (len(first_ids) - 1) + len(result)
    assert second.meta["cached_tokens"] == len(first_ids) + len(first.ids) - 1
    assert second.logprobs == pytest.approx(reference(path, second_ids, second.ids), abs=1e-4)


async def test_kv_is_never_shared_across_salts(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        await ask(engine, request("a", prompt(20), salt="one"))
        other = await ask(engine, request("b", prompt(20), salt="two"))
        same = await ask(engine, request("c", prompt(20), salt="one"))
    assert other.meta["cached_tokens"] == 0
    assert same.meta["cached_tokens"] == 19


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        alone = await ask(engine, request("alone", prompt(12), tokens=20, seed=7))
        crowd = await asyncio.gather(
            *(ask(engine, request(f"r{i}", prompt(3 + i, i), tokens=20)) for i in range(9)),
            ask(engine, request("again", prompt(12), tokens=20, seed=7)),
            ask(engine, request("other", prompt(12), tokens=20, seed=8)),
        )
    assert crowd[9].ids == alone.ids
    assert crowd[10].ids != alone.ids


async def test_a_seeded_generation_continues_from_any_cut_as_if_never_cut(make_model: MakeModel) -> None:
    async with serving(make_model("llama")) as engine:
        whole = await ask(engine, request("whole", prompt(6), tokens=12, seed=3))
        for cut in (1, 5, 11):
            rest = await ask(engine, request(f"cut-{cut}", prompt(6) + whole.ids[:cut], tokens=12 - cut, seed=3))
            assert rest.ids == whole.ids[cut:]


async def test_requests_without_a_seed_differ_and_the_engine_seed_fixes_them(make_model: MakeModel) -> None:
    async def run(seed: int) -> list[list[int]]:
        async with serving(make_model("llama"), seed=seed) as engine:
            return [(await ask(engine, request(f"r{i}", prompt(6), tokens=12))).ids for i in range(2)]

    first = await run(1)
    assert first[0] != first[1]
    assert await run(1) == first
    assert await run(2) != first


async def test_thirty_two_requests_run_together_and_more_wait_their_turn(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3"), max_running=16) as engine:
        requests = [request(f"r{i}", prompt(2 + i % 11, i), tokens=1 + i % 13, ignore_eos=True) for i in range(32)]
        answers = await asyncio.gather(*(ask(engine, what) for what in requests))
        loads = engine.loads()["loads"][0]
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"], loads["num_running_tokens"]) == (0, 0, 0)
    assert loads["num_generated_tokens"] == sum(1 + i % 13 for i in range(32))
    assert [len(answer.ids) for answer in answers] == [1 + i % 13 for i in range(32)]
    assert {answer.finish for answer in answers} == {"length"}


async def test_a_small_kv_cache_makes_requests_wait_but_loses_none(make_model: MakeModel, reference: Reference) -> None:
    path = make_model("llama")
    prompts = [prompt(20, i) for i in range(12)]
    async with serving(path, kv_tokens=100) as engine:
        answers = await asyncio.gather(*(ask(engine, request(f"r{i}", ids)) for i, ids in enumerate(prompts)))
        assert engine.server_info()["cached_tokens"] <= 100
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs == pytest.approx(reference(path, ids, answer.ids), abs=1e-4)


async def test_weights_change_between_two_tokens_and_every_token_knows_its_version(make_model: MakeModel) -> None:
    paths = [make_model("qwen3", seed) for seed in range(3)]
    async with serving(paths[0]) as engine:
        running = [
            await started(engine, request(f"r{i}", prompt(5, i), tokens=200, ignore_eos=True), tokens=1)
            for i in range(4)
        ]
        for version in range(1, 8):
            await engine.load(LoadRequest(str(paths[version % 3]), str(version), abort_all=False))
            assert engine.model_info()["weight_version"] == str(version)
        await asyncio.gather(*(task for _, task in running))
    for answer, _ in running:
        assert len(answer.ids) == 200
        assert answer.finish == "length"
        assert answer.versions == answer.labels
        assert answer.versions == sorted(answer.versions, key=int)


async def test_tokens_after_an_update_come_from_the_new_weights(make_model: MakeModel, reference: Reference) -> None:
    old, new, ids = make_model("qwen3", 0), make_model("qwen3", 1), prompt(6)
    async with serving(old) as engine:
        answer, task = await started(engine, request("r", ids, tokens=150, ignore_eos=True), tokens=1)
        await engine.pause("retract")
        await engine.load(LoadRequest(str(new), "1", abort_all=False))
        await engine.resume()
        await task
    cut = answer.versions.count("0")
    assert 0 < cut < 150
    assert answer.meta["num_retractions"] == 1
    assert answer.logprobs[:cut] == pytest.approx(reference(old, ids, answer.ids[:cut]), abs=1e-4)
    after = reference(new, ids + answer.ids[:cut], answer.ids[cut:])
    assert answer.logprobs[cut:] == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_engine_generates_nothing_and_resumes_as_if_never_paused(
    mode: Any, make_model: MakeModel
) -> None:
    async with serving(make_model("qwen3")) as engine:
        what = request("r", prompt(5), tokens=200, seed=1, ignore_eos=True)
        undisturbed = await ask(engine, what)
        answer, task = await started(engine, what, tokens=1)
        await engine.pause(mode)
        late = asyncio.create_task(ask(engine, request("late", prompt(4), seed=2)))
        before = len(answer.ids)
        await engine.abort("nobody")
        await asyncio.sleep(0)
        assert engine.server_info()["generated_tokens"] == 200 + before
        assert not engine.serving()
        await engine.resume()
        await task
        assert len((await late).ids) == 8
    assert answer.ids == undisturbed.ids


async def test_pausing_with_abort_gives_every_client_its_partial_answer_and_holds_new_ones(
    make_model: MakeModel,
) -> None:
    async with serving(make_model("qwen3")) as engine:
        answer, task = await started(engine, request("r", prompt(5), tokens=240, ignore_eos=True), tokens=3)
        await engine.pause("abort")
        await task
        assert answer.finish == "abort"
        assert 3 <= len(answer.ids) < 240
        assert len(answer.versions) == len(answer.ids)
        late = asyncio.create_task(ask(engine, request("late", prompt(4))))
        await asyncio.sleep(0)
        assert not late.done()
        await engine.resume()
        assert len((await late).ids) == 8


async def test_an_aborted_request_keeps_its_tokens_and_others_go_on(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        gone, gone_task = await started(engine, request("p-1", prompt(5), tokens=240, ignore_eos=True), tokens=2)
        stays, stays_task = await started(engine, request("p-10", prompt(6), tokens=240, ignore_eos=True), tokens=1)
        await engine.abort("p-1")
        await gone_task
        await stays_task
    assert gone.finish == "abort"
    assert len(gone.ids) >= 2
    assert stays.finish == "length"
    assert len(stays.ids) == 240


async def test_a_queued_request_can_be_aborted_while_paused(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        await engine.pause("in_place")
        task = asyncio.create_task(ask(engine, request("r", prompt(5))))
        while not engine.loads()["loads"][0]["num_waiting_reqs"]:  # noqa: ASYNC110 - the engine tells no one
            await asyncio.sleep(0.005)
        await engine.abort(None)
        assert (await task).ids == []


async def test_kv_of_old_weights_is_not_used_for_new_requests(make_model: MakeModel, reference: Reference) -> None:
    old, new, ids = make_model("qwen3", 0), make_model("qwen3", 1), prompt(30)
    async with serving(old) as engine:
        _, task = await started(engine, request("in-flight", ids, tokens=100, ignore_eos=True), tokens=1)
        await engine.pause("in_place")
        await engine.load(LoadRequest(str(new), "1", abort_all=False))
        await engine.resume()
        await task  # its KV is of both weights
        answer = await ask(engine, request("fresh", ids))
    assert answer.meta["cached_tokens"] == 0
    assert answer.logprobs == pytest.approx(reference(new, ids, answer.ids), abs=1e-4)


def damage(kind: str, source: Path, target: Path, other: Path) -> None:
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    data = bytearray(file.read_bytes())
    if kind == "truncated":
        file.write_bytes(data[:-100])
    elif kind == "no header":
        file.write_bytes(b"\xff" * 64)
    elif kind == "bit flip against the manifest":
        (target / "manifest.json").write_text(
            json.dumps({"version": 1, "digest": "0" * 64, "files": {"model.safetensors": "0" * 64}})
        )
    elif kind == "nan":
        data[-4:] = b"\x00\x00\xc0\x7f"
        file.write_bytes(data)
    elif kind == "other shape":
        shutil.copy(other / "model.safetensors", file)
    elif kind == "other config":
        shutil.copy(other / "config.json", target / "config.json")
    elif kind == "empty directory":
        shutil.rmtree(target)
        target.mkdir()
    elif kind == "no directory":
        shutil.rmtree(target)


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "no header",
        "bit flip against the manifest",
        "nan",
        "other shape",
        "other config",
        "empty directory",
        "no directory",
    ],
)
async def test_a_bad_checkpoint_is_refused_and_the_old_weights_go_on(
    kind: str, make_model: MakeModel, tmp_path: Path
) -> None:
    good = make_model("llama")
    damage(kind, make_model("llama", 1), tmp_path / "bad", other=make_model("qwen2"))
    async with serving(good) as engine:
        before = await ask(engine, request("before", prompt(5), seed=1))
        with pytest.raises(EngineRejected, match="bad"):
            await engine.load(LoadRequest(str(tmp_path / "bad"), "1", abort_all=False))
        after = await ask(engine, request("after", prompt(5), seed=1))
        assert engine.model_info()["weight_version"] == "0"
    assert after.ids == before.ids
    assert after.versions == ["0"] * 8


async def test_memory_is_released_only_when_idle_and_comes_back_with_the_same_version(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        before = await ask(engine, request("before", prompt(5), seed=1))
        _, task = await started(engine, request("busy", prompt(5), tokens=240, ignore_eos=True), tokens=1)
        with pytest.raises(EngineRejected, match="live"):
            await engine.release_memory()
        await engine.abort(None)
        await task
        await engine.release_memory()
        held = asyncio.create_task(ask(engine, request("held", prompt(5), seed=1)))
        await asyncio.sleep(0)
        assert not engine.serving()
        await engine.resume_memory()
        assert (await held).ids == before.ids


async def test_weights_published_while_memory_was_released_are_served_after_it_comes_back(
    make_model: MakeModel, reference: Reference
) -> None:
    new = make_model("qwen3", 1)
    async with serving(make_model("qwen3", 0)) as engine:
        await engine.release_memory()
        await engine.load(LoadRequest(str(new), "1", abort_all=False))
        assert not engine.serving()
        await engine.resume_memory()
        answer = await ask(engine, request("r", prompt(5)))
    assert answer.versions == ["1"] * 8
    assert answer.logprobs == pytest.approx(reference(new, prompt(5), answer.ids), abs=1e-4)


async def test_stop_ids_end_a_generation_and_are_part_of_it(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        free = await ask(engine, request("free", prompt(5), tokens=12, seed=1))
        stop = free.ids[4]
        stopped = await ask(engine, request("stop", prompt(5), tokens=12, seed=1, stop_token_ids=frozenset({stop})))
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.meta["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (request("r", [64]), "outside the vocabulary of 64"),
        (request("r", [-1]), "outside the vocabulary"),
        (request("r", [1], stop_token_ids=frozenset({99})), "stop_token_ids: id 99"),
        (request("r", [1] * 250, tokens=7), "exceed the context of 256"),
        (request("r", [1], stop=("x",)), "no tokenizer"),
    ],
)
async def test_a_request_that_the_model_cannot_serve_is_refused(
    what: GenerateRequest, cause: str, make_model: MakeModel
) -> None:
    async with serving(make_model("qwen3")) as engine:
        with pytest.raises(EngineRejected, match=cause):
            await ask(engine, what)


async def test_a_request_id_in_use_is_refused_and_its_owner_undisturbed(make_model: MakeModel) -> None:
    async with serving(make_model("qwen3")) as engine:
        answer, task = await started(engine, request("r", prompt(5), tokens=200, ignore_eos=True), tokens=1)
        with pytest.raises(EngineRejected, match="Duplicate"):
            await ask(engine, request("r", prompt(6)))
        await task
    assert answer.finish == "length"


async def test_the_token_log_holds_all_that_was_read_and_written(make_model: MakeModel, tmp_path: Path) -> None:
    log = tmp_path / "tokens.jsonl"
    async with serving(make_model("qwen3"), log_tokens=log) as engine:
        answer, task = await started(engine, request("r", prompt(5), tokens=150, ignore_eos=True), tokens=1)
        await engine.load(LoadRequest(str(make_model("qwen3", 1)), "1", abort_all=False))
        await task
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert records[0]["input_ids"] == prompt(5)
    outputs = [record for record in records if "ids" in record]
    assert [i for record in outputs for i in record["ids"]] == answer.ids
    assert [p for record in outputs for p in record["logprobs"]] == answer.logprobs
    assert [record["version"] for record in outputs for _ in record["ids"]] == answer.versions
    assert records[-1] == {"rid": "r", "finish": "length"}


async def test_a_failing_model_ends_its_streams_and_says_so(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.engines.server import DropConnection

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async with serving(make_model("qwen3")) as engine:
        monkeypatch.setattr("workers.engines.embedded.scheduler.sample", explode)
        with pytest.raises(DropConnection):
            await ask(engine, request("r", prompt(5)))
        assert engine.failed.is_set()
        assert not engine.serving()
