"""HTTP server for engines that speak SGLang's native wire. An engine is a :class:`Backend`; this only translates."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from aiohttp import web

from storage.errors import EngineError, EngineRejected
from workers.engines.base import PauseMode
from workers.engines.wire import GenerateRequest, parse_generate, parse_object

Encode = Callable[[dict[str, Any]], bytes]


class DropConnection(Exception):
    """Cut the client's connection as a killed process would: a backend plays its own death with it."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Body of ``/update_weights_from_disk``."""

    path: str
    version: str | None
    """None keeps the label."""
    abort_all: bool


class Backend(Protocol):
    """What an engine of ours can do. Methods raise :class:`EngineRejected` (400) or other engine errors (503)."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Events in wire form (:func:`workers.engines.wire.event`), the last one with a finish reason.

        Input is checked before the first event; closing the generator aborts the request.
        """
        ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, rid: str | None) -> None: ...

    async def load(self, request: LoadRequest) -> dict[str, Any]:
        """Returns extra fields for the answer, e.g. ``checksum``."""
        ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self) -> None: ...

    async def resume_memory(self) -> None: ...

    def serving(self) -> bool:
        """Whether tokens can be generated now: not paused, memory present."""
        ...

    def model_info(self) -> dict[str, Any]: ...

    def server_info(self) -> dict[str, Any]: ...

    def loads(self) -> dict[str, Any]: ...


class Application:
    """The routes over one backend."""

    def __init__(self, backend: Backend, *, encode: Encode = orjson.dumps) -> None:
        self._backend = backend
        self._encode = encode

    def build(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20, middlewares=[_errors])
        app.router.add_post("/generate", self._generate)
        for path, handler in {
            "pause_generation": self._pause,
            "continue_generation": self._resume,
            "abort_request": self._abort,
            "update_weights_from_disk": self._load,
            "flush_cache": self._flush,
            "release_memory_occupation": self._release,
            "resume_memory_occupation": self._resume_memory,
        }.items():
            app.router.add_post(f"/{path}", handler)
        app.router.add_get("/flush_cache", self._flush)
        for path in ("health", "health_generate"):
            app.router.add_get(f"/{path}", self._health)
        for path in ("model_info", "get_model_info"):
            app.router.add_get(f"/{path}", self._json(self._backend.model_info))
        for path in ("server_info", "get_server_info"):
            app.router.add_get(f"/{path}", self._json(self._backend.server_info))
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/loads", self._json(self._backend.loads))
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        parsed = parse_generate(await request.read(), default_rid=uuid.uuid4().hex)
        events = self._backend.generate(parsed)
        async with contextlib.aclosing(events):
            first = await anext(events, None)
            if not parsed.stream:
                return self._answer(await _collect(first, events))
            return await self._stream(request, first, events)

    async def _stream(
        self, request: web.Request, first: dict[str, Any] | None, events: AsyncIterator[dict[str, Any]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if first is not None:
            await response.write(b"data: " + self._encode(first) + b"\n\n")
            async for item in events:
                await response.write(b"data: " + self._encode(item) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _pause(self, request: web.Request) -> web.Response:
        mode = parse_object(await request.read()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise EngineRejected(f"mode: {mode!r} is none of abort, retract, in_place")
        await self._backend.pause(mode)
        return self._answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, request: web.Request) -> web.Response:
        parse_object(await request.read())
        await self._backend.resume()
        return self._answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = parse_object(await request.read())
        rid = body.get("rid")
        if body.get("abort_all"):
            await self._backend.abort(None)
        elif isinstance(rid, str) and rid:
            await self._backend.abort(rid)
        else:
            raise EngineRejected("abort_request needs rid or abort_all")
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        body = parse_object(await request.read())
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise EngineRejected("model_path: the directory of a checkpoint is needed")
        if version is not None and not isinstance(version, str):
            raise EngineRejected(f"weight_version: {version!r} is not a string")
        try:  # flush_cache is not read: KV of old weights is never used again
            extra = await self._backend.load(LoadRequest(path, version, bool(body.get("abort_all_requests"))))
        except EngineRejected as error:
            return self._answer({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        return self._answer({"success": True, "message": "Succeeded.", "num_paused_requests": 0, **extra})

    async def _flush(self, request: web.Request) -> web.Response:
        await self._backend.flush_cache()
        return web.Response(text="Cache flushed.\n")

    async def _release(self, request: web.Request) -> web.Response:
        _all_tags(await request.read())
        await self._backend.release_memory()
        return self._answer(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        _all_tags(await request.read())
        await self._backend.resume_memory()
        return self._answer(None)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._backend.serving() else 503)

    def _json(self, get: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            return self._answer(get())

        return handler

    def _answer(self, body: dict[str, Any] | None, status: int = 200) -> web.Response:
        data = b"null" if body is None else self._encode(body)
        return web.Response(body=data, status=status, content_type="application/json")


def _all_tags(raw: bytes) -> None:
    if parse_object(raw).get("tags") is not None:
        raise EngineRejected("tags: only null (weights and KV together) is supported")


async def _collect(first: dict[str, Any] | None, events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """Join a stream's events into the one answer of a request without ``stream``."""
    if first is None:
        raise DropConnection
    ids = list(first["output_ids"])
    logprobs = list(first["meta_info"].get("output_token_logprobs", ()))
    last = first
    async for last in events:
        ids += last["output_ids"]
        logprobs += last["meta_info"].get("output_token_logprobs", ())
    if "output_token_logprobs" in last["meta_info"]:
        last["meta_info"]["output_token_logprobs"] = logprobs
    return {**last, "output_ids": ids}


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except DropConnection:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    except EngineRejected as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    except EngineError as error:
        return web.json_response({"error": {"message": str(error)}}, status=503)


def bind(host: str, port: int) -> socket.socket:
    """Take ``host:port`` (port 0: any free one) without listening yet: clients are refused until a server does.

    Raises:
        OSError: the port is in use, or the host is not ours.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot bind {host}:{port}: {error.strerror}") from None
    return listener


class Server:
    """Serves a backend over HTTP until :meth:`stop`."""

    def __init__(self, backend: Backend, *, encode: Encode = orjson.dumps) -> None:
        self._application = Application(backend, encode=encode)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, listener: socket.socket | None = None) -> str:
        """Serve on ``listener`` (see :func:`bind`), else on a free loopback port; returns the base URL."""
        listener = listener or bind("127.0.0.1", 0)
        # A client that goes away cancels its handler, which aborts its request.
        runner = web.AppRunner(
            self._application.build(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=1024).start()
        self._runner = runner
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


async def serve_until_signalled(server: Server, listener: socket.socket, failed: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until the engine behind ``server`` says that it has ``failed``."""
    stop = failed or asyncio.Event()
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted.set)
    await server.start(listener)
    print(f"listening on {server.url}", flush=True)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, interrupted)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await server.stop()
