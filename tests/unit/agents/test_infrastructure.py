"""Whose fault was it: what counts as a failure of the infrastructure, for the clients that agents use."""

from __future__ import annotations

import aiohttp
import httpx2 as httpx
import openai
import pytest
from yarl import URL

from workers.agents.infrastructure import chain, is_infrastructure

BASE = "http://127.0.0.1:8123/s/abc/v1"
REQUEST = httpx.Request("POST", f"{BASE}/chat/completions")
ELSEWHERE = httpx.Request("GET", "http://127.0.0.1:9000/tool")


def status_error(kind: type[openai.APIStatusError], status: int) -> openai.APIStatusError:
    return kind("no", response=httpx.Response(status, request=REQUEST), body=None)


def raised_from(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


def key(host: str, port: int) -> aiohttp.client_reqrep.ConnectionKey:
    return aiohttp.client_reqrep.ConnectionKey(host, port, False, True, None, None, None)


FAULTS = {
    "openai connection": openai.APIConnectionError(request=REQUEST),
    "openai time-out": openai.APITimeoutError(request=REQUEST),
    "openai 500": status_error(openai.InternalServerError, 500),
    "openai 503": status_error(openai.InternalServerError, 503),
    "error event in a stream": openai.APIError("gone", REQUEST, body={"type": "server_error"}),
    "stream cut": httpx.RemoteProtocolError("peer closed connection", request=REQUEST),
    "read error": httpx.ReadError("reset", request=REQUEST),
    "aiohttp cut": aiohttp.ServerDisconnectedError(),
    "aiohttp refused": aiohttp.ClientConnectorError(key("127.0.0.1", 8123), OSError(111, "refused")),
    "plain reset": ConnectionResetError(104, "reset"),
    "wrapped": raised_from(RuntimeError("my agent failed"), openai.APIConnectionError(request=REQUEST)),
    "in a group": ExceptionGroup("tools", [ValueError("x"), ConnectionRefusedError()]),
}

OWN = {
    "plain error": ValueError("no"),
    "openai 400": status_error(openai.BadRequestError, 400),
    "openai 401": status_error(openai.AuthenticationError, 401),
    "openai 429": status_error(openai.RateLimitError, 429),
    "invalid request event": openai.APIError("bad", REQUEST, body={"type": "invalid_request_error"}),
    "a tool's server": httpx.ConnectError("refused", request=ELSEWHERE),
    "a tool's server, aiohttp": aiohttp.ClientConnectorError(key("127.0.0.1", 9000), OSError(111, "refused")),
    "own time-out": TimeoutError(),
    "own file": FileNotFoundError("x"),
    "url": aiohttp.InvalidURL(URL("x")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_way_to_the_model_are_infrastructure(name: str) -> None:
    assert is_infrastructure(FAULTS[name], BASE)


@pytest.mark.parametrize("name", OWN)
def test_what_an_agent_does_wrong_is_its_own(name: str) -> None:
    assert not is_infrastructure(OWN[name], BASE)


def test_errors_that_refer_to_each_other_are_walked_once() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__context__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]
