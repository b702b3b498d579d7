"""What the renderer reads from a Hugging Face model directory. Everything raises ConfigError for what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from storage.errors import ConfigError


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: model.path must be a model directory with a fast tokenizer")
    return Tokenizer.from_file(str(path))


def template_source(folder: Path) -> str:
    """The chat template; of several named ones the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"{folder} has no chat template: chat_template.jinja or tokenizer_config.json:chat_template")
    return template


def special_tokens(folder: Path) -> dict[str, str]:
    """Name -> text of the tokenizer's special tokens; the newer file wins over special_tokens_map.json."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    tokens = {}
    for source in (read_json(folder / "special_tokens_map.json"), read_json(folder / "tokenizer_config.json")):
        for name in names:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def generation_eos(folder: Path) -> tuple[int, ...]:
    """Ids at which generation ends, as the model's own configuration has it; may be none."""
    value = read_json(folder / "generation_config.json").get("eos_token_id")
    if value is None:
        value = read_json(folder / "config.json").get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def vocab_size(folder: Path, tokenizer: Tokenizer) -> int:
    """Ids below this exist in the model."""
    size = read_json(folder / "config.json").get("vocab_size")
    return int(size) if size else int(tokenizer.get_vocab_size(with_added_tokens=True))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return value
