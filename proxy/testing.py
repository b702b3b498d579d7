"""A proxy in this process, for tests of agents and of the proxy itself: real HTTP, no object store, no GPU.

::

    write_toy_model(folder / "model")
    async with ScriptedEngine() as engine, ProxyServer(folder) as proxy:
        await proxy.control.create_run("demo", spec, "digest")
        await proxy.open_route(engine.url)
        session = await proxy.control.create_session("demo")
        ...  # any OpenAI client at session["base_url"] with session["api_key"]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from proxy.client import ControlClient
from proxy.relay import application
from proxy.routes import EngineFactory
from proxy.server import settings
from proxy.service import Service
from storage.errors import DeadlineError, NotFoundError
from storage.journal import open_journal
from storage.ledger import Ledger, Route
from workers.engines.base import Engine
from workers.engines.sglang import SglangEngine

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template of the toy model; tools are not shown to it."""

CONTROL_KEY = "control-key-for-tests"
_START_LIMIT_S = 10.0


def write_toy_model(folder: Path, *, template: str = CHATML, merges: tuple[str, ...] = ()) -> Path:
    """Tokenizer and template of a model without weights: one token per byte, id = 3 + byte, plus ``merges``.

    Ids 0, 1 and 2 are ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>`` (end of turn). Each of ``merges`` is a
    text whose characters, joined from the left, become one token of the next free id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {text: index for index, text in enumerate(specials)}
    for byte, text in _byte_alphabet().items():
        vocabulary[text] = 3 + byte
    pairs: list[tuple[str, str]] = []
    for word in merges:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocabulary:
                vocabulary[word[:length]] = len(vocabulary)
                pairs.append((word[: length - 1], word[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "vocab_size": len(vocabulary)}))
    return folder


def toy_ids(text: str, *, end: bool = True) -> tuple[int, ...]:
    """Ids of plain ``text`` in a toy model without merges, with the end-of-turn token unless ``end`` is False."""
    return (*(3 + byte for byte in text.encode()), *((2,) if end else ()))


class MemoryStore:
    """An object store in memory with the methods the proxy uses."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> str:
        self.objects[key] = data
        return hashlib.sha256(data).hexdigest()

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        if key not in self.objects:
            raise NotFoundError(f"no object {key!r}")
        return self.objects[key]

    def list(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))


class ProxyServer:
    """A whole proxy on a free loopback port; its ledger and journal lie in ``folder`` and outlive it.

    A second server on the same folder is the same proxy after a restart, given the same ``store``. With ``database``,
    a PostgreSQL URL, several servers are the proxies of one cluster.
    """

    def __init__(
        self,
        folder: Path,
        store: MemoryStore | None = None,
        make_engine: EngineFactory | None = None,
        database: str | None = None,
    ) -> None:
        self._folder = folder
        self._database = database
        self.store = store or MemoryStore()
        self._make_engine = make_engine or _engine
        self.url = ""
        self.service: Service
        self.control: ControlClient

    async def __aenter__(self) -> Self:
        # The protocol by name: without it asyncio leaves Nagle's delay on, which costs 40 ms an answer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._ledger = Ledger(self._database or f"sqlite:///{self._folder / 'ledger.db'}")
        self._journal = open_journal(self._database or f"sqlite:///{self._folder / 'journal.db'}")
        peer_key = CONTROL_KEY if self._database else None
        self.service = Service(
            self._ledger, self._journal, self.store, self._make_engine, base_url=self.url, peer_key=peer_key
        )
        await self.service.start()
        app = application(self.service, CONTROL_KEY)
        self._server = _Server(settings(app, log_level="error", shutdown_s=1))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="proxy server")
        async with asyncio.timeout(_START_LIMIT_S):
            while not self._server.started:  # noqa: ASYNC110  # uvicorn tells by a flag only
                await asyncio.sleep(0.005)
        self.control = ControlClient(self.url, CONTROL_KEY, deadline_s=20)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.control.close()
        self._server.ended.set()
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await self._serving
        except TimeoutError:
            raise DeadlineError("the proxy server did not stop") from None
        await self.service.close()
        await asyncio.to_thread(self._journal.close)
        await asyncio.to_thread(self._ledger.close)

    async def open_route(
        self, url: str, *, run: str = "demo", lease: str = "lease-a", epoch: int = 1, version: int = 0
    ) -> None:
        """Let generations of ``run`` start on the engine at ``url``; the node is called ``node-<lease>``."""
        route = {"node": f"node-{lease}", "url": url, "engine_kind": "scripted"}
        await self.control.put_route(lease, run=run, **route, epoch=epoch, version=version, state="open")


class _Server(uvicorn.Server):
    """Ends as soon as it is told to, where uvicorn looks ten times a second; signals are the test's own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _engine(route: Route) -> Engine:
    return SglangEngine(route.url)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + index) for index, byte in enumerate(others)}
