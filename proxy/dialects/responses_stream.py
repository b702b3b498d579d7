"""Events of a streamed Responses answer.

Items open and close in the order in which the model writes. A failure is told
twice: by an ``error`` event whose ``error`` field makes OpenAI's SDK raise (some
clients take a ``response.failed`` for the end of a good answer), and by the
``response.failed`` that other clients wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.dialects.base import AnswerHead, ChoiceAnswer, TokenInfo
from proxy.dialects.responses_output import (
    Item,
    call_item,
    entries,
    error_detail,
    message_item,
    reasoning_item,
    reasoning_part,
    response,
    status_of,
    text_part,
)
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import ToolCall


class ResponsesStream:
    """See the module; implements :class:`~proxy.dialects.base.StreamWriter`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._sequence = 2  # behind the opening, which the server may ask for after the first delta
        self._items: list[Item] = []
        self._calls = 0
        self._open: _OpenItem | None = None
        self._answer: ChoiceAnswer | None = None

    def opening(self) -> bytes:
        started = response(self._head, "in_progress")
        return b"".join(
            _event(kind, number, response=started)
            for number, kind in enumerate(("response.created", "response.in_progress"))
        )

    def delta(self, choice: int, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes:
        if delta.call is not None:
            return self._close() + self._call(delta.call)
        if not delta.text and not delta.reasoning:
            return b""
        before = b""
        if self._open is None or self._open.thought != bool(delta.reasoning):
            before = self._close() + self._start(thought=bool(delta.reasoning))
        return before + self._text(delta.text or delta.reasoning, tokens)

    def finish(self, answer: ChoiceAnswer) -> bytes:
        self._answer = answer
        before = b"" if self._open or self._items else self._start(thought=False)
        if self._open is not None and not self._open.thought:
            self._open.tokens += answer.tokens or ()
        return before + self._close(status_of(answer))

    def closing(self) -> bytes:
        assert self._answer is not None, "finish() comes first"  # noqa: S101  # for the type checker
        status = status_of(self._answer)
        return self._event(f"response.{status}", response=response(self._head, status, self._items, self._answer))

    def failure(self, error: Exception) -> bytes:
        _, detail = error_detail(error)
        told = self._event("error", code=detail["code"], message=detail["message"], param=detail["param"], error=detail)
        output = self._items if self._open is None else [*self._items, self._open.item("incomplete")]
        # The response object has its own few codes.
        code = "server_error" if detail["type"] == "server_error" else "invalid_prompt"
        reason = {"code": code, "message": detail["message"]}
        return told + self._event("response.failed", response=response(self._head, "failed", output, error=reason))

    def _start(self, *, thought: bool) -> bytes:
        opened = self._open = _OpenItem(self._head, len(self._items), thought=thought)
        item = {**opened.item("in_progress"), "content": []}
        if "encrypted_content" in item:
            item["encrypted_content"] = None
        return self._event("response.output_item.added", output_index=opened.index, item=item) + self._event(
            "response.content_part.added", **opened.place, part=opened.part("")
        )

    def _text(self, text: str, tokens: Sequence[TokenInfo]) -> bytes:
        opened = self._open
        assert opened is not None, "an item was started"  # noqa: S101  # for the type checker
        opened.texts.append(text)
        logprobs = b""
        if not opened.thought:
            opened.tokens += tokens
            logprobs = b',"logprobs":' + (orjson.dumps(entries(tokens)) if tokens else b"[]")
        number = self._next()
        return b"".join((opened.before, orjson.dumps(text), logprobs, b',"sequence_number":%d}\n\n' % number))

    def _close(self, status: str = "completed") -> bytes:
        opened, self._open = self._open, None
        if opened is None:
            return b""
        text, item = "".join(opened.texts), opened.item(status)
        self._items.append(item)
        logprobs = {} if opened.thought else {"logprobs": entries(opened.tokens)}
        return b"".join(
            (
                self._event(f"response.{opened.kind}.done", **opened.place, text=text, **logprobs),
                self._event("response.content_part.done", **opened.place, part=item["content"][0]),
                self._event("response.output_item.done", output_index=opened.index, item=item),
            )
        )

    def _call(self, call: ToolCall) -> bytes:
        index = len(self._items)
        item = call_item(self._head, index, self._calls, call)
        self._calls += 1
        self._items.append(item)
        custom = item["type"] == "custom_tool_call"
        field, kind = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        place = {"item_id": item["id"], "output_index": index}
        started = {**item, "status": "in_progress", field: ""}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=index, item=started),
                self._event(f"response.{kind}.delta", **place, delta=item[field]),
                self._event(f"response.{kind}.done", **place, **{field: item[field]}),
                self._event("response.output_item.done", output_index=index, item=item),
            )
        )

    def _event(self, kind: str, **data: Any) -> bytes:
        return _event(kind, self._next(), **data)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1


class _OpenItem:
    """A message or reasoning item that still grows."""

    def __init__(self, head: AnswerHead, index: int, *, thought: bool) -> None:
        self._head = head
        self.index = index
        self.thought = thought
        self.kind = "reasoning_text" if thought else "output_text"
        self.texts: list[str] = []
        self.tokens: list[TokenInfo] = []
        self.place = {"item_id": self.item("in_progress")["id"], "output_index": index, "content_index": 0}
        kind = f"response.{self.kind}.delta"
        self.before = b"".join(
            (
                f"event: {kind}\ndata: ".encode(),
                orjson.dumps({"type": kind, **self.place})[:-1],
                b',"delta":',
            )
        )

    def item(self, status: str) -> Item:
        text = "".join(self.texts)
        if self.thought:
            return reasoning_item(self._head, self.index, text, status)
        return message_item(self._head, self.index, text, self.tokens, status)

    def part(self, text: str) -> dict[str, Any]:
        return reasoning_part(text) if self.thought else text_part(text, ())


def _event(kind: str, number: int, **data: Any) -> bytes:
    body = orjson.dumps({"type": kind, "sequence_number": number, **data})
    return b"".join((b"event: ", kind.encode(), b"\ndata: ", body, b"\n\n"))
