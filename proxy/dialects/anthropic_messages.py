"""Messages and tools of Anthropic's API in canonical form.

A vendor message may stand for several canonical ones: tool results travel
inside user messages, and each becomes a message of its own. They are put in
the order of the calls they answer, because canonical calls have no ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import orjson

from proxy.dialects import fields
from proxy.trajectory.canonical import Message, ToolCall, without_billing
from storage.errors import InvalidRequest, UnsupportedParameter

"""A line that Claude Code puts into its system prompt, different in every request and meant for no model."""

_TOOL_READ = ("type", "name", "description", "input_schema", "cache_control", "eager_input_streaming")
_TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "strict": (False,),
    "defer_loading": (False,),
    "input_examples": ([],),
    "allowed_callers": (["direct"],),
}


def read_conversation(system: Any, messages: Any) -> tuple[Message, ...]:
    """``system`` and ``messages`` of a request."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    found = list(_system(system, "system"))
    calls: list[str] = []
    for index, entry in enumerate(messages):
        where = f"messages.{index}"
        role = entry.get("role") if isinstance(entry, dict) else None
        if role == "assistant":
            message, calls = _assistant(entry.get("content"), f"{where}.content")
            found.append(message)
        elif role == "user":
            found += _user(entry.get("content"), f"{where}.content", calls)
        elif role == "system":
            found += _system(entry.get("content"), f"{where}.content")
        else:
            raise InvalidRequest(f"{where}.role must be user, assistant or system, not {role!r}", param=f"{where}.role")
    if not found:
        raise InvalidRequest("messages hold nothing to answer", param="messages")
    return tuple(found)


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """``tools`` in the form of OpenAI's chat API; the vendor's own (server) tools are refused by name."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("tools must be a list", param="tools")
    return tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(value))


def check_within(
    where: str,
    value: Any,
    *,
    read: Collection[str] = (),
    labels: Collection[str] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """:func:`fields.check_parameters` for an object inside the request, which may be null; names get its name."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    return fields.check_parameters(
        {f"{where}.{name}": item for name, item in value.items() if name not in read},
        read=(),
        labels=[f"{where}.{name}" for name in labels],
        neutral={f"{where}.{name}": values for name, values in (neutral or {}).items()},
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise UnsupportedParameter(f"{where}: a tool of type {kind!r} is not supported, only custom ones", param=where)
    check_within(where, tool, read=_TOOL_READ, neutral=_TOOL_NEUTRAL)
    function: dict[str, Any] = {"name": tool.get("name")}
    if not isinstance(function["name"], str) or not function["name"]:
        raise InvalidRequest(f"{where}.name must be a non-empty string", param=f"{where}.name")
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequest(f"{where}.input_schema must be an object", param=f"{where}.input_schema")
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _system(content: Any, where: str) -> Iterator[Message]:
    """At most one message: instructions without the billing line; none if nothing else is there."""
    if content is None:
        return
    texts = [content] if isinstance(content, str) else [text for _, text in _blocks(content, where, {"text": _text})]
    text = "".join(without_billing(text) for text in texts)
    if text:
        yield Message("system", text)


def _user(content: Any, where: str, calls: Sequence[str]) -> Iterator[Message]:
    """Tool results, in the order of ``calls`` (ids of the assistant's calls before), then the user's own words."""
    if isinstance(content, str):
        yield Message("user", content)
        return
    results: list[tuple[int, Message]] = []
    texts: list[str] = []
    for kind, value in _blocks(content, where, {"text": _text, "tool_result": _result}):
        if kind == "text":
            texts.append(value)
            continue
        if texts:
            raise InvalidRequest(f"{where}: tool_result blocks must come before text", param=where)
        answered, message = value
        results.append((calls.index(answered) if answered in calls else len(calls), message))
    for _, message in sorted(results, key=lambda result: result[0]):
        yield message
    if texts or not results:
        yield Message("user", "".join(texts))


def _assistant(content: Any, where: str) -> tuple[Message, list[str]]:
    """The message and the ids of its calls."""
    if isinstance(content, str):
        return Message("assistant", content), []
    readers = {"text": _text, "thinking": _thought, "redacted_thinking": _nothing, "tool_use": _call}
    found: dict[str, list[Any]] = {kind: [] for kind in readers}
    for kind, value in _blocks(content, where, readers):
        found[kind].append(value)
    calls = tuple(call for _, call in found["tool_use"])
    message = Message("assistant", "".join(found["text"]), "".join(found["thinking"]), calls)
    return message, [identity for identity, _ in found["tool_use"]]


def _blocks(
    content: Any, where: str, readers: Mapping[str, Callable[[dict[str, Any], str], Any]]
) -> Iterator[tuple[str, Any]]:
    """(type, what its reader made of it) of each block; a type without reader is refused by name."""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of blocks", param=where)
    for index, block in enumerate(content):
        place = f"{where}.{index}"
        if not isinstance(block, dict):
            raise InvalidRequest(f"{place} must be an object", param=place)
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in readers:
            allowed = ", ".join(readers)
            raise UnsupportedParameter(
                f"{place}: content of type {kind!r} is not supported here, only {allowed}", param=place
            )
        yield kind, readers[kind](block, place)


def _text(block: dict[str, Any], where: str) -> str:
    return _string(block, "text", where)


def _thought(block: dict[str, Any], where: str) -> str:
    """Reasoning; signatures are not checked."""
    return _string(block, "thinking", where)


def _nothing(block: dict[str, Any], where: str) -> None:
    """Reasoning that only its vendor can read: this server never wrote it, and no template can render it."""


def _call(block: dict[str, Any], where: str) -> tuple[str, ToolCall]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")
    try:
        written = orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError as error:  # it reads deeper than it writes
        raise InvalidRequest(f"{where}.input: {error}", param=f"{where}.input") from None
    return _string(block, "id", where), ToolCall(_string(block, "name", where), written)


def _result(block: dict[str, Any], where: str) -> tuple[str, Message]:
    """(id of the call, the tool's message). Templates know no failed result: the text says it."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        text = "".join(text for _, text in _blocks(content, f"{where}.content", {"text": _text}))
    if fields.optional(block, "is_error", bool):
        text = f"Error: {text}"
    return _string(block, "tool_use_id", where), Message("tool", text)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
