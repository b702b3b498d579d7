"""Messages as one chat template wants them: templates disagree, and asking them is the only way to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from proxy.trajectory.canonical import Message, ToolCall
from storage.errors import InvalidRequest

Render = Callable[[list[dict[str, Any]]], str]

_USER = Message("user", "q7Zx4Wk9")
_CALL = Message("assistant", tool_calls=(ToolCall("fn7Zx", '{"k7Zx": "v7Zx", "n7Zx": 5}'),))
_THOUGHT = Message("assistant", "c7Zx", reasoning="r7Zx")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Found by :meth:`of`. Call ids, which canonical messages have not, are made from a call's place in its message."""

    arguments_as_text: bool = False
    """Arguments of calls are passed as the model's text, not as an object."""
    empty: str | None = ""
    """Content of a message that is only calls."""
    reasoning_in_content: bool = False
    """Reasoning is a block of the content, not a field beside it."""

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """``messages`` for the template; results belong to the calls in front of them, in order."""
        result = 0
        written = []
        for message in messages:
            data = self._message(message)
            if message.role == "tool":
                data["tool_call_id"] = call_id(result)
                result += 1
            else:
                result = 0
            written.append(data)
        return written

    def _message(self, message: Message) -> dict[str, Any]:
        data = message.for_template()
        for number, (written, call) in enumerate(zip(data.get("tool_calls", ()), message.tool_calls, strict=True)):
            written["id"] = call_id(number)
            if self.arguments_as_text:
                written["function"]["arguments"] = call.arguments or "{}"
        if message.tool_calls and not message.content:
            data["content"] = self.empty
        if message.reasoning:
            data["thinking"] = message.reasoning  # transformers passes it under both names
            if self.reasoning_in_content:
                data["content"] = _blocks(message)
        return data

    @classmethod
    def of(cls, render: Render) -> MessageForm:
        """The form in which ``render`` shows calls and reasoning as they are; the usual one if none does."""
        calls = [
            (len(text), form)
            for as_text, empty in product((False, True), ("", None))
            if (text := _shown(render, form := cls(as_text, empty), _CALL)) and _faithful(text)
        ]
        form = min(calls, key=lambda found: found[0])[1] if calls else cls()
        if "r7Zx" in _shown(render, form, _THOUGHT):
            return form
        blocks = cls(form.arguments_as_text, form.empty, reasoning_in_content=True)
        text = _shown(render, blocks, _THOUGHT)
        return (
            blocks
            if "r7Zx" in text and "c7Zx" in text and "thinking'" not in text and 'thinking"' not in text
            else form
        )


def call_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return f"call{number:05d}"


def _blocks(message: Message) -> list[dict[str, str]]:
    blocks = [{"type": "thinking", "thinking": message.reasoning}]
    return [*blocks, {"type": "text", "text": message.content}] if message.content else blocks


def _shown(render: Render, form: MessageForm, answer: Message) -> str:
    """The template's text behind the user's message; empty if it refuses."""
    try:
        return render(form.messages([_USER, answer])).rpartition(_USER.content)[2]
    except InvalidRequest:
        return ""


def _faithful(text: str) -> bool:
    """Whether a call is there, and neither as Python writes it nor quoted twice."""
    wrong = ("{'k7Zx'", '\\"k7Zx', "None")
    return all(part in text for part in ("fn7Zx", "k7Zx", "v7Zx")) and not any(part in text for part in wrong)
