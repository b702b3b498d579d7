"""The control client: the proxy's own errors, and patience while it restarts."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from proxy.client import ControlClient
from storage.errors import DeadlineError, FencedError, SeamlessFlowError


@pytest.fixture
async def serve():
    runners = []

    async def start(handler, port=0):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_the_proxy_s_error_is_raised_again_as_its_class(serve):
    async def refuse(request):
        return web.json_response({"error": {"type": "FencedError", "message": "epoch 1 is old"}}, status=409)

    async with ControlClient(await serve(refuse), "key", deadline_s=5) as client:
        with pytest.raises(FencedError, match="epoch 1 is old"):
            await client.delete_route("lease", 1)


async def test_an_answer_that_is_no_error_of_ours_is_told_with_its_status(serve):
    async def fail(request):
        return web.Response(status=502, text="<html>bad gateway")

    async with ControlClient(await serve(fail), "key", deadline_s=5) as client:
        with pytest.raises(SeamlessFlowError, match=r"502.*bad gateway"):
            await client.routes()


async def test_calls_wait_for_a_proxy_that_restarts(serve):
    async def answer(request):
        return web.json_response([])

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with ControlClient(f"http://127.0.0.1:{port}", "key", deadline_s=10) as client:
        asking = asyncio.create_task(client.routes())
        await asyncio.sleep(0.1)
        await serve(answer, port)
        assert await asking == []


async def test_of_several_proxies_one_that_answers_will_do(serve):
    async def answer(request):
        return web.json_response([])

    urls = ["http://127.0.0.1:9", await serve(answer), "http://127.0.0.1:9"]
    async with ControlClient(urls, "key", deadline_s=10) as client:
        assert [await client.routes() for _ in range(3)] == [[], [], []]


async def test_a_proxy_that_never_comes_is_a_named_deadline():
    async with ControlClient("http://127.0.0.1:9", "key", deadline_s=0.2) as client:
        with pytest.raises(DeadlineError, match=r"GET http://127.0.0.1:9/control/routes: no answer"):
            await client.routes()


async def test_a_claim_whose_answer_may_have_been_lost_says_what_the_worker_holds(serve):
    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        if len(bodies) == 1:
            request.transport.abort()
        return web.json_response([])

    async with ControlClient(await serve(answer), "key", deadline_s=5) as client:
        await client.claim_samples("run", "train", "w", 2, holding=["s1"])
        await client.claim_samples("run", "train", "w", 2, holding=["s1"])
    assert [body.get("holding") for body in bodies] == [None, ["s1"], None]
