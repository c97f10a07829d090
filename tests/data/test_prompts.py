"""Problems to token ids: templates, instructions, lengths; with a tokenizer of one token per
character.
"""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dapo.config import DataConfig
from dapo.core.errors import DataError
from dapo.data.prompts import PromptEncoder
from dapo.types import Problem

CHARACTERS = "\n !?+.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<s>", "<unk>", "<end>", "<user>", "<system>", "<assistant>"]
S, UNK, END, USER, SYSTEM, ASSISTANT = range(6)


def tokenizer(template=TEMPLATE):
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", S)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<system>", "<assistant>"],
    )
    made.chat_template = template
    return made


def encoder_of(tokenizer, **options):
    return PromptEncoder(tokenizer, DataConfig(train="builtin:sums", **options))


def spelled(text):
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def problem(prompt, name="p"):
    return Problem(name, prompt, "a")


@pytest.mark.parametrize("word", ["none", "None", "~"])
def test_a_system_message_that_was_meant_as_none_is_named(word):
    (note,) = encoder_of(tokenizer(), system=word).notes([])
    assert note == f"the system message is the text '{word}'; data.system=null sets none"
    assert encoder_of(tokenizer(), system="none of it").notes([]) == []
    assert encoder_of(tokenizer()).notes([]) == []


def test_text_becomes_a_user_message_and_the_assistant_is_to_answer():
    encoder = encoder_of(tokenizer())
    assert encoder.render(problem("1+1?")) == "<user>1+1?<end><assistant>"
    assert encoder.encode(problem("1+1?")) == (USER, *spelled("1+1?"), END, ASSISTANT)


def test_ids_are_those_of_the_tokenizers_own_template_call():
    made = tokenizer()
    messages = [{"role": "user", "content": "1+1?"}]
    expected = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encoder_of(made).encode(problem("1+1?")) == tuple(expected)


def test_instruction_and_system_message_are_added():
    encoder = encoder_of(tokenizer(), instruction="Be quick.", system="Hi.")
    assert (
        encoder.render(problem("1+1?")) == "<system>Hi.<end><user>1+1?\nBe quick.<end><assistant>"
    )


def test_messages_keep_their_own_system_and_the_last_user_message_gets_the_instruction():
    messages = [
        {"role": "system", "content": "Mine."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2?"},
    ]
    encoder = encoder_of(tokenizer(), instruction="Go.", system="Yours.")
    assert (
        encoder.render(problem(messages))
        == "<system>Mine.<end><user>1?<end><assistant>1<end><user>2?\nGo.<end><assistant>"
    )
    assert messages[-1] == {"role": "user", "content": "2?"}


@pytest.mark.parametrize(
    ("made", "switch"), [(tokenizer(), "off"), (tokenizer(None), "auto"), (tokenizer(None), "off")]
)
def test_without_a_template_text_is_raw_and_begins_as_the_tokenizer_begins(made, switch):
    encoder = encoder_of(made, instruction="Go.", chat_template=switch)
    assert encoder.render(problem("1+1?")) == "1+1?\nGo."
    assert encoder.encode(problem("1+1?")) == (S, *spelled("1+1?\nGo."))


def test_without_a_template_messages_are_joined_by_blank_lines():
    messages = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "1+1?"}]
    encoder = encoder_of(tokenizer(None), instruction="Go.")
    assert encoder.render(problem(messages)) == "Hi.\n\n1+1?\nGo."


def test_responses_decode_without_special_tokens_and_prompts_with_them():
    encoder = encoder_of(tokenizer())
    ids = encoder.encode(problem("1 + 1 ?"))
    assert encoder.decode([*spelled("it s 2 ."), END]) == "it s 2 ."
    assert encoder.decode(()) == ""
    assert encoder.decode_prompt(ids) == "<user>1 + 1 ?<end><assistant>"


def test_long_prompts_are_dropped_and_counted_and_never_truncated():
    encoder = encoder_of(tokenizer(), max_prompt_tokens=7)
    problems = [
        problem("1234", "a"),
        problem("12345", "b"),
        problem("1234", "a"),
        problem("1", "c"),
    ]
    assert encoder.split_by_length(problems) == ([problems[0], problems[2], problems[3]], 1)
    assert [encoder.length(p) for p in problems] == [7, 8, 7, 4]
    assert len(encoder.encode(problems[1])) == 8
    assert encoder.split_by_length([]) == ([], 0)


def test_nothing_but_long_prompts_is_an_error_with_the_shortest():
    encoder = encoder_of(tokenizer(), max_prompt_tokens=5)
    with pytest.raises(DataError) as caught:
        encoder.split_by_length([problem("123", "a"), problem("12345", "b")])
    assert (
        str(caught.value)
        == "all 2 prompts are longer than data.max_prompt_tokens=5; the shortest has 6 tokens"
    )


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (
            None,
            {"chat_template": "on"},
            (
                "data.chat_template=on, but the model's tokenizer has no chat template; use auto"
                " or off"
            ),
        ),
        (
            None,
            {"system": "Hi."},
            (
                "data.system is set, but the model's tokenizer has no chat template; "
                "leave it out, or put it into data.instruction"
            ),
        ),
        (
            TEMPLATE,
            {"system": "Hi.", "chat_template": "off"},
            (
                "data.system is set, but data.chat_template=off; leave it out, or put it into"
                " data.instruction"
            ),
        ),
    ],
)
def test_options_that_need_a_template_are_errors_without_one(template, options, message):
    with pytest.raises(DataError) as caught:
        encoder_of(tokenizer(template), **options)
    assert str(caught.value) == message


def test_a_template_that_refuses_the_messages_gives_its_reason():
    encoder = encoder_of(tokenizer())
    with pytest.raises(DataError) as caught:
        encoder.encode(problem([{"role": "tool", "content": "x"}]))
    assert (
        str(caught.value)
        == "problem p: the model's chat template rejects messages of tool: no tools here"
    )


def test_an_instruction_needs_a_user_message():
    encoder = encoder_of(tokenizer(), instruction="Go.")
    with pytest.raises(DataError) as caught:
        encoder.encode(problem([{"role": "system", "content": "x"}]))
    assert (
        str(caught.value)
        == "problem p: data.instruction is appended to the last user message, but the prompt has none"
    )


def test_a_conversation_needs_a_template():
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    with pytest.raises(DataError) as caught:
        encoder_of(tokenizer(), chat_template="off").encode(problem(messages))
    assert (
        str(caught.value)
        == "problem p: a conversation with assistant messages cannot be rendered without a chat"
        " template; use data.chat_template=on with a model that has one"
    )
