"""The bytes of one answer on the two wires of the benchmark's engine, made once for all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from workers.engines.wire import GenerateRequest, VersionSpans, event, finish_reason

END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
"""The last chunk of every stream."""
PROMPT_MARK = b'"<prompt>"'
"""Where the ids of the prompt go on the chat wire."""
_RID_MARK = "<rid>"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is generated: ``texts`` are the pieces of ``ids``; the last id is the end of turn, without text."""

    ids: list[int]
    texts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class Wires:
    """An answer in the bytes of both wires. ``native`` events are cut where the request id goes."""

    answer: Answer
    version: str
    native: list[list[bytes]] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)
    chat: list[bytes] = field(default_factory=list)
    chat_ids: list[bytes] = field(default_factory=list)
    whole: bytes = b""
    whole_ids: bytes = b""


def make_wires(answer: Answer, version: str) -> Wires:
    """All bytes that do not depend on the request."""
    request = GenerateRequest(_RID_MARK, (0,) * 4000, logprobs=True, stream=True)
    logs = logprobs(len(answer.ids))
    spans, wires, last = VersionSpans(), Wires(answer, version), len(answer.ids) - 1
    tokens = []
    for at, (token, text) in enumerate(zip(answer.ids, answer.texts, strict=True)):
        spans.add(version, 1)
        finish = finish_reason("stop", matched=token) if at == last else None
        item = event(
            request, [token], [logs[at]], completion_tokens=at + 1, version=version, finish=finish, spans=spans
        )
        wires.native.append(frame(item).split(_RID_MARK.encode()))
        tokens.append({"token": text, "logprob": logs[at], "bytes": list(text.encode()), "top_logprobs": []})
        wires.chat.append(frame(_chat_event(text, at == last, None, None)))
        wires.chat_ids.append(frame(_chat_event(text, at == last, {"content": [tokens[-1]]}, [token])))
    bare = event(request, [], [], completion_tokens=0, version=version, finish=finish_reason("abort"))
    del bare["meta_info"]["completion_tokens"]
    wires.aborted = frame(bare).split(_RID_MARK.encode())
    # The first event of a chat stream also carries the role; vLLM's separate one would be one event more.
    for events in (wires.chat, wires.chat_ids):
        events[0] = events[0].replace(b'"delta":{', b'"delta":{"role":"assistant",')
    wires.chat_ids[0] = wires.chat_ids[0].replace(b'"choices"', b'"prompt_token_ids":"<prompt>","choices"')
    wires.whole = orjson.dumps(_chat_whole(answer, None, None))
    wires.whole_ids = orjson.dumps(
        {**_chat_whole(answer, {"content": tokens}, answer.ids), "prompt_token_ids": "<prompt>"}
    )
    return wires


def _chat_event(text: str, last: bool, logs: dict[str, Any] | None, ids: list[int] | None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "delta": {"content": text},
        "logprobs": logs,
        "finish_reason": "stop" if last else None,
        "token_ids": ids,
    }
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1760000000}
    return {**head, "model": "policy", "choices": [choice]}


def _chat_whole(answer: Answer, logs: dict[str, Any] | None, ids: list[int] | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": logs, "finish_reason": "stop", "token_ids": ids}
    usage = {"prompt_tokens": 4000, "completion_tokens": len(answer.ids), "total_tokens": 4000 + len(answer.ids)}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1760000000}
    return {**head, "model": "policy", "choices": [choice], "usage": usage}


def logprobs(count: int) -> list[float]:
    """As long on the wire as real ones."""
    return [-0.0123456789012345 * (1 + at % 97) for at in range(count)]


def mixed_end(rid: bytes, before: Sequence[tuple[str, int]], now: Wires) -> bytes:
    """The last event of a generation that saw other weights ``before``: each version, with the tokens up to its end."""
    spans, sent, count = VersionSpans(), 0, len(now.answer.ids)
    for version, end in (*before, (now.version, count)):
        spans.add(version, end - sent)
        sent = end
    last = now.answer.ids[-1]
    finish = finish_reason("stop", matched=last)
    request = GenerateRequest(rid.decode(), (0,) * 4000, logprobs=True, stream=True)
    log = logprobs(count)[-1:]
    return frame(event(request, [last], log, completion_tokens=count, version=now.version, finish=finish, spans=spans))


def frame(item: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(item) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
