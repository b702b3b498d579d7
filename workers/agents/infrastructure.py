"""Telling an agent's own errors from those of the infrastructure under it.

An agent may use any client, so this looks at what all of them have in common: the HTTP status that an exception
carries, or the kind of connection error it wraps. Only what happened towards the proxy counts: a tool of the agent that
cannot reach its own server is the agent's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

CLIENTS = (
    "openai",
    "anthropic",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "aiohttp",
    "requests",
    "urllib3",
    "litellm",
)
CONNECTION_WORDS = (
    "Connect",
    "Connection",
    "Transport",
    "Protocol",
    "ReadError",
    "WriteError",
    "Disconnected",
    "Payload",
)


def is_infrastructure(error: BaseException, base_url: str) -> bool:
    """Whether ``error``, or what it was raised from, is a failure of the proxy at ``base_url`` or of the way to it."""
    return any(_is_fault(link) and _concerns(link, base_url) for link in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, contexts and, for groups, their members; each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [other for other in (link.__cause__, link.__context__) if other is not None]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _is_fault(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500
    if isinstance(error, ConnectionError):
        return True
    if type(error).__module__.partition(".")[0] not in CLIENTS:
        return False
    # Time-outs of a client are kinds of its connection errors: a request may be held for longer than a client waits.
    names = [kind.__name__ for kind in type(error).__mro__]
    return _server_said(error) or any(word in name for name in names for word in CONNECTION_WORDS)


def _status(error: BaseException) -> int | None:
    """HTTP status on the exception or on its response, under the names that clients use."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and not isinstance(status, bool) and 100 <= status < 600:
                return status
    return None


def _server_said(error: BaseException) -> bool:
    """An error event inside a stream that had begun with status 200."""
    body = getattr(error, "body", None)
    kind = body.get("type") if isinstance(body, dict) else getattr(error, "type", None)
    return kind in ("server_error", "api_error", "overloaded_error")


def _concerns(error: BaseException, base_url: str) -> bool:
    """False only if the error names another address than the proxy's."""
    proxy = urlsplit(base_url)
    port = getattr(error, "port", None)
    if isinstance(port, int):
        return port == proxy.port
    try:
        url = getattr(getattr(error, "request", None), "url", None)
    except RuntimeError:  # httpx: no request was set
        url = None
    return url is None or urlsplit(str(url)).netloc == proxy.netloc
