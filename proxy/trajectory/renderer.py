"""From messages to token ids, and the proof that a conversation may be continued from its recorded ids.

Loads a Hugging Face model directory with ``tokenizers`` and jinja2 only; ids
equal ``transformers``' ``apply_chat_template`` (tested). A turn that extends a
recorded one is never rendered again: its prompt is the recorded ids plus
:meth:`Renderer.continuation`, the ids of what the template puts behind the
assistant's end-of-turn token. That this is the same text the template would
have produced is proved at start-up on sample conversations, with and without
reasoning; where it cannot be proved, :attr:`Renderer.continuation_refusal`
says why and turns are rendered in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proxy.trajectory import model_files, reasoning, toolcalls
from proxy.trajectory.canonical import Message, ToolCall, parsed_arguments
from proxy.trajectory.codec import Codec
from proxy.trajectory.families import Family, detect
from proxy.trajectory.message_form import MessageForm
from proxy.trajectory.reading import Reading
from proxy.trajectory.template import ChatTemplate
from proxy.trajectory.toolcalls import Tools
from proxy.trajectory.tree import Ids
from storage.errors import ConfigError, InvalidRequest

_SENTINEL = "q7Zx4Wk9"
"""Content that stands for an answer while the text behind it is sought: letters and digits survive any template."""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_USER, _AGAIN, _SYSTEM = (
    Message("user", "What is 7 + 41?"),
    Message("user", "And 3 + 4?"),
    Message("system", "Be brief."),
)
_SAID, _RESULT = Message("assistant", "48"), Message("tool", "48")
_CALL = ToolCall("add", '{"a": 7, "b": 41}')
_CALLED, _CALLED_TWICE = Message("assistant", tool_calls=(_CALL,)), Message("assistant", tool_calls=(_CALL, _CALL))


class Renderer:
    """Tokenizer and chat template of one model directory.

    Raises :class:`ConfigError` when the directory lacks a tokenizer, a chat
    template or an end-of-sequence token.
    """

    def __init__(self, model_path: str | Path) -> None:
        folder = Path(model_path)
        tokenizer = model_files.load_tokenizer(folder)
        self.special_tokens = model_files.special_tokens(folder)
        self._source = model_files.template_source(folder)
        self._template = ChatTemplate(self._source, self.special_tokens)
        self._codec = Codec(tokenizer, "".join((self._source, *self.special_tokens.values())))
        self._form = MessageForm.of(lambda messages: self._template.render(messages, [_TOOL], prompt=False))
        self.eos_text, self.eos_id, self.eos_ids = self._end_of_turn(folder)
        self.vocab_size = model_files.vocab_size(folder, tokenizer)
        self.takes_thinking = self._template.takes_thinking
        """Whether the template asks if the model shall reason."""
        self._readings: dict[tuple[str, str, str, str], Reading] = {}
        self.family = self._detect()
        """What ``auto`` means for this model."""
        self._tools_behind = True
        self._tools_behind = self._show_tools_behind()
        self.continuation_refusal = self._prove()

    def prompt(self, messages: Sequence[Message], tools: Tools | None, *, thinking: bool | None = None) -> Ids:
        """Ids of the whole conversation, ending where the assistant's turn begins."""
        return self.encode(self.text(messages, tools, prompt=True, thinking=thinking))

    def text(
        self, messages: Sequence[Message], tools: Tools | None, *, prompt: bool, thinking: bool | None = None
    ) -> str:
        """The template's text of ``messages``; ``thinking`` is its ``enable_thinking``, None leaves it out."""
        written = self._form.messages(messages)
        return self._template.render(written, list(tools) if tools else None, prompt=prompt, thinking=thinking)

    def continuation(
        self,
        answer: Message,
        new: Sequence[Message],
        tools: Tools | None,
        *,
        ended: bool,
        thinking: bool | None = None,
    ) -> Ids:
        """Ids that follow the recorded tokens of ``answer`` when ``new`` messages come after it.

        ``ended``: the recorded tokens end with the end-of-turn token; otherwise
        (cut by its token limit) that token comes first. Call only while
        :attr:`continuation_refusal` is empty.
        """
        ids = self.encode(self.eos_text + self._behind(_stand_in(answer), new, tools, thinking))
        return ids[1:] if ended else ids

    def reading(self, tool_parser: str, reasoning_parser: str, opening: str = "", closing: str = "") -> Reading:
        """How answers are read with these parsers (not ``auto``). Raises ConfigError for one that does not exist."""
        key = (tool_parser, reasoning_parser, opening, closing)
        if key not in self._readings:
            calls = toolcalls.parser_factory(tool_parser, opening, closing, template=self._source)
            marks = toolcalls.marks(tool_parser, opening, closing) + reasoning.MARKS.get(reasoning_parser, ())
            decode, hidden = self._codec.decoder(marks)
            self._readings[key] = Reading(decode, hidden, calls, reasoning_parser)
        return self._readings[key]

    def encode(self, text: str) -> Ids:
        """Ids of ``text``; tokens written out in it count, none is added."""
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._codec.decode(ids)

    def token_text(self, token: int) -> str:
        """Text of one token, special ones included."""
        return self.raw_text([token])

    def raw_text(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return self._codec.raw_text(list(ids))

    def checked(self, ids: Sequence[int]) -> Ids:
        """Ids that a client sent; raises InvalidRequest for one outside the vocabulary, which can kill an engine."""
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size}", param="prompt")
        return np.asarray(ids, np.int32)

    def _behind(self, stand_in: Message, new: Sequence[Message], tools: Tools | None, thinking: bool | None) -> str:
        """What the template puts behind the end of an answer, found by rendering a short stand-in conversation."""
        tools = tools if self._tools_behind else None  # their JSON costs more than all the rest
        return self._cut(self.text([Message("user", "x"), stand_in, *new], tools, prompt=True, thinking=thinking))

    def _cut(self, text: str) -> str:
        """The text behind the end of the stand-in's turn."""
        start = text.rfind(_SENTINEL)
        end = text.find(self.eos_text, start) if start >= 0 else -1
        if end < 0:
            raise InvalidRequest(
                "the model's chat template leaves out the assistant's answer or its end", param="messages"
            )
        return text[end + len(self.eos_text) :]

    def _show_tools_behind(self) -> bool:
        """Whether what the template puts behind an answer may depend on the tools."""
        for _, answer, new, tools in _samples():
            for thinking in (None, False, True) if tools else ():
                try:
                    expected = self._behind(_stand_in(answer), new, tools, thinking)
                except InvalidRequest:
                    continue
                try:
                    if self._behind(_stand_in(answer), new, None, thinking) != expected:
                        return True
                except InvalidRequest:
                    return True
        return False

    def _prove(self) -> str:
        """Empty if every sample conversation continues as the template renders it, else the reason why not."""
        proved = 0
        for history, answer, new, tools in _samples():
            for thinking in (None, False, True) if self.takes_thinking else (None,):
                whole = [*history, _stand_in(answer, whole=True), *new]
                try:
                    expected = self._cut(self.text(whole, tools, prompt=True, thinking=thinking))
                    suffix = self._behind(_stand_in(answer), new, tools, thinking)
                    joined = self.encode(self.eos_text + suffix)
                except InvalidRequest as error:
                    if tools or _SYSTEM in history:
                        continue  # a template without tools or system messages refuses such requests altogether
                    return str(error)
                if suffix != expected:
                    return f"the text behind an answer depends on what came before it ({_differ(expected, suffix)})"
                if not len(joined) or int(joined[0]) != self.eos_id:
                    return f"the tokenizer joins the end of an answer with what follows ({suffix!r})"
                proved += 1
        return "" if proved else "the template renders none of the sample conversations"

    def _end_of_turn(self, folder: Path) -> tuple[str, int, frozenset[int]]:
        """(text and id of the token with which the template ends an answer, ids that end a generation)."""
        named = self.special_tokens.get("eos_token")
        if not named:
            raise ConfigError(f"{folder / 'tokenizer_config.json'} names no eos_token: it marks the end of an answer")
        token = self._codec.token_id(named)
        if token is None:
            raise ConfigError(f"{folder}: eos_token {named!r} is not in tokenizer.json")
        ends = {named: token, **{self.token_text(token): token for token in model_files.generation_eos(folder)}}
        try:
            behind = self.text([_USER, Message("assistant", _SENTINEL)], None, prompt=False).rpartition(_SENTINEL)[2]
        except InvalidRequest:
            behind = ""
        first = min((text for text in ends if text in behind), key=behind.index, default=named)
        return first, ends[first], frozenset(ends.values())

    def _detect(self) -> Family:
        """The template's family, if its parser reads back the calls that the template writes."""
        found = detect(self._source, self._codec.special)
        return found if self._reads_back(found.tool_parser) else found._replace(tool_parser="none")

    def _reads_back(self, tool_parser: str) -> bool:
        try:
            before = self.text([_USER], [_TOOL], prompt=True)
            after = self.text([_USER, _CALLED], [_TOOL], prompt=False)
        except InvalidRequest:
            return False
        parser = toolcalls.parser_factory(tool_parser)([_TOOL])
        written = after.removeprefix(before).replace(self.eos_text, "")
        parts = [*parser.feed(written), *parser.finish(ended=True)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        return [_CALLED._replace(tool_calls=tuple(calls)).digest_input()] == [_CALLED.digest_input()]


def _differ(left: str, right: str) -> str:
    """Two texts from where they differ, in short."""
    at = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f"{left[at : at + 60]!r} and {right[at : at + 60]!r}"


def _stand_in(answer: Message, *, whole: bool = False) -> Message:
    """``answer`` with every text of the model replaced: whatever the template shows of it, the sentinel is last.

    Unless ``whole`` it has neither reasoning nor a second call: nothing behind an answer depends on them.
    """
    calls = []
    for call in answer.tool_calls if whole else answer.tool_calls[:1]:
        arguments = parsed_arguments(call.arguments)
        names = arguments if isinstance(arguments, dict) else {}
        calls.append(ToolCall(_SENTINEL, json.dumps(dict.fromkeys(names, _SENTINEL))))
    return Message("assistant", _SENTINEL, answer.reasoning if whole else "", tuple(calls))


def _samples() -> Iterator[tuple[list[Message], Message, list[Message], list[dict[str, Any]] | None]]:
    """(history, answer, new messages, tools) of the shapes that agents send, each also with reasoning."""
    for thought in ("", "7 + 41 is 48."):
        said, called, twice = (message._replace(reasoning=thought) for message in (_SAID, _CALLED, _CALLED_TWICE))
        yield [_USER], said, [_AGAIN], None
        yield [_USER, said, _AGAIN], said, [_USER], None
        yield [_SYSTEM, _USER], said, [_AGAIN], None
        yield [_USER], called, [_RESULT], [_TOOL]
        yield [_SYSTEM, _USER], called, [_RESULT], [_TOOL]
        yield [_USER, called, _RESULT], said, [_AGAIN], [_TOOL]
        yield [_USER, called, _RESULT], called, [_RESULT, _RESULT], [_TOOL]
        yield [_USER], twice, [_RESULT, _RESULT], [_TOOL]
