"""Messages and tools of OpenAI's chat API in canonical form."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.trajectory.canonical import Message, ToolCall, without_billing
from storage.errors import InvalidRequest, UnsupportedParameter

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: Any) -> tuple[Message, ...]:
    """``messages`` of a request: unknown keys (clients add their own) are left out, unknown content is refused."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    messages = [_message(value, index) for index in range(len(value))]
    if any(message.role == "tool" for message in messages):
        messages = _in_call_order(messages, value)
    return tuple(messages)


def _in_call_order(messages: list[Message], entries: list[dict[str, Any]]) -> list[Message]:
    """Results of parallel calls in the order of the calls: the canonical form has no ids to match them by."""
    ordered: list[Message] = []
    results: list[tuple[int, Message]] = []
    calls: list[Any] = []
    for message, entry in zip(messages, entries, strict=True):
        if message.role == "tool":
            answered = entry.get("tool_call_id")
            results.append((calls.index(answered) if answered in calls else len(calls), message))
            continue
        ordered += [result for _, result in sorted(results, key=lambda found: found[0])]
        results, calls = [], [call.get("id") for call in entry.get("tool_calls") or ()]
        ordered.append(message)
    return ordered + [result for _, result in sorted(results, key=lambda found: found[0])]


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """``tools`` of a request: function tools with a name."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("tools must be a list", param="tools")
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise UnsupportedParameter(f'{where}: only tools of type "function" are supported', param=where)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise InvalidRequest(f"{where}.function.parameters must be an object", param=f"{where}.function.parameters")
    return tuple(value)


def _message(entries: list[Any], index: int) -> Message:
    entry = entries[index]
    if not isinstance(entry, dict):
        raise InvalidRequest(f"messages[{index}] must be an object", param=f"messages[{index}]")
    role, content = entry.get("role"), entry.get("content")
    if role in ("user", "assistant") and type(content) is str and len(entry) == 2:
        return Message(role, content)
    where = f"messages[{index}]"
    if role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}", param=f"{where}.role")
    if entry.get("function_call"):
        raise UnsupportedParameter(f"{where}.function_call is not supported: use tool_calls", param=where)
    text = _text(content, f"{where}.content")
    if role in ("system", "developer"):
        role, text = "system", without_billing(text)  # chat templates know one role for instructions
    return Message(
        role,
        text,
        _reasoning(entry, where),
        _calls(entry.get("tool_calls"), f"{where}.tool_calls"),
        entry["name"] if isinstance(entry.get("name"), str) else "",
    )


def _reasoning(entry: dict[str, Any], where: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        value = entry.get(name)
        if value is not None:
            return _text(value, f"{where}.{name}")
    return ""


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    if part.get("type") != "text":
        raise UnsupportedParameter(f"{where}: content of type {part.get('type')!r} is not supported", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param=where)
    return str(part["text"])


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return tuple(_call(entry, f"{where}[{index}]") for index, entry in enumerate(value))


def _call(entry: Any, where: str) -> ToolCall:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name must be a string", param=where)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str):
        # Some clients send the object itself.
        arguments = orjson.dumps(arguments).decode()
    return ToolCall(function["name"], arguments)
