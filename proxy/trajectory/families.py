"""Which parsers a model needs, seen from its chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Family(NamedTuple):
    """Names of ``model.tool_parser`` and ``model.reasoning_parser``; ``none`` if the template shows none we read."""

    tool_parser: str
    reasoning_parser: str

    def resolve(self, tool_parser: str, reasoning_parser: str) -> Family:
        """The parsers that a run asks for, where it says ``auto`` this family's."""
        return Family(
            self.tool_parser if tool_parser == "auto" else tool_parser,
            self.reasoning_parser if reasoning_parser == "auto" else reasoning_parser,
        )


def detect(template_source: str, special_tokens: Collection[str]) -> Family:
    """The family of a chat template; ``special_tokens`` are the texts of the tokenizer's special tokens."""
    return Family(_tool_parser(template_source, special_tokens), _reasoning_parser(template_source))


def _tool_parser(source: str, special_tokens: Collection[str]) -> str:
    if "tool▁calls▁begin" in source:
        return "deepseek"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        if "<arg_key>" in source:  # GLM writes calls in a way of its own
            return "none"
        return "qwen_xml" if "<function=" in source else "hermes"
    if '"parameters"' in source and ("<|python_tag|>" in source or "<|eot_id|>" in special_tokens):
        return "llama_json"
    return "none"


def _reasoning_parser(source: str) -> str:
    if "[THINK]" in source:
        return "mistral"
    return "think" if "<think>" in source or "</think>" in source else "none"
