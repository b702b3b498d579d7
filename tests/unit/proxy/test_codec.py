"""Ids from the cache are the ids of plain encoding, and what is cached is bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from model_families import FAMILIES, TEMPLATES
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from proxy.trajectory import codec as module
from proxy.trajectory.codec import Codec
from storage.errors import InvalidRequest

CHAT = "<|im_start|>user\nWhat is 7 + 41?<|im_end|>\n<|im_start|>assistant\n"


class Counting:
    """A tokenizer that counts the texts it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: bool) -> list[object]:
        self.texts += texts
        return self._tokenizer.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def tokenizer_of(name: str, folder: Path) -> tuple[Tokenizer, str]:
    family = FAMILIES[name]
    path = family.write(folder) / "tokenizer.json"
    return Tokenizer.from_file(str(path)), (TEMPLATES / f"{family.template}.jinja").read_text() + family.eos


@pytest.fixture
def counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module.Words, "of", lambda tokenizer: None)
    counting = Counting(tokenizer_of("qwen3", tmp_path)[0])
    codec = Codec(counting, "<|im_start|><|im_end|>")
    counting.texts.clear()
    return codec, counting


def test_each_segment_between_special_tokens_is_encoded_once(counted):
    codec, counting = counted
    first = codec.encode(CHAT)
    assert len(counting.texts) == 3
    assert np.array_equal(codec.encode(CHAT), first)
    longer = codec.encode(CHAT + "48<|im_end|>")
    assert len(counting.texts) == 4
    assert counting.texts[-1].endswith("assistant\n48")
    assert longer[: len(first)].tolist() == first.tolist()
    assert np.array_equal(longer, codec.plain(CHAT + "48<|im_end|>"))


def test_what_is_returned_is_the_caller_s_own(counted):
    codec, _ = counted
    ids = codec.encode("user")
    expected = ids.tolist()
    ids += 1
    assert codec.encode("user").tolist() == expected


def test_the_least_recently_used_text_goes_first_and_a_text_larger_than_the_cache_is_not_kept(counted, monkeypatch):
    _, counting = counted
    monkeypatch.setattr(module, "_CACHED_TEXT", 1000)
    codec = Codec(counting, "<|im_start|><|im_end|>")
    a, b, c, large = "a" * 300, "b" * 300, "c" * 300, "d" * 1000
    for text in (a, b, a, c, large):
        codec.encode(text)
    counting.texts.clear()
    for text in (a, c, b, large):
        codec.encode(text)
    assert counting.texts == [b, large]


def test_a_tokenizer_whose_segments_depend_on_each_other_caches_whole_texts_only(tmp_path):
    tokenizer, template = tokenizer_of("qwen3", tmp_path)

    class Joined(Counting):
        """Its ids behind a special token depend on what stands in front of it."""

        def encode_batch_fast(self, texts: list[str], **options: bool) -> list[object]:
            marked = [f"{text}!" if "a<|im_end|>a" in text else text for text in texts]
            return super().encode_batch_fast(marked, **options)

    codec = Codec(Joined(tokenizer), template)
    assert codec.cuts == ()
    assert codec.encode("a<|im_end|>a").tolist() == codec.plain("a<|im_end|>a").tolist()


def test_only_tokens_at_which_every_text_is_cut_are_cuts(tmp_path):
    tokenizer, _ = tokenizer_of("qwen3", tmp_path)
    tokenizer.add_tokens(
        [
            AddedToken("<greedy>", rstrip=True, normalized=False),
            AddedToken("<word>", single_word=True, normalized=False),
            AddedToken("<<|im_start|>", normalized=False),
            AddedToken("x</think", normalized=False),
            AddedToken("<late>", normalized=True),
            AddedToken("<fine>", normalized=False),
        ]
    )
    template = "<|im_start|><|im_end|><greedy><word></think><late><fine>"
    assert set(Codec(tokenizer, template).cuts) == {"<|im_end|>", "<fine>"}


def test_truncation_and_padding_of_the_tokenizer_file_do_not_apply(tmp_path):
    tokenizer, template = tokenizer_of("qwen3", tmp_path)
    expected = tokenizer.encode(CHAT, add_special_tokens=False).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    assert Codec(tokenizer, template).encode(CHAT).tolist() == expected


def test_a_character_that_the_tokenizer_has_not_is_the_request_s_fault():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<e>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken("<e>", normalized=False)])
    codec = Codec(tokenizer, "<e>")
    assert codec.encode("a<e>a").tolist() == [0, 1, 0]
    with pytest.raises(InvalidRequest, match="cannot encode the messages"):
        codec.encode("a<e>b")


def test_threads_may_share_a_codec(tmp_path):
    codec = Codec(*tokenizer_of("qwen2.5", tmp_path))
    texts = [f"<|im_start|>user\n{number % 7}<|im_end|>" for number in range(300)]
    with ThreadPoolExecutor(4) as pool:
        assert [ids.tolist() for ids in pool.map(codec.encode, texts)] == [codec.plain(text).tolist() for text in texts]
