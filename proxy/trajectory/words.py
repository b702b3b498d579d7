"""ASCII text to ids, word by word, at a fifth of what the tokenizer takes.

A byte-level BPE tokenizer cuts a text into words by a regular expression and
encodes each word by itself. Most of its time goes into the expression, whose
classes hold all of Unicode. On ASCII text the same expression with the ASCII
members of its classes finds the same words, so it is compiled for ``re``, and
the ids of words that came before are looked up. That the ids are the
tokenizer's is proved on samples when a tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
import unicodedata
import warnings
from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from proxy.trajectory.tree import Ids

_KEPT_WORDS = 100_000
_LONG_WORD = 64
"""Characters above which a word is not kept: it hardly comes again."""
_ASCII_STAYS = {"NFC", "NFD", "NFKC", "NFKD"}
"""Normalizers that leave ASCII as it is."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel pre-tokenizer cuts by when it is told to use its own expression."""
_BYTES = {code: chr(256 + code) for code in range(33)} | {127: chr(289)}
"""How byte-level tokenizers write those ASCII characters that they do not leave as they are."""
_SPACE = _BYTES[32]
_TRICKY = " \n\r\t'sStdDlLrRvVeE019a.!<_/\x1c\x0b"


class _Kept(dict[str, bytes]):
    """What ``make`` returns for a word, kept as far as that is worth it."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, word: str) -> bytes:
        ids = self._make(word)
        if len(self) >= _KEPT_WORDS:
            self.clear()
        if len(word) <= _LONG_WORD:
            self[word] = ids
        return ids


class Words:
    """The words of one tokenizer. Made by :meth:`of`."""

    def __init__(self, tokenizer: Tokenizer, cut: re.Pattern[str]) -> None:
        self._model = tokenizer.model
        self._rest = _rest(tokenizer.pre_tokenizer)
        step, *more = _steps(self._rest, "pretokenizers")
        self._cuts_again = bool(more) or step["use_regex"]
        self._added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._starts = {token[:2] for token in self._added}
        self._cut = cut
        self._ids = _Kept(self._word)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words | None:
        """None: its texts cannot be encoded in this way."""
        cut = _cut(tokenizer)
        words = None if cut is None else cls(tokenizer, cut)
        return words if words is not None and words._proved(tokenizer) else None

    def encode(self, text: str) -> Ids | None:
        """Ids of ``text``; None: ask the tokenizer, it is not plain ASCII."""
        if not text.isascii() or (any(s in text for s in self._starts) and any(t in text for t in self._added)):
            return None
        return np.frombuffer(b"".join(map(self._ids.__getitem__, self._cut.findall(text))), np.int32)

    def _word(self, word: str) -> bytes:
        """Packed ids of one word, which further pre-tokenizers may cut again."""
        if self._cuts_again:
            tokens = [t for part, _ in self._rest.pre_tokenize_str(word) for t in self._model.tokenize(part)]
        else:
            plain = word.isprintable()
            tokens = self._model.tokenize(word.replace(" ", _SPACE) if plain else word.translate(_BYTES))
        return array("i", [token.id for token in tokens]).tobytes()

    def _proved(self, tokenizer: Tokenizer) -> bool:
        random = Random(0)  # noqa: S311  # samples, no secret
        every = [chr(code) for code in range(128)]
        samples = ["".join(random.choices(of, k=40)) for of in (every, _TRICKY) for _ in range(25)]
        expected = tokenizer.encode_batch_fast(samples, add_special_tokens=False)
        found = [self.encode(sample) for sample in samples]
        return all(ids is None or ids.tolist() == right.ids for ids, right in zip(found, expected, strict=True))


def _cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The expression whose matches are the words of an ASCII text; None: there is none."""
    model, normalizer, pre = tokenizer.model, tokenizer.normalizer, tokenizer.pre_tokenizer
    if not isinstance(model, models.BPE) or model.dropout or pre is None:
        return None
    if normalizer is not None and any(step["type"] not in _ASCII_STAYS for step in _steps(normalizer, "normalizers")):
        return None
    steps = _steps(pre, "pretokenizers")
    if steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    return _in_ascii(_expression(steps[0]))


def _steps(part: Any, key: str) -> Sequence[dict[str, Any]]:
    described = json.loads(part.__getstate__())
    return described[key] if described["type"] == "Sequence" else [described]


def _rest(pre: Any) -> Any:
    """What a pre-tokenizer does to a word behind its first step."""
    count = len(_steps(pre, "pretokenizers"))
    if count == 1:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre[index] for index in range(1, count)])


def _expression(step: dict[str, Any]) -> str:
    """What the first pre-tokenizer cuts by; each match and what is between two of them is a word. Empty: unknown."""
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", ""))
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    return _GPT2 if step["type"] == "ByteLevel" and step["use_regex"] else ""


def _in_ascii(expression: str) -> re.Pattern[str] | None:
    """``expression`` for ASCII text; None for one that ``re`` cannot have."""
    written, inside = "", False
    for part in re.findall(r"\\p\{\w\w?\}|\\.|.", expression, re.DOTALL):
        if part.startswith(r"\p{"):
            members = [chr(code) for code in range(128) if unicodedata.category(chr(code)).startswith(part[3:-1])]
            listed = re.escape("".join(members))
            part = listed if inside else f"[{listed}]" if listed else "(?!)"
        else:
            inside = part == "[" or (inside and part != "]")
        written += part
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets within sets, which ``re`` has not
            # What is between two matches is a word too.
            pattern = re.compile(f"{written}|(?s:(?:(?!{written}).)+)", re.ASCII)
    except (re.error, FutureWarning):
        return None
    return pattern if expression and not pattern.groups and not pattern.match("") else None
