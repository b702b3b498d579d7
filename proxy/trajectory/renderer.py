"""From messages to token ids, and the proof that a conversation may be continued from its recorded ids.

Loads a Hugging Face model directory with ``tokenizers`` and jinja2 only; ids
equal ``transformers``' ``apply_chat_template`` (tested). A turn that extends a
recorded one is never rendered again: its prompt is the recorded ids plus
:meth:`Renderer.continuation`, the ids of what the template puts behind the
assistant's end-of-turn token. That this is the same text the template would
have produced is proved at start-up on sample conversations; where it cannot be
proved, :attr:`Renderer.continuation_refusal` says why and turns are rendered
in full.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from proxy.trajectory.canonical import Message, ToolCall, parsed_arguments
from proxy.trajectory.template import ChatTemplate
from proxy.trajectory.tree import Ids
from storage.errors import ConfigError, InvalidRequest

_SENTINEL = "q7Zx4Wk9"
"""Content that stands for an answer while the text behind it is sought: letters and digits survive any template."""

Tools = Sequence[dict[str, Any]]

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


class Renderer:
    """Tokenizer and chat template of one model directory.

    Raises :class:`ConfigError` when the directory lacks a tokenizer, a chat
    template or an end-of-sequence token.
    """

    def __init__(self, model_path: str | Path) -> None:
        folder = Path(model_path)
        config = _read_json(folder / "tokenizer_config.json")
        self._tokenizer = _load_tokenizer(folder)
        self.special_tokens = _special_tokens(folder, config)
        self._template = ChatTemplate(_template_source(folder, config), self.special_tokens)
        self.eos_text, self.eos_id = self._end_of_turn(folder)
        self.eos_ids = frozenset({self.eos_id, *_generation_eos(folder)})
        self.vocab_size = self._vocab_size(folder)
        self.continuation_refusal = self._prove()

    def prompt(self, messages: Sequence[Message], tools: Tools | None, *, thinking: bool | None = None) -> Ids:
        """Ids of the whole conversation, ending where the assistant's turn begins."""
        return self.encode(self.text(messages, tools, prompt=True, thinking=thinking))

    def text(
        self, messages: Sequence[Message], tools: Tools | None, *, prompt: bool, thinking: bool | None = None
    ) -> str:
        """The template's text of ``messages``; ``thinking`` is its ``enable_thinking``, None leaves it out."""
        return self._template.render(
            [message.for_template() for message in messages],
            list(tools) if tools else None,
            prompt=prompt,
            thinking=thinking,
        )

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
        suffix = self._behind(answer, new, tools, thinking)
        return self.encode(suffix if ended else self.eos_text + suffix)

    def encode(self, text: str) -> Ids:
        """Ids of ``text``; tokens written out in it count, none is added."""
        try:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exception, e.g. for a character it has no id for
            raise InvalidRequest(
                f"the model's tokenizer cannot encode the messages: {error}", param="messages"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text for the agent: special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Text of one token, special ones included."""
        return self.raw_text([token])

    def raw_text(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def checked(self, ids: Sequence[int]) -> Ids:
        """Ids that a client sent; raises InvalidRequest for one outside the vocabulary, which can kill an engine."""
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size}", param="prompt")
        return np.asarray(ids, np.int32)

    def _behind(
        self, answer: Message, new: Sequence[Message], tools: Tools | None, thinking: bool | None = None
    ) -> str:
        """What the template puts behind the end of ``answer``, found by rendering a short stand-in conversation."""
        conversation = [Message("user", "x"), _stand_in(answer), *new]
        return self._cut(self.text(conversation, tools, prompt=True, thinking=thinking))

    def _cut(self, text: str) -> str:
        """The text behind the end of the stand-in's turn."""
        start = text.rfind(_SENTINEL)
        end = text.find(self.eos_text, start) if start >= 0 else -1
        if end < 0:
            raise InvalidRequest(
                "the model's chat template leaves out the assistant's answer or its end", param="messages"
            )
        return text[end + len(self.eos_text) :]

    def _prove(self) -> str:
        """Empty if every sample conversation continues as the template renders it, else the reason why not."""
        proved = 0
        for history, answer, new, tools in _samples():
            try:
                expected = self._cut(self.text([*history, _stand_in(answer), *new], tools, prompt=True))
                suffix = self._behind(answer, new, tools)
                clean = self._joins_cleanly(suffix)
            except InvalidRequest as error:
                if tools or any(message.role == "system" for message in history):
                    continue  # a template without tools or system messages is no obstacle: such requests are refused
                return str(error)
            if suffix != expected:
                return f"the text behind an answer depends on what came before it ({expected!r} and {suffix!r})"
            if not clean:
                return f"the tokenizer joins the end of an answer with what follows ({suffix!r})"
            proved += 1
        return "" if proved else "the template renders none of the sample conversations"

    def _joins_cleanly(self, suffix: str) -> bool:
        """Whether ids behind the end-of-turn token do not depend on it."""
        joined = self.encode(self.eos_text + suffix)
        return len(joined) > 0 and int(joined[0]) == self.eos_id and np.array_equal(joined[1:], self.encode(suffix))

    def _end_of_turn(self, folder: Path) -> tuple[str, int]:
        text = self.special_tokens.get("eos_token")
        if not text:
            raise ConfigError(f"{folder / 'tokenizer_config.json'} names no eos_token: it marks the end of an answer")
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise ConfigError(f"{folder}: eos_token {text!r} is not in tokenizer.json")
        return text, int(token)

    def _vocab_size(self, folder: Path) -> int:
        size = _read_json(folder / "config.json").get("vocab_size")
        return int(size) if size else int(self._tokenizer.get_vocab_size(with_added_tokens=True))


def _stand_in(answer: Message) -> Message:
    """``answer`` with every text of the model replaced: whatever the template shows of it, the sentinel is last."""
    calls = []
    for call in answer.tool_calls:
        arguments = parsed_arguments(call.arguments)
        names = arguments if isinstance(arguments, dict) else {}
        calls.append(ToolCall(_SENTINEL, json.dumps(dict.fromkeys(names, _SENTINEL))))
    return Message("assistant", _SENTINEL, tool_calls=tuple(calls))


def _samples() -> list[tuple[list[Message], Message, list[Message], list[dict[str, Any]] | None]]:
    """(history, answer, new messages, tools) of the shapes that agents send."""
    user, again, system = (
        Message("user", "What is 7 + 41?"),
        Message("user", "And 3 + 4?"),
        Message("system", "Be brief."),
    )
    said = Message("assistant", "48")
    called = Message("assistant", "", tool_calls=(ToolCall("add", '{"a": 7, "b": 41}'),))
    result = Message("tool", "48")
    return [
        ([user], said, [again], None),
        ([user, said, again], said, [user], None),
        ([system, user], said, [again], None),
        ([user], called, [result], [_TOOL]),
        ([system, user], called, [result], [_TOOL]),
        ([user, called, result], said, [again], [_TOOL]),
        ([user, called, result], called, [result, result], [_TOOL]),
    ]


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: model.path must be a model directory with a fast tokenizer")
    return Tokenizer.from_file(str(path))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return value


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"{folder} has no chat template: chat_template.jinja or tokenizer_config.json:chat_template")
    return template


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the tokenizer's special tokens; the newer file wins over special_tokens_map.json."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    tokens = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name in names:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _generation_eos(folder: Path) -> tuple[int, ...]:
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    if value is None:
        value = _read_json(folder / "config.json").get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
