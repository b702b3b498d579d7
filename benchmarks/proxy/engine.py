"""The engine under every proxy of the benchmark: one fixed answer over two wires, at the least cost a process can have.

``/generate`` is SGLang's native wire (what our proxy reads), ``/v1/chat/completions`` is vLLM's OpenAI wire (what the
peers read), token ids and log-probs included when ``return_token_ids`` asks for them. Same answer, same number of
events, same pacing: every event is written by itself, and all streams get their next event in the same step, as they do
from a real engine. Nothing is parsed but the few fields that matter, so its own CPU hardly depends on the wire.

    python -m benchmarks.proxy.engine --port N --answers FILE.json

``POST /bench`` with ``{"answer": "long", "step_ms": 0}`` chooses the answer and the pace (0: as fast as they are read)
and clears the log; ``GET /bench`` returns the log: ``{"started", "finished", "aborted", "tokens"}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop

from benchmarks.proxy.wires import END, PROMPT_MARK, Answer, Wires, chunk, make_wires, mixed_end

_LIMIT = re.compile(rb'"max_(?:new_)?tokens"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_WITH_IDS = re.compile(rb'"return_token_ids"\s*:\s*true')
_RID = re.compile(rb'"rid"\s*:\s*"([^"]*)"')
_ENDS = 8192
"""Where the fields of a request are looked for, from both ends of its body: the middle is prompt."""
_PROMPT_TOKEN = b"12345,"


@dataclass(slots=True)
class Log:
    """What the engine did since the last ``POST /bench``."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """One generation that is being sent. ``wires`` None: on the chat wire, with ``events`` ready."""

    connection: _Connection
    rid: bytes
    events: Sequence[bytes]
    wires: Wires | None = None
    next: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Versions before the present one, each with the number of events sent up to its end."""

    def take(self) -> bytes:
        """The next event."""
        at, self.next = self.next, self.next + 1
        if self.wires is None:
            return self.events[at]
        if self.versions and self.next == len(self.events):
            return chunk(mixed_end(self.rid, self.versions, self.wires))
        return chunk(self.rid.join(self.wires.native[at]))


class Engine:
    """All connections of the process."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self._answers = answers
        self._answer = next(iter(answers.values()))
        self._tails: dict[int, Wires] = {}
        self._step_s = 0.0
        self._version = "0"
        self._paused = False
        self._ticking = False
        self._active: dict[_Stream, None] = {}
        self.log = Log()

    def handle(self, connection: _Connection, method: str, path: str, body: bytes) -> None:
        """Answer one request."""
        if path == "/generate":
            self._generate(connection, body)
        elif path == "/v1/chat/completions":
            self._chat(connection, body)
        elif path == "/bench" and method == "POST":
            self._set(orjson.loads(body))
            connection.reply(b"{}")
        else:
            connection.reply(*self._control(path, body))

    def lost(self, connection: _Connection) -> None:
        """The client of ``connection`` went away."""
        for stream in [stream for stream in self._active if stream.connection is connection]:
            self.log.aborted += 1
            del self._active[stream]

    def _set(self, options: dict[str, Any]) -> None:
        self._answer = self._answers[options.get("answer", "long")]
        self._tails.clear()
        self._step_s = options.get("step_ms", 0) / 1000
        self.log = Log()

    def _generate(self, connection: _Connection, body: bytes) -> None:
        ends = body[:_ENDS] + body[-_ENDS:]
        rid = _found(_RID, ends, b"none")
        # A generation that was cut asks for what is left of its answer, and gets its end.
        length = min(int(_found(_LIMIT, ends, b"1000000")), len(self._answer.ids))
        self._start(_Stream(connection, rid, (b"",) * length, self._tail(length)))

    def _chat(self, connection: _Connection, body: bytes) -> None:
        wires = self._tail(len(self._answer.ids))
        ends = body[:_ENDS] + body[-_ENDS:]
        with_ids = _WITH_IDS.search(ends) is not None
        prompt = b"[" + _PROMPT_TOKEN * (len(body) // 4) + b"1]" if with_ids else b"null"
        if _STREAM.search(ends) is None:
            self.log.started += 1
            self.log.finished += 1
            self.log.tokens += len(self._answer.ids)
            connection.reply((wires.whole_ids if with_ids else wires.whole).replace(PROMPT_MARK, prompt))
            return
        opening, *rest = wires.chat_ids if with_ids else wires.chat
        events = [chunk(opening.replace(PROMPT_MARK, prompt)), *(chunk(item) for item in rest)]
        self._start(_Stream(connection, b"", events))

    def _start(self, stream: _Stream) -> None:
        self.log.started += 1
        stream.connection.open_stream()
        self._active[stream] = None
        if not self._paused:
            self._send(stream)
            self._schedule()

    def _send(self, stream: _Stream) -> None:
        data = stream.take()
        self.log.tokens += 1
        if stream.next == len(stream.events):
            self.log.finished += 1
            del self._active[stream]
            data += END
        stream.connection.write(data)

    def _schedule(self) -> None:
        if self._ticking or self._paused or not self._active:
            return
        self._ticking = True
        loop = asyncio.get_running_loop()
        if self._step_s:
            loop.call_later(self._step_s, self._tick)
        else:
            loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if not self._paused:
            for stream in list(self._active):
                self._send(stream)
            self._schedule()

    def _abort(self, rid: bytes) -> None:
        for stream in [stream for stream in self._active if stream.rid.startswith(rid)]:
            self.log.aborted += 1
            del self._active[stream]
            stream.connection.write(chunk(stream.rid.join(self._tail(len(stream.events)).aborted)) + END)

    def _load(self, version: str) -> None:
        """New weights: what runs goes on under them."""
        self._tails.clear()
        before, self._version = self._version, version
        for stream in self._active:
            if stream.wires is not None:
                stream.versions.append((before, stream.next))
                stream.wires = self._tail(len(stream.events))

    def _tail(self, length: int) -> Wires:
        """The last tokens of the answer under the present weights."""
        if length not in self._tails:
            last = Answer(self._answer.ids[-length:], self._answer.texts[-length:])
            self._tails[length] = make_wires(last, self._version)
        return self._tails[length]

    def _control(self, path: str, body: bytes) -> tuple[bytes, int]:
        answer: Any = {"status": "ok"}
        if path == "/bench":
            answer = asdict(self.log)
        elif path == "/pause_generation":
            self._paused = True
        elif path == "/continue_generation":
            self._paused = False
            self._schedule()
        elif path == "/abort_request":
            self._abort(_found(_RID, body, b""))
        elif path == "/update_weights_from_disk":
            self._load(orjson.loads(body)["weight_version"])
            answer = {"success": True, "message": "Succeeded."}
        elif path in ("/v1/models", "/models"):
            answer = {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "vllm"}]}
        elif path in ("/model_info", "/get_model_info"):
            answer = {"model_path": "policy", "is_generation": True, "weight_version": self._version}
        elif path in ("/server_info", "/get_server_info"):
            answer = {"model_path": "policy", "served_model_name": "policy"}
        elif path not in ("/health", "/health_generate"):
            return b'{"error":{"message":"not served here"}}', 404
        return orjson.dumps(answer), 200


class _Connection(asyncio.Protocol):
    """Keep-alive HTTP/1.1, one request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.lost(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._needed and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            if b" http/1.1" not in head:
                self._transport.close()  # a router asks whether we speak HTTP/2
                return
            if b"transfer-encoding" in head:
                raise ValueError("the benchmark's engine reads bodies with a content-length only")
            length = int(_found(re.compile(rb"content-length: *(\d+)"), head, b"0"))
            self._needed = end + 4 + length
            if len(self._buffer) < self._needed:
                return
            body = bytes(self._buffer[end + 4 : self._needed])
            method, path, _ = self._buffer[:end].split(b" ", 2)
            del self._buffer[: self._needed]
            self._needed = 0
            self._engine.handle(self, method.decode(), path.split(b"?")[0].decode(), body)

    def open_stream(self) -> None:
        self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def reply(self, body: bytes, status: int = 200) -> None:
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def _found(pattern: re.Pattern[bytes], data: bytes, default: bytes) -> bytes:
    match = pattern.search(data)
    return default if match is None else match.group(1)


async def _serve(port: int, answers: dict[str, Answer]) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(answers)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", port, backlog=1024)
    await stop.wait()
    server.close()


def main() -> None:
    flags = argparse.ArgumentParser(description="The benchmark's engine.")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--answers", type=Path, required=True)
    arguments = flags.parse_args()
    answers = {name: Answer(**item) for name, item in json.loads(arguments.answers.read_text()).items()}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(arguments.port, answers))


if __name__ == "__main__":
    main()
