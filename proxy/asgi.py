"""The little of ASGI that the agent API needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from storage.errors import RequestTooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GONE = "gone"
"""Key of the scope under which our server has a future that is done when the client is gone. It is the connection's:
not to be cancelled."""
IDLE_S = 600
"""How long a connection without a request is kept. Clients give theirs up after 5 to 60 s, and one that sends its next
request while the server hangs up sees an error."""
MAX_BODY = 64 * 1024 * 1024
"""Longest request body in bytes."""


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client went away."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise RequestTooLarge(f"the request body is longer than {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def reply(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
