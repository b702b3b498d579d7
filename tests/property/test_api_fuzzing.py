"""Whatever is sent to the control API or in any dialect: no 5xx, an error in the right shape, bounded memory."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import orjson
import pytest
import schemathesis
from agent_api import document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from proxy.app import AgentApp
from proxy.asgi import GONE, App
from proxy.control import control_app
from proxy.testing import CONTROL_KEY, ProxyServer, toy_ids, write_toy_model
from workers.engines.script import Play
from workers.engines.scripted import ScriptedEngine

PER_REQUEST = 20_000
"""Bytes that a request of these sizes may leave behind: its turn, its tokens, its answer for a retry."""
ANSWERS = ("Hello", '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>', "<think>Hm.</think>ok", "")
RUN = "demo"
MODES = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
few = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def error(self) -> Any:
        """What the server says is wrong."""
        return orjson.loads(self.body)["error"]


class Served:
    """One proxy in an event loop of its own, which runs while a request is answered."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self.session: dict[str, Any] = {}
        self._runner.run(self._start(folder))

    async def _start(self, folder: Path) -> None:
        write_toy_model(folder / "model")
        answers = iter(range(10**9))
        self._engine = ScriptedEngine(
            respond=lambda request: Play(toy_ids(ANSWERS[next(answers) % len(ANSWERS)]), chunk=50), vocab_size=259
        )
        await self._engine.__aenter__()
        self._proxy = await ProxyServer(folder).__aenter__()
        service = self._proxy.service
        self.control = control_app(service, CONTROL_KEY)
        self.agents: App = AgentApp(service.sessions, self.control)
        self.spec = {
            "run": RUN,
            "model": {"path": str(folder / "model"), "max_context": 400, "reasoning_parser": "think"},
            "data": {"path": "tasks.jsonl"},
            "reward": {"target": "rewards:exact"},
            "engine": {"kind": "scripted"},
            "agent": {"max_turns": 1000000},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
            "pipeline": {"hold_limit_s": 10.0},
        }
        await self._proxy.control.create_run(RUN, self.spec, "digest")
        await self._proxy.open_route(self._engine.url)

    def new_session(self) -> None:
        self.session = self._runner.run(self._proxy.control.create_session(RUN))

    def claim(self) -> list[str]:
        """A session of a sample, if one may start."""
        control = self._proxy.control
        limits = {"admit_until": 1000, "target_in_flight": 1000, "samples_per_task": 2}
        self._runner.run(control.set_admission(RUN, "train", **limits))
        return [sample.session for sample in self._runner.run(control.claim_samples(RUN, "train", "w", 1))]

    def left_behind(self) -> list[str]:
        """Tasks that work on answers."""
        tasks = [task.get_name() for task in asyncio.all_tasks(self._runner.get_loop())]
        return [name for name in tasks if name.startswith(("generation ", "read ", "interrupt "))]

    def close(self) -> None:
        self._runner.run(self._proxy.__aexit__(None, None, None))
        self._runner.run(self._engine.__aexit__(None, None, None))
        self._runner.close()

    def call(self, case: schemathesis.Case, key: str) -> Answer:
        """Answer a generated case; headers that it makes up are kept, its key is replaced."""
        body = case.body
        data = (
            body if isinstance(body, bytes) else b"" if not case.media_type else json.dumps(body, default=str).encode()
        )
        headers = {str(name).lower(): str(value) for name, value in (case.headers or {}).items()}
        headers |= {"authorization": f"Bearer {key}", "content-type": case.media_type or "application/json"}
        return self._runner.run(_call(self.agents, case, data, headers))


async def _call(app: App, case: schemathesis.Case, body: bytes, headers: dict[str, str]) -> Answer:
    path, status, parts = case.formatted_path, 0, []
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": case.method.upper(),
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(case.query or {}, doseq=True).encode(),
        "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        GONE: asyncio.get_running_loop().create_future(),
    }
    async with asyncio.timeout(20):
        await app(scope, receive, send)
    return Answer(status, b"".join(parts))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    served.new_session()
    yield served
    served.close()


def operations(source: dict[str, Any]) -> dict[str, Any]:
    found = [result.ok() for result in schemathesis.openapi.from_dict(source).get_all_operations()]
    return {f"{operation.method} {operation.path}": operation for operation in found}


AGENT = operations(document())


@pytest.mark.parametrize("name", AGENT)
def test_no_request_in_any_dialect_is_a_server_error_or_refused_without_its_shape(served: Served, name: str) -> None:
    statuses = set()

    @few
    @given(data=st.data(), mode=MODES)
    def ask(data: st.DataObject, mode: GenerationMode) -> None:
        answer = served.call(data.draw(AGENT[name].as_strategy(generation_mode=mode)), served.session["api_key"])
        statuses.add(answer.status)
        assert answer.status < 500, answer
        if answer.status != 200:
            assert answer.error["message"]
            assert answer.error["type"]

    ask()
    assert 200 in statuses


@pytest.fixture(scope="module")
def control(served: Served) -> dict[str, Any]:
    """Operations of the control API, by its own document."""
    return operations(served.control.openapi())


CONTROL = (
    *("post /control/runs", "get /control/runs/{run}", "post /control/runs/{run}/admission"),
    *("get /control/runs/{run}/audit", "get /control/runs/{run}/sessions"),
    *("post /control/runs/{run}/samples/claim", "post /control/runs/{run}/samples/finish"),
    *("post /control/runs/{run}/samples/fail", "post /control/runs/{run}/samples/release"),
    *("post /control/runs/{run}/scores/claim", "post /control/runs/{run}/scores/commit"),
    *("post /control/sessions", "get /control/sessions/{session}", "post /control/sessions/{session}/finish"),
    *("post /control/sessions/{session}/reward", "get /control/routes", "put /control/routes/{lease}"),
    *("delete /control/routes/{lease}", "get /healthz"),
)


def test_the_control_api_is_fuzzed_as_a_whole(control: dict[str, Any]) -> None:
    assert set(CONTROL) == set(control)


@pytest.mark.parametrize("name", CONTROL)
def test_no_request_to_the_control_api_is_a_server_error(served: Served, control: dict[str, Any], name: str) -> None:
    served.new_session()
    sessions = st.sampled_from([served.session["session"], *served.claim()])
    known = {"run": st.just(RUN), "session": sessions, "stream": st.just("train"), "worker": st.just("w")}

    @settings(parent=few, max_examples=15)
    @given(data=st.data(), mode=MODES)
    def ask(data: st.DataObject, mode: GenerationMode) -> None:
        case = data.draw(control[name].as_strategy(generation_mode=mode))
        for part in (case.path_parameters or {}, case.body):
            for field, values in known.items() if isinstance(part, dict) else ():
                if field in part and data.draw(st.booleans(), label=f"known {field}"):
                    part[field] = data.draw(values)
        answer = served.call(case, CONTROL_KEY)
        assert answer.status < 500, answer
        if answer.status >= 400:
            assert answer.error["message"]

    ask()


def test_memory_does_not_grow_with_refused_requests_nor_much_with_answered_ones(served: Served) -> None:
    served.new_session()

    @settings(parent=few, max_examples=60)
    @given(data=st.data(), name=st.sampled_from([name for name in AGENT if name.startswith("post")]), mode=MODES)
    def ask(data: st.DataObject, name: str, mode: GenerationMode) -> None:
        served.call(data.draw(AGENT[name].as_strategy(generation_mode=mode)), served.session["api_key"])

    ask()
    tracemalloc.start()
    try:
        ask()
        gc.collect()
        ours = [tracemalloc.Filter(True, f"*/{part}/*") for part in ("proxy", "storage", "workers")]
        grown = sum(stat.size for stat in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))
    finally:
        tracemalloc.stop()
    assert grown < 60 * PER_REQUEST
    assert served.left_behind() == []
