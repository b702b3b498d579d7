"""Model directories of the families that the proxy knows: tokenizers of ours, chat templates of the families' shapes.

Tokenizers have one token per byte, a few merges and the family's added tokens;
``sentencepiece`` ones instead one token per character, and put a mark for a
space in front of a text. Nothing here has weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).with_name("chat_templates")
MERGES = ("user", "assistant", "system", "</", "json", "jsonp", "enderer", '{"', '":')

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_MISTRAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL_RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_CALLS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_DEEPSEEK_OUTPUTS = tuple(
    f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")
)


@dataclass(frozen=True)
class ModelFamily:
    """``special`` tokens are not part of a text, ``added`` ones are. ``ends``: more tokens that end a generation."""

    name: str
    template: str
    tool_parser: str
    reasoning_parser: str
    special: tuple[str, ...]
    eos: str
    added: tuple[str, ...] = ()
    bos: str | None = None
    ends: tuple[str, ...] = ()
    sentencepiece: bool = False
    continues: bool = True
    """Whether a conversation may be continued from recorded ids."""
    arguments_as_text: bool = False
    """The template takes arguments as text, and no content as null."""
    reasoning_in_content: bool = False

    def write(self, folder: Path) -> Path:
        """The model directory, in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self._tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.special])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        tokenizer.save(str(folder / "tokenizer.json"))
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos}
        if self.bos:
            about["bos_token"] = self.bos
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{self.template}.jinja").read_text())
        ends = [tokenizer.token_to_id(text) for text in (self.eos, *self.ends)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
        return folder

    def _tokenizer(self) -> Tokenizer:
        if self.sentencepiece:
            return _sentencepiece(self.special)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {text: index for index, text in enumerate((*self.special, *alphabet))}
        pairs: list[tuple[str, str]] = []
        for word in MERGES:
            for length in range(2, len(word) + 1):
                if word[:length] not in vocabulary:
                    vocabulary[word[:length]] = len(vocabulary)
                    pairs.append((word[: length - 1], word[length - 1]))
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer


def _sentencepiece(special: tuple[str, ...]) -> Tokenizer:
    """A text begins with a mark for a space, which is also what spaces become; other characters fall back to bytes."""
    texts = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(33, 127)), "\u2581a"]
    vocabulary = {text: index for index, text in enumerate(texts)}
    model = models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


_QWEN = {"special": _CHATML, "eos": "<|im_end|>", "ends": ("<|endoftext|>",)}

FAMILIES = {
    family.name: family
    for family in (
        ModelFamily("qwen2.5", "qwen25", "hermes", "none", added=_TOOL_TAGS, **_QWEN),
        ModelFamily("qwen3", "qwen3", "hermes", "think", added=(*_TOOL_TAGS, "<think>", "</think>"), **_QWEN),
        ModelFamily("qwen3-coder", "qwen3_coder", "qwen_xml", "none", added=_TOOL_TAGS, **_QWEN),
        ModelFamily("smollm2", "smollm2", "none", "none", _CHATML, "<|im_end|>", bos="<|im_start|>"),
        ModelFamily(
            *("llama3", "llama3", "llama_json", "none", (*_LLAMA, "<|python_tag|>"), "<|eot_id|>"),
            bos="<|begin_of_text|>",
            ends=("<|eom_id|>", "<|end_of_text|>"),
        ),
        ModelFamily(
            *("mistral-nemo", "mistral_nemo", "mistral", "none", _MISTRAL + _MISTRAL_RESULTS, "</s>"),
            bos="<s>",
            continues=False,
        ),
        ModelFamily(
            *("mistral-small", "mistral_small", "mistral", "none", _MISTRAL + _MISTRAL_RESULTS, "</s>"),
            bos="<s>",
            sentencepiece=True,
        ),
        ModelFamily(
            *("magistral", "magistral", "mistral", "mistral"),
            (*_MISTRAL, *_MISTRAL_RESULTS, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
            "</s>",
            bos="<s>",
            reasoning_in_content=True,
        ),
        ModelFamily(
            *("deepseek-r1", "deepseek_r1", "deepseek", "think"),
            _DEEPSEEK + _DEEPSEEK_CALLS + _DEEPSEEK_OUTPUTS,
            "<｜end▁of▁sentence｜>",
            added=("<think>", "</think>"),
            bos="<｜begin▁of▁sentence｜>",
            continues=False,
            arguments_as_text=True,
        ),
        ModelFamily(
            *("deepseek-v3.1", "deepseek_v31", "deepseek", "think", _DEEPSEEK, "<｜end▁of▁sentence｜>"),
            added=("<think>", "</think>", *_DEEPSEEK_CALLS, *_DEEPSEEK_OUTPUTS),
            bos="<｜begin▁of▁sentence｜>",
            arguments_as_text=True,
        ),
    )
}
