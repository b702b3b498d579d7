"""Chat templates, compiled as ``transformers`` compiles them, without importing it.

The environment is jinja2's immutable sandbox: templates come with models and
are not trusted. What a template sees beyond ``messages``, ``tools`` and
``add_generation_prompt`` are the tokenizer's special tokens.
Source: ``transformers.utils.chat_template_utils`` 5.24.
"""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from storage.errors import ConfigError, InvalidRequest

_THINKING = ("enable_thinking", "thinking")
"""Names under which templates ask whether the model shall reason."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for loss masks; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # the type is given by jinja2.ext.Extension

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


_OF_DICTS = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's, which looks for an attribute first and meets an error where a message has only an item, and copies the
    globals for every text, at ten times the price where they are a chain of mappings."""

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled chat template. Raises :class:`ConfigError` if ``source`` is no valid template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None
        self._special_tokens = special_tokens
        self.takes_thinking = not jinja2.meta.find_undeclared_variables(environment.parse(source)).isdisjoint(_THINKING)
        """Whether the template asks if the model shall reason."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        prompt: bool,
        thinking: bool | None = None,
    ) -> str:
        """The text of ``messages``; ``prompt`` adds the start of the assistant's turn; ``thinking`` None: not said.

        Raises :class:`InvalidRequest` with the template's own words when it refuses the messages.
        """
        variables = {} if thinking is None else dict.fromkeys(_THINKING, thinking)
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **variables,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error.message}", param="messages"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # A template is a program over client data: what it raises is about the messages.
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {error}", param="messages"
            ) from None
