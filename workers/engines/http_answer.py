"""One answer of an HTTP/1.1 server, parsed as its bytes come. Pure: no I/O. Strict where it may be."""

from __future__ import annotations

import httptools

OVERHEAD = 64 * 2**10
"""Longest head, and most bytes between two pieces of body."""


class Answer:
    """What has come of the answer to one request."""

    def __init__(self) -> None:
        self.status = 0
        """0 while the head is not whole; informational answers before it are passed over."""
        self.pieces: list[bytes] = []
        """Of the body, chunked or not. Whoever reads takes them away."""
        self.complete = False
        self.fault = ""
        """Why nothing more can come of it."""
        self.reusable = False
        """Once complete: whether the connection can carry another request."""
        self.unheard = True
        """Not a byte has come."""
        self._parser = httptools.HttpResponseParser(self)
        self._parsed = False
        self._interim = False
        self._framed = False
        self._overhead = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the connection."""
        self.unheard = False
        if self._parsed:
            self.reusable = False  # what follows an answer belongs to no request
            return
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.reusable = False
            self.fail(f"the engine sent what is no HTTP answer: {error}")
        if self._overhead > OVERHEAD:
            self.fail(f"the engine sent more than {OVERHEAD} bytes that are no body")
        if self.complete or self.fault:
            self._parsed = True
            del self._parser  # it holds us: only the garbage collector would find the two

    def end(self, how: str) -> None:
        """The connection was closed; ``how`` is empty if in good order."""
        if self.status and not self._framed and not how and not self.fault:
            self.complete, self.reusable = True, False  # its end is the body's
        where = "in the body" if self.status else "before it answered" if self.unheard else "in the head"
        self.fail(f"the engine closed the connection {where}{how}")

    def fail(self, why: str) -> None:
        """Without effect on an answer that is complete or has failed."""
        if not self.complete and not self.fault:
            self.fault = why

    # What the parser calls

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # what follows an answer belongs to no request
        else:
            self._interim = self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.complete or self.status:
            return
        name, value = name.lower(), value.strip().lower()
        if name in (b"transfer-encoding", b"content-length"):
            self._framed = True
        if (name == b"transfer-encoding" and value != b"chunked") or (
            name == b"content-encoding" and value != b"identity"
        ):
            self.fail(f"the engine sent a body in an encoding that was not asked for: {value!r}")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if not self._interim and not self.complete:
            self.status = status
            self.reusable = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._overhead = 0
        if not self.complete and not self.fault:
            self.pieces.append(data)

    def on_message_complete(self) -> None:
        if not self._interim and not self.fault:
            self.complete = True
