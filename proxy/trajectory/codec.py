"""Text to ids and back, with one tokenizer, so that text which comes again costs nothing.

A Hugging Face tokenizer takes its special tokens out of a text before anything
else, so what stands between two of them is encoded by itself. Such segments
are kept in a bounded cache: system prompts, tool lists and the messages that
the samples of a group share are encoded once. That the ids are those of the
whole text is proved at start-up on samples; where it is not so, only whole
texts are kept. What is not there is looked up word by word where that can be
(:mod:`proxy.trajectory.words`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer

from proxy.trajectory.detokenizer import Decode, overlap
from proxy.trajectory.tree import Ids
from proxy.trajectory.words import Words
from storage.errors import InvalidRequest

_CACHED_TEXT = 4 * 1024 * 1024
"""Characters of text whose ids are kept."""
_ENTRY = 128
"""Characters that an entry counts for beside its text."""
_SAMPLES = (
    *(
        "",
        " ",
        "\n",
        "a",
        " a",
        "a ",
        "user\nWhat is 7 + 41?",
        "\n\n",
        "\t\n x",
        "  two",
        "The end.",
        "it's",
        "'s",
        "12 3",
    ),
    *(
        "<|",
        "</",
        "]",
        "_",
        "\N{LATIN SMALL LETTER E WITH ACUTE}",
        "e\N{COMBINING ACUTE ACCENT}x",
        "\N{NO-BREAK SPACE}b",
    ),
    *("\N{GRINNING FACE}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{FULLWIDTH LATIN CAPITAL LETTER A}"),
)


class Codec:
    """One tokenizer. ``template``: text that names the special tokens which its prompts are made of."""

    def __init__(self, tokenizer: Tokenizer, template: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.special = {token.content: index for index, token in added.items() if token.special}
        """Text -> id of the special tokens."""
        self.cuts = _cuts(added.values(), template)
        """Special tokens at which a text is cut into segments."""
        self._words = Words.of(tokenizer)
        self._cut_ids = {mark: np.asarray([tokenizer.token_to_id(mark)], np.int32) for mark in self.cuts}
        self._cache = _Cache(_CACHED_TEXT)
        if not self._proved():
            self.cuts = ()
        self._cache = _Cache(_CACHED_TEXT)

    def encode(self, text: str) -> Ids:
        """Ids of ``text``; tokens written out in it count, none is added. Raises InvalidRequest."""
        marks, keys = self._segments(text)
        found: dict[str, Ids] = {}
        missing: list[str] = []
        for key in dict.fromkeys(keys):
            ids = self._cache.get(key) if key else None
            if ids is not None:
                found[key] = ids
            elif key:
                missing.append(key)
        found.update(self._made(missing))
        parts: list[Ids] = []
        for mark, key in zip(marks, keys, strict=True):
            if mark:
                parts.append(self._cut_ids[mark])
            if key:
                parts.append(found[key])
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def token_id(self, text: str) -> int | None:
        """Id of the token that is ``text``."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def plain(self, text: str) -> Ids:
        """:meth:`encode` without the cache."""
        return self._encode([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def raw_text(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def decoder(self, marks: Collection[str]) -> tuple[Decode, tuple[str, ...]]:
        """(:meth:`decode` that shows ``marks``, those of them that are special tokens)."""
        kept = tuple(mark for mark in dict.fromkeys(marks) if mark in self.special)
        if not kept:
            return self.decode, ()
        dropped = {index for text, index in self.special.items() if text not in kept}
        return lambda ids: self.raw_text([token for token in ids if token not in dropped]), kept

    def _segments(self, text: str) -> tuple[list[str], list[str]]:
        """(the special token in front of each segment, "" for the first; the segments as the cache knows them)."""
        parts = [("", text)]
        for mark in self.cuts:
            if mark in text:
                parts = [
                    (mark if number else lead, piece)
                    for lead, segment in parts
                    for number, piece in enumerate(segment.split(mark))
                ]
        # A segment is encoded behind a special token, as it stands: a text's beginning may be treated differently.
        keys = [self.cuts[0] + piece if lead and piece else piece for lead, piece in parts]
        return [lead for lead, _ in parts], keys

    def _made(self, keys: list[str]) -> dict[str, Ids]:
        """Ids of segments that are not in the cache; now they are."""
        first, words = self.cuts[0] if self.cuts else "", self._words
        made = {}
        for key in keys:
            ids = words.encode(key.removeprefix(first)) if words is not None else None
            if ids is not None:
                made[key] = ids
        others = [key for key in keys if key not in made]
        for key, ids in zip(others, self._encode(others), strict=True):
            made[key] = ids[1:] if first and key.startswith(first) else ids
        for key, ids in made.items():
            self._cache.put(key, ids)
        return made

    def _encode(self, texts: list[str]) -> list[Ids]:
        if not texts:
            return []
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exception, e.g. for a character it has no id for
            raise InvalidRequest(
                f"the model's tokenizer cannot encode the messages: {error}", param="messages"
            ) from None
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def _proved(self) -> bool:
        """Whether encoding in segments gives the ids of the whole on sample texts around every cut."""
        for mark in self.cuts:
            for number, sample in enumerate(_SAMPLES):
                other = _SAMPLES[number - 1]
                text = f"{sample}{mark}{sample}{mark}{mark}{other}{self.cuts[0]}{sample}"
                try:
                    if not np.array_equal(self.encode(text), self.plain(text)):
                        return False
                except InvalidRequest:
                    continue  # a tokenizer without these characters
        return True


class _Cache:
    """Ids of texts, least recently used out first; for use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, Ids] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> Ids | None:
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
            return ids

    def put(self, text: str, ids: Ids) -> None:
        cost = len(text) + _ENTRY
        with self._lock:
            if text in self._ids or cost > self._limit:
                return
            self._ids[text] = ids
            self._size += cost
            while self._size > self._limit:
                oldest, _ = self._ids.popitem(last=False)
                self._size -= len(oldest) + _ENTRY


def _cuts(added: Collection[AddedToken], template: str) -> tuple[str, ...]:
    """Added tokens at which the tokenizer always cuts a text, of those that ``template`` names.

    One that takes white space with it, or that another token may cover in part, is none.
    """
    first = [token for token in added if not token.normalized]
    texts = [token.content for token in first]
    return tuple(
        token.content
        for token in first
        if token.content in template
        and not (token.lstrip or token.rstrip or token.single_word)
        and not any(
            other != token.content and (token.content in other or overlap(other, (token.content,))) for other in texts
        )
    )
