"""Ids that are looked up word by word are the tokenizer's, or there are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from proxy.trajectory.codec import Codec
from proxy.trajectory.words import Words

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(expression: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


CUTS = {
    "GPT-2": GPT2,
    "GPT-2 in a list": pre_tokenizers.Sequence([GPT2]),
    "Qwen and Llama 3": pre_tokenizers.Sequence([split(CL100K), BYTES]),
    "GPT-4o": pre_tokenizers.Sequence([split(O200K), BYTES]),
    "SmolLM": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "looking ahead": pre_tokenizers.Sequence([split(r"th(?=e)|t|h|[^th]+"), BYTES]),
    "DeepSeek": pre_tokenizers.Sequence([split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), BYTES]),
}
TRAINING = [f"it's {word} of the 1{n} word{n}s,\n\n  {word}()" for n, word in enumerate(("the", "THE", "def", "Don't"))]


def make(cut: object, **options: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return tokenizer


MADE = {name: make(cut) for name, cut in CUTS.items()}
WORDS = {name: Words.of(tokenizer) for name, tokenizer in MADE.items()}
TEXTS = st.one_of(
    st.text(st.characters(max_codepoint=127)),
    st.text(" \n\r\t'sStdDlL01.!<|end>"),
    st.lists(st.sampled_from(TRAINING)).map("".join),
)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", CUTS)
@given(TEXTS)
def test_ids_of_ascii_text_are_the_tokenizer_s(name, text):
    words = WORDS[name]
    assert words is not None
    ids = words.encode(text)
    if ids is None:
        assert "<|end|>" in text
    else:
        assert ids.tolist() == plain(MADE[name], text)


@pytest.mark.parametrize("text", ["caf\N{LATIN SMALL LETTER E WITH ACUTE}", "a<|end|>b"])
def test_text_with_other_characters_or_special_tokens_is_left_to_the_tokenizer(text):
    words = WORDS["GPT-2"]
    assert words is not None
    assert words.encode(text) is None
    assert Codec(MADE["GPT-2"]).encode(text).tolist() == plain(MADE["GPT-2"], text)


def lowercased() -> Tokenizer:
    tokenizer = make(GPT2)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(make(BYTES), id="one word"),
        pytest.param(make(pre_tokenizers.ByteLevel(add_prefix_space=True)), id="a space in front"),
        pytest.param(make(GPT2, dropout=0.1), id="dropout"),
        pytest.param(lowercased(), id="lower case"),
        pytest.param(make(pre_tokenizers.Sequence([split(r"\p{L}+|[^\s&&[^ ]]+"), BYTES])), id="set in a set"),
        pytest.param(make(pre_tokenizers.Sequence([split(r"\p{Greek}+"), BYTES])), id="script"),
        pytest.param(make(pre_tokenizers.Sequence([split(r"(a)b"), BYTES])), id="group"),
        pytest.param(make(pre_tokenizers.Metaspace()), id="no bytes"),
    ],
)
def test_a_tokenizer_of_another_kind_is_left_alone(tokenizer):
    assert Words.of(tokenizer) is None


def test_words_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr("proxy.trajectory.words._KEPT_WORDS", 10)
    words = Words.of(MADE["GPT-2"])
    assert words is not None
    for number in range(100):
        assert words.encode(f" word{number} x").tolist() == plain(MADE["GPT-2"], f" word{number} x")
        assert len(words._ids) <= 13
