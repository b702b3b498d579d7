"""A small OpenAI-compatible server that the tests' agents talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web
from children import remember

Reply = dict[str, Any]
Brain = Callable[[dict[str, Any]], Reply]


@pytest.fixture(autouse=True)
def _surroundings() -> None:
    """So that tests can say which processes are theirs."""
    remember()


@dataclass
class FakeOpenAI:
    """Answers with what ``brain`` makes of the request: ``{"content": ...}`` or ``{"tool_calls": [...]}``.

    A reply may have ``finish_reason``, a ``status`` other than 200, or ``pieces``: how many parts arguments come in.
    """

    brain: Brain
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.keys.append(request.headers["Authorization"].removeprefix("Bearer "))
        reply = self.brain(body)
        if reply.get("status", 200) != 200:
            error = {"error": {"message": "as the test wants", "type": "server_error"}}
            return web.json_response(error, status=reply["status"])
        reason = reply.get("finish_reason") or ("tool_calls" if reply.get("tool_calls") else "stop")
        if body.get("stream"):
            return await self._stream(request, reply, reason)
        message = {"role": "assistant", "content": reply.get("content")}
        return web.json_response(envelope({"message": message, "finish_reason": reason}, "chat.completion"))

    async def _stream(self, request: web.Request, reply: Reply, reason: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": character} for character in reply.get("content") or ""]
        for index, (name, arguments) in enumerate(reply.get("tool_calls", ())):
            head = {"index": index, "id": f"call_{index}", "type": "function"}
            deltas.append({"tool_calls": [head | {"function": {"name": name, "arguments": arguments[:3]}}]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]})
        events = [{"delta": delta, "finish_reason": None} for delta in deltas]
        for event in [*events, {"delta": {}, "finish_reason": reason}]:
            await response.write(b"data: " + orjson.dumps(envelope(event, "chat.completion.chunk")) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def envelope(choice: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 0, "model": "policy", "choices": [{"index": 0, **choice}]}


@pytest.fixture
async def openai_server() -> AsyncIterator[Callable[[Brain], Any]]:
    """``await openai_server(brain)`` starts one on a free loopback port."""
    runners: list[web.AppRunner] = []

    async def start(brain: Brain) -> FakeOpenAI:
        server = FakeOpenAI(brain)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        return server

    yield start
    for runner in runners:
        await runner.cleanup()
