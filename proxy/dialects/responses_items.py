"""Items and tools of OpenAI's Responses API in canonical form.

An answer comes back as several items (reasoning, message, calls); neighbours of
these kinds are one assistant message again. ``encrypted_content`` of a reasoning
item is our own readable encoding of the text: a value of anyone else cannot be
opened and is refused, since the model would silently lose what it stands for.

A custom tool is shown to the model as a function of one string, ``input``; a
grammar for it is told in the description and not enforced.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import orjson

from proxy.dialects import fields
from proxy.dialects.base import ToolChoice
from proxy.dialects.chat import forced_choice
from proxy.trajectory.canonical import Message, ToolCall
from storage.errors import InvalidRequest, UnsupportedParameter

_ROLES = ("user", "system", "developer", "assistant")
_TEXT = ("input_text", "output_text")
_SEAL = "seamlessflow-reasoning-1"
_TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}


class _Item(NamedTuple):
    message: Message
    call_id: str = ""


def read_input(value: Any) -> tuple[Message, ...]:
    """``input``: a user's text, or items. Keys of an item that mean nothing to the model are left out."""
    if isinstance(value, str):
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input must be a string or a list with at least one item", param="input")
    return tuple(_merged([_item(item, f"input[{index}]") for index, item in enumerate(value)]))


def read_tools(value: Any) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """``tools`` as the chat API has them, and the names of custom tools."""
    if value is None:
        return (), frozenset()
    if not isinstance(value, list):
        raise InvalidRequest("tools must be a list", param="tools")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools has two tools of one name", param="tools")
    return tools, frozenset(tool["name"] for tool in value if tool["type"] == "custom")


def read_tool_choice(value: Any, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """``tool_choice``: a word, or a tool that must be among ``tools``."""
    if value is None or value in ("auto", "none"):
        return ToolChoice(value or "auto")
    if value == "required":
        return forced_choice("", tools)
    if isinstance(value, dict) and value.get("type") in ("function", "custom") and value.get("name"):
        return forced_choice(value["name"], tools)
    kind = value.get("type") if isinstance(value, dict) else value
    raise UnsupportedParameter(
        f'tool_choice {kind!r} is not supported, only "auto", "none", "required", '
        '{"type": "function", "name": ...} and {"type": "custom", "name": ...}',
        param="tool_choice",
    )


def check_nested(
    data: Mapping[str, Any], where: str, *, read: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """As :func:`proxy.dialects.fields.check_parameters`, for an object inside the request."""
    fields.check_parameters(
        {f"{where}.{name}": value for name, value in data.items()},
        read={f"{where}.{name}" for name in read},
        labels=(),
        neutral={f"{where}.{name}": allowed for name, allowed in neutral.items()},
    )


def seal_reasoning(text: str) -> str:
    """``encrypted_content`` of a reasoning item; :func:`open_reasoning` is the inverse."""
    return base64.b64encode(orjson.dumps([_SEAL, text])).decode()


def open_reasoning(value: Any, where: str) -> str:
    """The text in ``encrypted_content``; raises InvalidRequest if it is none of ours."""
    try:
        mark, text = orjson.loads(base64.b64decode(value, validate=True))
    except (TypeError, ValueError):
        mark, text = None, None
    if mark != _SEAL or not isinstance(text, str):
        raise InvalidRequest(f"{where} was not made by this server: it cannot be read here", param=where)
    return text


def custom_arguments(text: str) -> str:
    """A custom call's input as arguments of its function."""
    return orjson.dumps({"input": text}).decode()


def custom_input(arguments: str) -> str | None:
    """The input of a call of a custom tool; None if the model did not keep to the form."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    text = value["input"] if isinstance(value, dict) and set(value) == {"input"} else None
    return text if isinstance(text, str) else None


def _merged(items: Sequence[_Item]) -> Iterator[Message]:
    for role, group in groupby(items, key=lambda item: item.message.role):
        if role == "assistant":
            parts = [item.message for item in group]
            yield Message(
                "assistant",
                "".join(part.content for part in parts),
                "".join(part.reasoning for part in parts),
                tuple(chain.from_iterable(part.tool_calls for part in parts)),
            )
        elif role == "tool":
            yield from (item.message for item in _in_call_order(list(group)))
        else:
            yield from (item.message for item in group)


def _in_call_order(outputs: list[_Item]) -> list[_Item]:
    """Results of one of our answers in the order of its calls: the canonical form has no ids to match them by."""
    calls = {item.call_id[:-4] for item in outputs}
    if len(calls) == 1 and all(item.call_id[-4:].isdigit() for item in outputs):
        return sorted(outputs, key=lambda item: item.call_id)
    return outputs


def _item(item: Any, where: str) -> _Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "message":
        return _Item(_message(item, where))
    if kind == "reasoning":
        return _Item(Message("assistant", reasoning=_reasoning(item, where)))
    if kind == "function_call":
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise InvalidRequest(f"{where}.arguments must be a string", param=f"{where}.arguments")
        return _Item(_call(item, arguments, where))
    if kind == "custom_tool_call":
        if not isinstance(item.get("input"), str):
            raise InvalidRequest(f"{where}.input must be a string", param=f"{where}.input")
        return _Item(_call(item, custom_arguments(item["input"]), where))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _output(item, where)
    raise UnsupportedParameter(f"{where}: items of type {kind!r} are not supported by this server", param=where)


def _message(item: dict[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}", param=f"{where}.role")
    # Chat templates know one role for instructions.
    return Message("system" if role == "developer" else role, _text(item.get("content"), f"{where}.content"))


def _reasoning(item: dict[str, Any], where: str) -> str:
    if item.get("encrypted_content"):
        return open_reasoning(item["encrypted_content"], f"{where}.encrypted_content")
    shown = _text(item.get("content") or "", f"{where}.content", ("reasoning_text", "text"))
    return shown or _text(item.get("summary") or "", f"{where}.summary", ("summary_text",))


def _call(item: dict[str, Any], arguments: str, where: str) -> Message:
    if not isinstance(item.get("name"), str) or not item["name"]:
        raise InvalidRequest(f"{where}.name must be a non-empty string", param=f"{where}.name")
    return Message("assistant", tool_calls=(ToolCall(item["name"], arguments),))


def _output(item: dict[str, Any], where: str) -> _Item:
    if not isinstance(item.get("call_id"), str):
        raise InvalidRequest(f"{where}.call_id must be a string", param=f"{where}.call_id")
    return _Item(Message("tool", _text(item.get("output"), f"{where}.output")), item["call_id"])


def _text(content: Any, where: str, kinds: Collection[str] = _TEXT) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    return "".join(_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def _part(part: Any, where: str, kinds: Collection[str]) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    if part.get("type") not in kinds:
        raise UnsupportedParameter(f"{where}: content of type {part.get('type')!r} is not supported", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
    return str(part["text"])


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise UnsupportedParameter(
            f'{where}: tools of type {kind!r} are not supported by this server, only "function" and "custom"',
            param=where,
        )
    own = ("parameters", "strict") if kind == "function" else ("format",)
    check_nested(tool, where, read=("type", "name", "description", *own), neutral=_TOOL_NEUTRAL)
    for name, expected in (("name", str), ("description", str), ("parameters", dict), ("format", dict)):
        if not isinstance(tool.get(name), expected | None):
            raise InvalidRequest(f"{where}.{name} must be of type {expected.__name__}", param=f"{where}.{name}")
    if not tool.get("name"):
        raise InvalidRequest(f"{where}.name must be a non-empty string", param=f"{where}.name")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("parameters")}
    if kind == "custom":
        function["description"] = _custom_description(tool, where)
        function["parameters"] = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _custom_description(tool: dict[str, Any], where: str) -> str | None:
    description: str | None = tool.get("description")
    form = tool.get("format") or {"type": "text"}
    if form.get("type") == "text":
        return description
    syntax, definition = form.get("syntax"), form.get("definition")
    if form.get("type") != "grammar" or not isinstance(syntax, str) or not isinstance(definition, str):
        where = f"{where}.format"
        raise InvalidRequest(f"{where} must be text, or a grammar with syntax and definition", param=where)
    told = f"The input must match this {syntax} grammar:\n{definition}"
    return f"{description}\n\n{told}" if description else told
