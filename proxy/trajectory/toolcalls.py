"""Tool calls in generated text, read as it streams: one parser for each way in which models write them.

A parser gets the answer's text in parts and returns what is certain: text for
the agent, or whole calls. Splitting the text elsewhere gives the same result.
What is no well-formed call of a tool that the request offered stays text: a
malformed call is the model's own. Nothing is ever evaluated.
"""

from __future__ import annotations

from functools import partial

from proxy.trajectory.toolcalls_base import BlockParser, NoParser, ParserFactory, Part, ToolParser, Tools
from proxy.trajectory.toolcalls_deepseek import DeepSeekParser
from proxy.trajectory.toolcalls_hermes import HermesParser
from proxy.trajectory.toolcalls_llama import LlamaJsonParser
from proxy.trajectory.toolcalls_mistral import MistralParser
from proxy.trajectory.toolcalls_positional import PositionalParser
from proxy.trajectory.toolcalls_qwen import QwenXmlParser
from storage.errors import ConfigError

__all__ = ["NoParser", "ParserFactory", "Part", "ToolParser", "Tools", "marks", "parser_factory"]

_BLOCKS: dict[str, type[BlockParser]] = {
    "hermes": HermesParser,
    "qwen_xml": QwenXmlParser,
    "llama_json": LlamaJsonParser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
}


def parser_factory(kind: str, opening: str = "", closing: str = "", *, template: str = "") -> ParserFactory:
    """The parser of ``model.tool_parser``; ``template`` tells which form of a call is forced where a family has two.

    Raises ConfigError for a kind that does not exist.
    """
    if kind == "none":
        return lambda tools: NoParser()
    if kind == "positional":
        return lambda tools: PositionalParser(tools, opening, closing)
    if kind == "mistral":
        return partial(MistralParser, named="[ARGS]" in template)
    if kind == "deepseek":
        return partial(DeepSeekParser, fenced="```" in template)
    if kind not in _BLOCKS:
        raise ConfigError(f"model.tool_parser {kind!r} does not exist: none, positional or {', '.join(_BLOCKS)}")
    return _BLOCKS[kind]


def marks(kind: str, opening: str = "", closing: str = "") -> tuple[str, ...]:
    """Texts that the parser must see even where they are special tokens of the tokenizer."""
    if kind in _BLOCKS:
        return _BLOCKS[kind].marks
    return tuple(mark for mark in (opening, closing) if mark) if kind == "positional" else ()
