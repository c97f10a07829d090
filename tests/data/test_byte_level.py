"""The bound on a text's tokens holds, and prompts measured by it are those that encoding each of
them keeps.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dapo.config import DataConfig
from dapo.data.byte_level import TokenBound, byte_alphabet
from dapo.data.prompts import PromptEncoder
from dapo.policy.model import load_model
from dapo.types import Problem
from helpers.tables import for_each_row

TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab 1\n<|>é\u0958\u1fb7\U0001d160"))
) | st.sampled_from(
    ["", "<s>" * 9, "\u0958" * 50, "e\u0301 <s> \u1100\u1161", "🧮" * 20, "aaaa bbbb"]
)


def byte_level(*, normalizer=None, add_prefix_space=False):
    """A byte-level BPE tokenizer with few merges and a special token before each text."""
    vocabulary = {character: number for number, character in enumerate(byte_alphabet())} | {
        "aa": 256,
        "<s>": 257,
    }
    inner = Tokenizer(models.BPE(vocabulary, [("a", "a")]))
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 257)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<s>")


TOKENIZERS = {
    "plain": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "NFC in a sequence": byte_level(
        normalizer=normalizers.Sequence([normalizers.NFC()]), add_prefix_space=True
    ),
    "space": byte_level(add_prefix_space=True),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_more_tokens_than_the_bound(name, special):
    bound = TokenBound.of(TOKENIZERS[name], add_special_tokens=special)
    assert bound is not None

    @given(TEXTS)
    def holds(text):
        assert len(TOKENIZERS[name](text, add_special_tokens=special)["input_ids"]) <= bound(text)

    holds()


def test_the_bound_of_ascii_is_its_length():
    assert TokenBound.of(TOKENIZERS["plain"], add_special_tokens=False)("bcd 12") == 6
    assert TokenBound.of(TOKENIZERS["plain"], add_special_tokens=True)("bcd 12") == 7
    assert TokenBound.of(TOKENIZERS["NFC"], add_special_tokens=False)("\u0958") == 9


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.Prepend("xx"),
        normalizers.Replace("a", "bbbb"),
    ],
    ids=lambda normalizer: type(normalizer).__name__,
)
def test_a_tokenizer_that_could_add_to_a_text_has_no_bound(normalizer):
    assert TokenBound.of(byte_level(normalizer=normalizer), add_special_tokens=False) is None
    unigram = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0))
    )
    assert TokenBound.of(unigram, add_special_tokens=False) is None


@for_each_row("limit", [4, 5, 9, 10, 40])
@for_each_row("name", [*TOKENIZERS, "tiny-random", "no bound"])
def test_the_prompts_that_are_kept_are_those_whose_encoding_is_short_enough(name, limit):
    if name == "tiny-random":
        tokenizer = load_model("tiny-random", dtype=torch.float32).tokenizer
    else:
        tokenizer = TOKENIZERS.get(name) or byte_level(normalizer=normalizers.NFKC())
    texts = [
        "aaaa",
        "a" * 18,
        "aa" * 4,
        "12",
        "\u0958" * 3,
        "ﷺ",
        "b" * 10,
        "b" * 9,
        "aaaa",
        "aa" * 5,
        "b" * 60,
    ]
    problems = [Problem(f"{i}", text, "") for i, text in enumerate(texts)]
    config = DataConfig(train="builtin:sums", max_prompt_tokens=limit)
    naive = [len(tokenizer(text)["input_ids"]) for text in texts]
    encoder = PromptEncoder(tokenizer, config)
    kept, dropped = encoder.split_by_length(problems)
    assert kept == [
        problem for problem, length in zip(problems, naive, strict=True) if length <= limit
    ]
    assert dropped == len(problems) - len(kept)
    for above in (0, limit, max(naive) - 1):
        assert PromptEncoder(tokenizer, config).measure(problems, above=above) == max(naive)
        assert encoder.measure(problems, above=above) == max(naive)
    assert encoder.measure(problems, above=max(naive)) == 0
    assert [encoder.length(problem) for problem in problems] == naive
    assert [list(encoder.encode(problem)) for problem in problems] == [
        tokenizer(text)["input_ids"] for text in texts
    ]
