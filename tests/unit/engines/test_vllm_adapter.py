"""What the adapter does when a vLLM server fails it, against a server that answers as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from storage.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from storage.weights import folder_digest
from workers.engines.base import Sampling
from workers.engines.vllm import VllmEngine

CONFIG = {"architectures": ["Tiny"], "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(orjson.dumps(CONFIG))
    save_file({"weight": torch.full((2, 2), float(seed))}, folder / "model.safetensors")
    return folder


@dataclass
class FakeVllm:
    """vLLM's calls, without a model. ``workers`` of them hold weights of a path each."""

    path: str
    workers: int = 1
    label: str = "default"
    paused: bool = False
    health: int = 200
    logprobs_mode: str = "processed_logprobs"
    protocol: int = 1
    sleeps: bool = False
    extended: bool = True
    load: Callable[[int, str], dict[str, Any]] | None = None
    """Worker and path -> its answer, in place of a load that works."""
    live: int = 0
    steps: asyncio.Queue[int | None] | None = None
    """How many tokens each event of a stream brings; None breaks it off. Without a queue a stream has one token."""
    label_reads: int = 0
    calls: list[str] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.model_path = self.path
        self.paths = [self.path] * self.workers

    async def until_label_is_read(self, times: int) -> None:
        wanted = self.label_reads + times
        while self.label_reads < wanted:  # noqa: ASYNC110 - a reader tells no one
            await asyncio.sleep(0.01)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._note])
        for name in ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "abort_requests"):
            app.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        app.router.add_post("/collective_rpc", self._collective_rpc)
        app.router.add_post("/update_weight_version", self._update_weight_version)
        app.router.add_post("/inference/v1/generate", self._generate)
        for name in ("health", "is_paused", "weight_info", "load", "metrics"):
            app.router.add_get(f"/{name}", self._information)
        return app

    async def _information(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=self.health)
        self.label_reads += request.path == "/weight_info"
        if request.path == "/metrics":
            return web.Response(text=METRICS)
        return web.json_response({"is_paused": self.paused, "weight_version": self.label, "server_load": self.live})

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "POST":
            self.calls.append(request.path_qs.lstrip("/"))
        return await handler(request)  # type: ignore[no-any-return]

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    _sleep = _pause
    _wake_up = _resume

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": not self.live})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        self.calls[-1] += f" {await request.text()}"
        return web.json_response({"status": "aborted", "aborted": 1})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        self.calls[-1] += f" {self.label}"
        return web.json_response({"success": True})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls[-1] = body["method"]
        if not self.extended:
            message = f"'CPUWorker' object has no attribute '{body['method']}'"
            return web.json_response({"error": {"message": message}}, status=500)
        answers = [getattr(self, "_" + body["method"])(worker, *body["args"]) for worker in range(self.workers)]
        return web.json_response({"results": answers})

    def _seamlessflow_state(self, worker: int) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "model_path": self.model_path,
            "path": self.paths[worker],
            "vocab_size": 64,
            "max_context": 128,
            "logprobs_mode": self.logprobs_mode,
            "max_logprobs": 21,
            "sleeps": self.sleeps,
        }

    def _seamlessflow_load(self, worker: int, path: str) -> dict[str, Any]:
        if self.load is not None and not (answer := self.load(worker, path)).get("loaded"):
            return answer
        self.paths[worker] = path
        return {"loaded": True, "seen": 1, "proven": 1}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.steps is not None:
            return await self._step(request, self.steps)
        choice = _tokens(1)
        last = {"token_ids": [], "finish_reason": "length", "weight_versions": [{"version": "0", "start": 0, "end": 1}]}
        text = "".join(f"data: {orjson.dumps({'choices': [event]}).decode()}\n\n" for event in (choice, last))
        return web.Response(text=text + "data: [DONE]\n\n", content_type="text/event-stream")

    async def _step(self, request: web.Request, steps: asyncio.Queue[int | None]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while (count := await steps.get()) is not None:
            await response.write(b"data: " + orjson.dumps({"choices": [_tokens(count)]}) + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response


def _tokens(count: int) -> dict[str, Any]:
    entry = {"token_id": 1, "logprob": -1.0, "top_logprobs": []}
    return {"token_ids": [1] * count, "logprobs": {"content": [entry] * count}}


METRICS = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:cache_config_info{block_size="128",kv_cache_size_tokens="4096",num_gpu_blocks="32"} 1.0
"""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [str(checkpoint(tmp_path / f"version-{seed}", seed)) for seed in range(2)]


@pytest.fixture
async def fake(paths: list[str]) -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(paths[0])
    runner = web.AppRunner(fake.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def engine(fake: FakeVllm) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(fake.url, deadline_s=5.0, load_deadline_s=5.0)
    yield engine
    await engine.close()


async def test_the_new_label_is_set_when_the_weights_are_in_and_before_tokens_flow_again(
    engine: VllmEngine, fake: FakeVllm, paths: list[str]
) -> None:
    digest = folder_digest(Path(paths[1]))
    loaded = await engine.load_weights(paths[1], 1)
    assert (loaded.version, loaded.checksum) == (1, digest)
    label = f"1@{digest[:8]}"
    order = ["pause", "update_weight_version unknown", "seamlessflow_load", "reset_prefix_cache"]
    order += [f"update_weight_version {label}", "resume"]
    assert [call.partition("?")[0] for call in fake.calls if call != "seamlessflow_state"] == order
    assert "clear_cache=false" in fake.calls[fake.calls.index("seamlessflow_load") - 3]


async def test_an_engine_that_was_paused_stays_so_after_a_load(
    engine: VllmEngine, fake: FakeVllm, paths: list[str]
) -> None:
    await engine.pause("in_place")
    await engine.load_weights(paths[1], 1)
    assert fake.paused
    assert sum(call.startswith("pause") for call in fake.calls) == 1


@pytest.mark.parametrize("version", [0, 3])
async def test_a_version_that_is_not_a_new_one_leaves_no_kv(
    engine: VllmEngine, fake: FakeVllm, paths: list[str], version: int
) -> None:
    fake.label = "3@00000000"
    await engine.load_weights(paths[1], version)
    assert "pause?mode=keep&clear_cache=true" in fake.calls


async def test_a_load_that_the_worker_has_undone_is_refused_and_the_old_version_goes_on(
    engine: VllmEngine, fake: FakeVllm, paths: list[str]
) -> None:
    fake.load = lambda worker, path: {"loaded": False, "error": "no room", "lost": None}
    with pytest.raises(EngineRejected, match="no room"):
        await engine.load_weights(paths[1], 1)
    assert (fake.label, fake.paused) == ("default", False)
    assert (await engine.info()).weight_version == 0


async def test_weights_that_are_lost_let_no_token_flow_and_make_the_engine_unready(
    engine: VllmEngine, fake: FakeVllm, paths: list[str]
) -> None:
    fake.load = lambda worker, path: {"loaded": False, "error": "x", "lost": "the old folder is gone"}
    with pytest.raises(EngineUnavailable, match=r"must be restarted: the old folder is gone"):
        await engine.load_weights(paths[1], 1)
    assert fake.paused
    with pytest.raises(EngineUnavailable, match="nobody knows the weights"):
        await engine.resume()
    assert fake.paused
    assert not await engine.ready()
    assert (await engine.info()).weight_version is None
    fake.load = None
    await engine.load_weights(paths[1], 1)
    await engine.resume()
    assert await engine.ready()


async def test_where_one_worker_fails_the_others_go_back_too(
    engine: VllmEngine, fake: FakeVllm, paths: list[str]
) -> None:
    fake.workers, fake.paths = 2, [paths[0], paths[0]]
    failure = {"loaded": False, "error": "x", "lost": None}
    fake.load = lambda worker, path: failure if (worker, path) == (1, paths[1]) else {"loaded": True}
    with pytest.raises(EngineRejected, match="stay as they were"):
        await engine.load_weights(paths[1], 1)
    assert fake.paths == [paths[0], paths[0]]
    assert fake.label == "default"


async def test_a_load_without_an_answer_leaves_the_engine_paused_with_weights_that_nobody_knows(
    fake: FakeVllm, paths: list[str]
) -> None:
    def broken(worker: int, path: str) -> dict[str, Any]:
        raise web.HTTPServiceUnavailable

    fake.load = broken
    engine = VllmEngine(fake.url, deadline_s=5.0, load_deadline_s=5.0)
    with pytest.raises(EngineUnavailable):
        await engine.load_weights(paths[1], 1)
    assert (fake.label, fake.paused) == ("unknown", True)
    await engine.close()


async def test_a_checkpoint_of_another_model_reaches_no_worker(
    engine: VllmEngine, fake: FakeVllm, tmp_path: Path
) -> None:
    other = checkpoint(tmp_path / "other", 1)
    save_file({"weight": torch.zeros(3, 2)}, other / "model.safetensors")
    with pytest.raises(EngineRejected, match="shape"):
        await engine.load_weights(str(other), 1)
    assert "seamlessflow_load" not in fake.calls
    assert not fake.paused


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"extended": False}, "--worker-extension-cls"),
        ({"protocol": 2}, "protocol 2"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused_with_what_to_do(
    engine: VllmEngine, fake: FakeVllm, paths: list[str], changes: dict[str, Any], named: str
) -> None:
    for name, value in changes.items():
        setattr(fake, name, value)
    assert await engine.ready()  # it answers; whoever needs it right is told what is wrong
    for call in (engine.load_weights(paths[1], 1), anext(engine.generate([1], Sampling(1), request_id="r", salt=""))):
        with pytest.raises(EngineProtocolError, match=named):
            await call


async def test_it_is_ready_when_it_has_answered_one_request_and_not_before(engine: VllmEngine, fake: FakeVllm) -> None:
    fake.health = 503
    assert not await engine.ready()
    assert "inference/v1/generate" not in fake.calls
    fake.health = 200
    assert await engine.ready()
    assert await engine.ready()
    assert fake.calls.count("inference/v1/generate") == 1


async def test_a_paused_engine_is_ready_without_a_request(engine: VllmEngine, fake: FakeVllm) -> None:
    await engine.pause("in_place")
    assert await engine.ready()
    assert "inference/v1/generate" not in fake.calls


async def test_an_abort_names_the_request_as_vllm_does(engine: VllmEngine, fake: FakeVllm) -> None:
    await engine.abort("r-1")
    await engine.abort(None)
    assert fake.calls == ['abort_requests {"request_ids":["generate-tokens-r-1"]}', "abort_requests {}"]


async def test_while_paused_all_that_is_live_waits(engine: VllmEngine, fake: FakeVllm) -> None:
    fake.live = 3
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.used_tokens) == (2, 1, 1024)
    await engine.pause("in_place")
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 3)


async def test_memory_is_given_back_where_the_server_can_and_nothing_is_live(
    engine: VllmEngine, fake: FakeVllm
) -> None:
    fake.sleeps, fake.live = True, 1
    with pytest.raises(EngineRejected, match="live"):
        await engine.release_memory()
    assert not fake.paused
    fake.live = 0
    await engine.release_memory()
    assert "sleep?level=1&mode=keep" in fake.calls
    await engine.resume_memory()
    assert not fake.paused


async def test_memory_that_would_not_be_given_back_is_refused(engine: VllmEngine, fake: FakeVllm) -> None:
    with pytest.raises(EngineRejected, match="--enable-sleep-mode"):
        await engine.release_memory()
    assert fake.calls == ["seamlessflow_state"]


async def test_what_a_dying_server_gave_has_its_version_as_far_as_that_is_certain(
    engine: VllmEngine, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engines.vllm_witness.EVERY_S", 0.01)
    fake.label, fake.steps = "3@00000000", asyncio.Queue()
    stream = engine.generate([1], Sampling(9), request_id="r", salt="")
    fake.steps.put_nowait(1)
    spans = [(await anext(stream)).spans]
    while spans[-1] is None:  # until the label has been read since
        await asyncio.sleep(0.01)
        fake.steps.put_nowait(1)
        spans.append((await anext(stream)).spans)
    settled = spans[-1][-1]
    assert (settled.version, settled.start) == (3, 0)
    assert 1 <= settled.end < len(spans)
    fake.steps.put_nowait(None)
    with pytest.raises(EngineUnavailable):
        await anext(stream)


async def test_tokens_that_may_be_of_two_versions_are_of_none_until_the_end(
    engine: VllmEngine, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engines.vllm_witness.EVERY_S", 0.01)
    fake.label, fake.steps = "3@00000000", asyncio.Queue()
    stream = engine.generate([1], Sampling(9), request_id="r", salt="")
    fake.steps.put_nowait(1)
    await anext(stream)
    fake.label = "4@00000000"
    await fake.until_label_is_read(3)
    fake.steps.put_nowait(1)
    spans = (await anext(stream)).spans
    assert spans is None or spans[-1].end == 1  # the first one may have been settled before the change
    await fake.until_label_is_read(3)
    fake.steps.put_nowait(1)
    assert (await anext(stream)).spans is None
    await stream.aclose()
    fake.steps.put_nowait(None)
