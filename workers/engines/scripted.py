"""An engine that plays a script: given ids, log-probs, versions and faults, over the same HTTP wire as the real ones.

For tests of whatever talks to an engine, ours and our users'. In process::

    async with ScriptedEngine(plays=[Play(ids=(5, 6, 2), fault=Fault("death", after=2))]) as engine:
        ...  # talk to engine.url; engine.outputs says what was really sent

or as a process: ``python -m workers.engines.scripted --script FILE.json --port N``; one that a node agent starts finds
the file in the variable ``SCRIPTED_ENGINE``. A request takes the next play; when none is left it gets
:func:`hash_play`, a deterministic function of its prompt that survives a cut: continued from prompt + output so far, it
plays what it would have played.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from storage.errors import ConfigError, EngineRejected
from workers.engines.base import FEATURES, FinishKind, PauseMode
from workers.engines.checkpoint import check_headers, read_json, verified_digest
from workers.engines.flags import parser
from workers.engines.script import FaultKind, LoadFault, Play, hash_play, load_script, top_of
from workers.engines.server import DropConnection, LoadRequest, Server, bind, serve_until_signalled
from workers.engines.wire import GenerateRequest, Limits, VersionSpans, event, finish_reason


@dataclass(slots=True)
class Output:
    """What the engine sent for one request: the oracle."""

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: FinishKind | None = None
    """Finish kind; None while running, or if the stream was cut."""
    aborted: bool = False
    released: bool = False


class ScriptedEngine:
    """The engine and its server; use as an async context manager.

    Args:
        plays: taken by requests in order of arrival.
        respond: chooses the play of a request that finds no play left; None: :func:`hash_play`.
        delay_s: pause before each event.
        loads: what goes wrong with a weight update, by its version.
        strict_loads: refuse a weight update whose directory is not an intact checkpoint; otherwise any path will do.
    """

    def __init__(
        self,
        plays: Sequence[Play] = (),
        *,
        respond: Callable[[GenerateRequest], Play] | None = None,
        vocab_size: int = 64,
        max_context: int = 4096,
        weight_version: str = "0",
        model_path: str = "scripted",
        delay_s: float = 0.0,
        loads: Mapping[str, LoadFault] = {},
        strict_loads: bool = False,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        """Every request accepted, in order."""
        self.outputs: dict[str, Output] = {}
        """By request id; a request id used twice keeps the later."""
        self.version = weight_version
        self.paused = False
        self.dead = False
        self.url = ""
        self._plays = deque(plays)
        self._respond = respond or (lambda request: hash_play(request, vocab_size))
        self._limits = Limits(vocab_size, max_context, stop_strings=True, features=FEATURES["scripted"])
        self._delay_s = delay_s
        self._loads = loads
        self._loads_open = asyncio.Event()
        self._strict_loads = strict_loads
        self._model_path = model_path
        self._memory = True
        self._live: dict[str, Output] = {}
        self._changed = asyncio.Condition()
        self._server = Server(self, encode=_encode)

    async def __aenter__(self) -> Self:
        self.url = await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort(None)
        await self._server.stop()

    @property
    def server(self) -> Server:
        return self._server

    def add(self, *plays: Play) -> None:
        """Queue further plays."""
        self._plays.extend(plays)

    async def release(self, rid: str | None = None) -> None:
        """Let a stalled request (None: all) go on."""
        for output in list(self._live.values()):
            if rid in (None, output.request.rid):
                output.released = True
        await self._notify()

    def release_loads(self) -> None:
        """Let weight updates that hang go on."""
        self._loads_open.set()

    async def die(self) -> None:
        """Drop every connection and refuse new ones, as after SIGKILL."""
        self.dead = True
        await self._notify()

    def revive(self) -> None:
        """Serve again after a death."""
        self.dead = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[dict[str, Any], None]:
        self._limits.check(request)
        if request.rid in self._live:
            raise EngineRejected(f"Duplicate request ID detected: {request.rid}")
        output = self.outputs[request.rid] = self._live[request.rid] = Output(request)
        self.requests.append(request)
        play = self._plays.popleft() if self._plays else self._respond(request)
        try:
            async for item in self._perform(play, output):
                yield item
        finally:
            self._live.pop(request.rid, None)

    async def _perform(self, play: Play, output: Output) -> AsyncIterator[dict[str, Any]]:
        length = min(len(play.ids), output.request.max_new_tokens)
        spans = VersionSpans()
        while True:
            await self._turn(output)
            sent = len(output.ids)
            fault = play.fault.kind if play.fault is not None and sent == play.fault.after else None
            if fault == "no_final":
                return
            await self._break(fault, output)
            if output.aborted or fault in ("abort", "abort_bare", "duplicate_last"):
                output.finish = "abort"
                yield self._aborted(output, spans, fault)
                return
            end = self._chunk_end(play, sent, length)
            self._extend(play, output, spans, end)
            finish = self._finish(play, output, length) if end == length else None
            yield _spoil(self._event(output, spans, sent, finish), fault)
            if finish is not None:
                return

    async def _break(self, fault: FaultKind | None, output: Output) -> None:
        """Play the faults that are not events."""
        if fault == "stall":
            await self._until(lambda: output.released or output.aborted or self.dead)
        if fault == "death":
            await self.die()
        if self.dead or fault == "drop":
            raise DropConnection

    async def _turn(self, output: Output) -> None:
        """Wait until the next event may be sent."""
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        await self._until(lambda: (not self.paused and self._memory) or output.aborted or self.dead)

    def _chunk_end(self, play: Play, sent: int, length: int) -> int:
        """Where the next event ends: a chunk stops short of a fault and of a change of version."""
        end = min(sent + play.chunk, length)
        if play.fault is not None and sent < play.fault.after:
            end = min(end, play.fault.after)
        return end

    def _extend(self, play: Play, output: Output, spans: VersionSpans, end: int) -> None:
        for position in range(len(output.ids), end):
            version = play.versions[position] if play.versions is not None else self.version
            output.ids.append(play.ids[position])
            output.logprobs.append(play.logprob(position))
            output.versions.append(version)
            spans.add(version, 1)

    def _finish(self, play: Play, output: Output, length: int) -> dict[str, Any]:
        matched = output.ids[-1] if output.ids else None
        natural: FinishKind = "stop"
        if length == output.request.max_new_tokens and matched not in output.request.stop_token_ids:
            natural = "length"
        kind = play.finish if play.finish is not None and length == len(play.ids) else natural
        output.finish = kind
        return finish_reason(kind, matched=matched, length=length)

    def _event(self, output: Output, spans: VersionSpans, sent: int, finish: dict[str, Any] | None) -> dict[str, Any]:
        last = output.versions[-1] if finish is not None and output.versions else self.version
        return event(
            output.request,
            output.ids[sent:],
            output.logprobs[sent:],
            completion_tokens=len(output.ids),
            version=last,
            finish=finish,
            spans=spans,
            tops=[
                top_of(output.request, self._limits.vocab_size, token, logprob)
                for token, logprob in zip(output.ids[sent:], output.logprobs[sent:], strict=True)
            ],
        )

    def _aborted(self, output: Output, spans: VersionSpans, kind: FaultKind | None) -> dict[str, Any]:
        again = max(len(output.ids) - 1, 0) if kind == "duplicate_last" else len(output.ids)
        item = self._event(output, spans, again, finish_reason("abort"))
        if kind == "abort_bare":
            for key in ("output_token_logprobs", "output_token_logprobs_length", "prompt_tokens", "cached_tokens"):
                item["meta_info"].pop(key, None)
        if kind == "duplicate_last":
            entries = [[value, token, None] for token, value in zip(output.ids, output.logprobs, strict=True)]
            item["meta_info"]["output_token_logprobs"] = entries
        return item

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            await self.abort(None)

    async def resume(self) -> None:
        self.paused = False
        await self._notify()

    async def abort(self, rid: str | None) -> None:
        for output in self._live.values():
            # A prefix, as in SGLang: whoever uses ids of mixed length finds out here.
            if rid is None or output.request.rid.startswith(rid):
                output.aborted = True
        await self._notify()

    async def load(self, request: LoadRequest) -> dict[str, Any]:
        fault = self._loads.get(request.version or "")
        if fault == "refuse":
            raise EngineRejected(f"the script refuses version {request.version}")
        if fault == "death":
            await self.die()
            raise DropConnection
        if fault == "hang":
            await self._loads_open.wait()
        digest = await asyncio.to_thread(self._digest, Path(request.path))
        if request.abort_all:
            await self.abort(None)
        self._model_path = request.path
        self.version = request.version if request.version is not None else self.version
        return {"checksum": "other weights" if fault == "wrong_checksum" else digest}

    def _digest(self, directory: Path) -> str:
        if self._strict_loads:
            check_headers(directory)
        if any(directory.glob("*.safetensors")):
            return verified_digest(directory)
        return hashlib.sha256(str(directory).encode()).hexdigest()

    async def flush_cache(self) -> None:
        if self._live:
            raise EngineRejected("Flush cache failed: requests are running")

    async def release_memory(self) -> None:
        if self._live:
            raise EngineRejected("memory cannot be released while requests are running: abort them first")
        self._memory = False

    async def resume_memory(self) -> None:
        self._memory = True
        await self._notify()

    def serving(self) -> bool:
        return not self.paused and self._memory and not self.dead

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self._model_path,
            "is_generation": True,
            "weight_version": self.version,
            "vocab_size": self._limits.vocab_size,
            "max_context": self._limits.max_context,
        }

    def server_info(self) -> dict[str, Any]:
        return {"engine": "scripted", "paused": self.paused, "plays_left": len(self._plays)}

    def loads(self) -> dict[str, Any]:
        running = 0 if self.paused else len(self._live)
        return {"loads": [{"num_running_reqs": running, "num_waiting_reqs": len(self._live) - running}]}

    async def _until(self, predicate: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(predicate)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _spoil(item: dict[str, Any], kind: FaultKind | None) -> dict[str, Any]:
    """Put the log-prob fault ``kind`` into an event; other kinds leave it as it is."""
    entries = item["meta_info"].get("output_token_logprobs")
    if not entries:
        return item
    if kind == "extra_logprobs":
        entries.extend([[-1.0, 0, None], [-1.0, 0, None]])
    elif kind == "sentinel":
        entries[0][0] = -9999.0
    elif kind == "nan":
        entries[0][0] = float("nan")
    return item


def _encode(value: dict[str, Any]) -> bytes:
    """Like SGLang's encoder, and unlike ours, this one writes NaN."""
    return json.dumps(value, separators=(",", ":")).encode()


def main() -> int:
    flags = parser("Plays scripted tokens over SGLang's native wire.")
    flags.add_argument(
        "--script",
        type=Path,
        default=os.environ.get("SCRIPTED_ENGINE"),
        help="JSON file of plays and faults; without one every answer depends on its prompt",
    )
    arguments = flags.parse_args()
    try:
        options = load_script(arguments.script) if arguments.script else {}
        if arguments.model_path is not None:
            config = read_json(arguments.model_path / "config.json")
            options = {"vocab_size": config["vocab_size"], "model_path": str(arguments.model_path), **options}
        engine = ScriptedEngine(**{"weight_version": arguments.weight_version, **options})
        with bind(arguments.host, arguments.port) as listener:
            asyncio.run(serve_until_signalled(engine.server, listener))
    except (ConfigError, EngineRejected, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
