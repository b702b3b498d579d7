"""A model directory without weights, made on the spot: a byte-level BPE tokenizer of realistic size and cost.

Text, merges and template are seeded, so every run measures the same tokenizer. About four bytes of the text are one
token, as in the tokenizers of real models.
"""

from __future__ import annotations

import json
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 32_768
_WORDS = 40_000
_LONGER_FROM = (0, 90, 2500, 15000)
"""Ranks from which words have one syllable more."""
_TRAINING_CHARACTERS = 6_000_000
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = 2
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
_SPLIT += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYLLABLES = (  # noqa: SIM905  # read as a text it is shorter
    "ba be bi co ca de di du en er es fa fo ga ge in is ka la le li lo ma me mi mo na ne no or pa pe po ra re ri ro "
    "sa se si so sta te ti to tra tu un ur va ve vi wo al an ar as at con ex for ing ment per pro re sion ter tion"
).split()
_TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Functions that may be called:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>
{% endif %}{%- for message in messages %}{%- if not (tools and loop.first and message.role == 'system') %}<|im_start|>
{{- message.role }}
{{ message.content }}{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Prose:
    """Text with the word statistics of agents' traffic: frequent short words, rare long ones, code, numbers, JSON."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311 - text for a benchmark
        words = Random(20)  # noqa: S311 - the same words for every text
        self._words = ["".join(words.choices(_SYLLABLES, k=bisect(_LONGER_FROM, rank))) for rank in range(_WORDS)]
        self._weights = list(accumulate(1 / (rank + 6) for rank in range(_WORDS)))

    def text(self, characters: int) -> str:
        """At least so many characters."""
        parts: list[str] = []
        length = 0
        while length < characters:
            parts.append(self._line())
            length += len(parts[-1])
        return "".join(parts)

    def _line(self) -> str:
        words = self._random.choices(self._words, cum_weights=self._weights, k=self._random.randint(6, 18))
        kind = self._random.random()
        if kind < 0.7:
            return " ".join(words).capitalize() + ". "
        if kind < 0.85:
            return f"\n    {words[0]}.{words[1]}_{words[2]}({words[3]}={self._random.randint(0, 999)}, {words[4]})\n"
        if kind < 0.95:
            return f'\n{{"{words[0]}": {self._random.random():.3f}, "{words[1]}": "{words[2]} {words[3]}"}}\n'
        return f"\n/{words[0]}/{words[1]}.py:{self._random.randint(1, 400)}: {' '.join(words[2:])}\n"


def model_directory(folder: Path) -> Path:
    """The directory, made once: tokenizer, template and the sizes that go with them."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _train().save(str(folder / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIAL[2], "pad_token": _SPECIAL[0]}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        (folder / "chat_template.jinja").write_text(_TEMPLATE)
        (folder / "config.json").write_text(json.dumps({"model_type": "bench", "vocab_size": VOCABULARY}))
    return folder


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = Prose(1).text(_TRAINING_CHARACTERS)
    tokenizer.train_from_iterator((text[at : at + 10_000] for at in range(0, len(text), 10_000)), trainer)
    return tokenizer
