import json
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from dapo.config import build_config
from dapo.config.model_options import DataConfig
from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptEncoder, chat_request
from dapo.types import Problem
from helpers.chat_templates import CHATML_HEADER, CHATML_TURN, FAMILIES, each, tokenizer
from helpers.tables import for_each_row

USER = {"role": "user", "content": "2+3?"}
NEXT = {"role": "user", "content": "times 2?"}
FUNCTION = {"name": "calculator", "arguments": {"a": 2, "unit": "m"}}
CALL = {"type": "function", "id": "call00001", "function": FUNCTION}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "calculator", "tool_call_id": "call00001", "content": "5"}
CONVERSATIONS = {
    "a question": [USER],
    "a system message": [{"role": "system", "content": "Be brief."}, USER],
    "an earlier answer": [USER, {"role": "assistant", "content": "5"}, NEXT],
    "a call and its result": [USER, CALLING, RESULT],
    "a call and another question": [
        USER,
        CALLING,
        RESULT,
        {"role": "assistant", "content": "5"},
        NEXT,
    ],
    "a call without content": [USER, {**CALLING, "content": None}, RESULT],
    "a thought": [
        USER,
        {"role": "assistant", "reasoning_content": "hm", "thinking": "hm", "content": "5"},
        NEXT,
    ],
    "a name": [{**USER, "name": "ann"}],
}
ALL_KEYS = each(
    "<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n{{ m.thinking }}{{"
    " m.reasoning_content }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{"
    " c.function | tojson }}{% endfor %}{{ m.tool_call_id }}{{ m.other }}<|im_end|>\n",
    CHATML_HEADER,
)


def with_template(template, *, bos=None):
    made = tokenizer(None)
    made = type(made)(tokenizer_object=made.backend_tokenizer, eos_token="</s>", bos_token=bos)
    made.chat_template = template
    return made


def adding_bos(template):
    made = with_template(template, bos="<s>")
    begin = made.convert_tokens_to_ids("<s>")
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return made


def encoder(made, **options):
    return PromptEncoder(made, DataConfig(train="builtin:sums", **options))


def problem(prompt, **fields):
    return Problem("0" * 16, prompt, "5", "t", fields)


def load(path, prompt, **columns):
    """The problem of a row in a file of each format."""
    row = {"prompt": prompt, "answer": "5", **columns}
    match path.suffix:
        case ".jsonl":
            path.write_text(json.dumps(row) + "\n")
        case ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        case suffix:
            separator = "\t" if suffix == ".tsv" else ","
            quoted = [
                '"' + (v if isinstance(v, str) else json.dumps(v)).replace('"', '""') + '"'
                for v in row.values()
            ]
            path.write_text(f"{separator.join(row)}\n{separator.join(quoted)}\n")
    return load_problems(str(path))[0]


FORMATS = [".jsonl", ".parquet", ".csv", ".tsv"]


def raw_text(made, messages):
    """The template's own text of messages, None if it rejects them."""
    try:
        return made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:
        return None


@for_each_row(
    "family", [name for name in FAMILIES if "strftime_now" not in FAMILIES[name].template]
)
def test_messages_give_the_text_that_the_template_itself_makes_of_them(tmp_path, family):
    made = tokenizer(family)
    compared = 0
    for name, messages in CONVERSATIONS.items():
        wanted = raw_text(made, messages)
        if wanted is None or "{'a'" in wanted or "None" in wanted:
            continue
        loaded = load(tmp_path / "d.jsonl", messages)
        assert encoder(made).render(loaded) == wanted, name
        compared += 1
    assert compared


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_key_of_messages_reaches_the_template_from_every_format(tmp_path, suffix):
    made = with_template(ALL_KEYS)
    for name, messages in CONVERSATIONS.items():
        messages = [*messages, {**USER, "other": "kept"}]
        loaded = load(tmp_path / f"d{suffix}", messages)
        assert encoder(made).render(loaded) == raw_text(made, messages), name
        assert loaded.id == load(tmp_path / "same.jsonl", messages).id


def test_arguments_merged_by_parquet_lose_the_nulls_of_other_tools(tmp_path):
    other = {
        "type": "function",
        "id": "2",
        "function": {"name": "find", "arguments": {"query": "x"}},
    }
    messages = [USER, {**CALLING, "tool_calls": [CALL, other]}, RESULT, NEXT]
    made = with_template(ALL_KEYS)
    assert encoder(made).render(load(tmp_path / "d.parquet", messages)) == raw_text(made, messages)


def test_a_null_argument_that_a_file_of_json_holds_stays(tmp_path):
    call = {"function": {"name": "find", "arguments": {"unit": None}}}
    text = encoder(with_template(ALL_KEYS)).render(
        load(tmp_path / "d.jsonl", [USER, {**CALLING, "tool_calls": [call]}, RESULT])
    )
    assert '"arguments": {"unit": null}' in text


@pytest.mark.parametrize(
    "family", ["qwen 2.5", "hermes in strings", "deepseek r1", "llama 3.1", "mistral 3"]
)
@pytest.mark.parametrize("given", [FUNCTION["arguments"], json.dumps(FUNCTION["arguments"])])
def test_arguments_are_given_as_the_template_takes_them(family, given):
    call = {**CALL, "function": {**FUNCTION, "arguments": given}}
    text = encoder(tokenizer(family)).render(
        problem([USER, {**CALLING, "tool_calls": [call]}, RESULT])
    )
    assert '{"a": 2, "unit": "m"}' in text


def test_parts_of_text_are_text_and_a_template_that_takes_parts_gets_them(tmp_path):
    parts = [{"type": "text", "text": "2+3"}, {"type": "text", "text": "=?"}]
    one = load(tmp_path / "one.parquet", [{"role": "user", "content": parts[:1]}])
    assert one.prompt == [{"role": "user", "content": "2+3"}]
    several = load(tmp_path / "d.jsonl", [{"role": "user", "content": parts}])
    assert "2+3\n=?" in encoder(tokenizer("chatml")).render(several)
    takes_parts = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{%"
        " endfor %}"
    )
    assert encoder(with_template(takes_parts)).render(several) == "[2+3][=?]"
    assert encoder(with_template(takes_parts)).render(one) == "[2+3]"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
            "text only.*the type image",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "the type image_url",
        ),
        ({"role": "user", "content": 5}, "content must be a string or a list of parts"),
        ({"role": "user", "content": None}, "content must be a string"),
        ({"role": "assistant", "content": ""}, "is to continue: it needs a text"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(tmp_path, message, reason):
    with pytest.raises(DataError, match=reason):
        load(tmp_path / "d.jsonl", [USER, message])


def test_a_template_that_writes_none_for_a_call_without_content_is_refused():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    with pytest.raises(
        DataError,
        match='writes None for a message without content; give it an empty one, "content"',
    ):
        encoder(with_template(plain)).render(problem([USER, {**CALLING, "content": None}, RESULT]))


def test_keys_columns_and_variables_that_the_template_does_not_read_are_named():
    given = problem([USER, CALLING, {**RESULT, "weight": 1}], tools=[CALL])
    notes = "\n".join(
        encoder(tokenizer("chatml"), chat_template_kwargs={"thinking_budget": 5}).notes([given])
    )
    assert "does not read name, tool_call_id, tool_calls, weight of messages" in notes
    assert "does not read tools" in notes
    assert "does not read thinking_budget (data.chat_template_kwargs)" in notes
    assert encoder(with_template(ALL_KEYS)).notes([problem([USER, CALLING, RESULT])]) == []


def test_the_tools_of_a_row_reach_the_template(tmp_path):
    tools = [
        {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    ]
    made = tokenizer("qwen 2.5")
    wanted = made.apply_chat_template(
        [USER], tools=tools, tokenize=False, add_generation_prompt=True
    )
    for name, given in (
        ("a.jsonl", tools),
        ("b.parquet", tools),
        ("c.parquet", json.dumps(tools)),
        ("d.csv", tools),
    ):
        loaded = load(tmp_path / name, [USER], tools=given)
        assert encoder(made).render(loaded) == wanted
        assert loaded.id != load(tmp_path / "none.jsonl", [USER]).id
    config = DataConfig(train="builtin:sums", chat_template_kwargs={"x": 1})
    wanted = {"messages": [USER], "tools": tools, "chat_template_kwargs": {"x": 1}}
    assert chat_request(loaded, config=config) == wanted


def test_variables_of_the_template_are_options_and_a_row_may_have_its_own():
    template = each(
        CHATML_TURN,
        CHATML_HEADER + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    )
    made = with_template(template)
    assert "<think>" not in encoder(made).render(problem("2+3?"))
    assert "<think>" in encoder(made, chat_template_kwargs={"enable_thinking": False}).render(
        problem("2+3?")
    )
    assert "<think>" in encoder(made).render(
        problem("2+3?", chat_template_kwargs={"enable_thinking": False})
    )
    with pytest.raises(
        DataError, match=r"data.chat_template_kwargs is set, but data.chat_template=off"
    ):
        encoder(made, chat_template="off", chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "tokenize", "strftime_now"]
)
def test_variables_that_prompts_are_rendered_with_cannot_be_set(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be set"):
        build_config(
            {
                "model": "tiny-random",
                "data": {"train": "builtin:sums", "chat_template_kwargs": {name: 1}},
            }
        )


CLOCK = "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_clock_of_a_template_stands_still_at_the_time_that_is_handed_in():
    made = with_template(CLOCK)
    config = DataConfig(train="builtin:sums").at_time(datetime(2031, 1, 5, 23, 59))
    assert PromptEncoder(made, config).render(problem("2+3?")) == "05 Jan 2031 23:592+3?"
    assert any(
        "reads the clock, which shows 2031-01-05 23:59:00" in n
        for n in PromptEncoder(made, config).notes([])
    )
    assert config == DataConfig(train="builtin:sums")


@pytest.mark.parametrize("drawn", ["range(9999) | random", "lipsum()"])
def test_what_a_template_draws_at_random_is_a_function_of_the_messages(drawn):
    made = with_template("{{ " + drawn + " }}{% for m in messages %}{{ m.content }}{% endfor %}")
    texts = {encoder(made).render(problem("2+3?")) for _ in range(3)}
    assert len(texts) == 1


# --- prompts that are rendered already

RENDERED = [name for name in FAMILIES if raw_text(tokenizer(name), [USER]) not in (None, "")]


@for_each_row("family", RENDERED)
def test_no_template_is_put_into_a_template(family):
    made = tokenizer(family)
    text = raw_text(made, [USER])
    if "[INST]" not in text and "<" not in text and ":" not in text:
        pytest.fail(f"{family} has neither marks nor labels")
    try:
        result = encoder(made).render(problem(text))
    except DataError as error:
        result = str(error)
    assert result == text or "data.chat_template=off" in result


@for_each_row("family", RENDERED)
@for_each_row(
    "text",
    [
        "Is 1 < 2 > 0? See [1] and [INSTANCE].",
        "A User sends 3 messages. The Assistant: 5. How many?",
        "Think in <think> and </think>, answer in <answer>.",
        "Solve a < b: use <tool_call> or [x]. user: 3",
    ],
)
def test_a_question_with_brackets_or_names_of_roles_is_a_question(family, text):
    assert text in encoder(tokenizer(family)).render(problem(text))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_rendered_prompt_has_one_begin_token_in_every_format(tmp_path, suffix):
    made = adding_bos(each(CHATML_TURN, CHATML_HEADER, "<s>"))
    begin = made.bos_token_id
    text = raw_text(made, [USER])
    expected = encoder(made).encode(problem([USER]))
    assert expected.count(begin) == 1
    for given in (text, text.removeprefix("<s>")):
        loaded = load(tmp_path / f"d{suffix}", given)
        assert encoder(made).encode(loaded) == expected
        assert encoder(made, chat_template="off").encode(loaded) == expected
        assert encoder(made, chat_template="off").length(loaded) == len(expected)
        with pytest.raises(DataError, match=r"already, so data.instruction would have no effect"):
            encoder(made, instruction="Go.").encode(loaded)
    with pytest.raises(DataError, match=r"holds <\|im_start\|>.*data.chat_template=off"):
        encoder(made).encode(load(tmp_path / f"part{suffix}", "<|im_start|>user\n2+3?<|im_end|>"))


# --- prompts that end with the beginning of the answer

BEGUN = [USER, {"role": "assistant", "content": "Let me count.\n<think>"}]


@for_each_row("family", list(FAMILIES))
def test_the_beginning_of_an_answer_is_continued_and_its_turn_stays_open(family):
    made = tokenizer(family)
    encode = encoder(made)
    closed = raw_text(made, BEGUN)
    if closed is None:
        with pytest.raises(
            DataError, match=r"rejects messages of user, assistant|cannot be rendered"
        ):
            encode.render(problem(BEGUN))
        return
    text = encode.render(problem(BEGUN))
    assert text.endswith("Let me count.\n<think>")
    assert "2+3?" in text
    assert problem(BEGUN).question == "2+3?"
    assert not text.startswith(closed)
    # the text itself is a prompt that is rendered already
    if family in RENDERED and text.startswith(raw_text(made, [USER])):
        try:
            again = encode.render(problem(text))
        except DataError as error:
            again = str(error)
        assert again == text or "data.chat_template=off" in again


def test_the_beginning_of_an_answer_has_its_note_its_instruction_and_its_request():
    made = tokenizer("qwen 2.5")
    begun = problem(BEGUN)
    assert encoder(made).notes([begun, problem("2+3?")]) == [
        "1 prompts end with the beginning of the answer, which the model continues; a response is"
        " what follows it"
    ]
    head = made.apply_chat_template(
        [{"role": "user", "content": "2+3?\nGo."}], tokenize=False, add_generation_prompt=True
    )
    assert encoder(made, instruction="Go.").render(begun) == f"{head}Let me count.\n<think>"
    request = chat_request(begun, config=DataConfig(train="builtin:sums"))
    assert request == {
        "messages": BEGUN,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    # a server and an agent's endpoint begin another turn
    options = DataConfig(train="builtin:sums")
    another = PromptEncoder(made, options, continues_answers=False)
    assert another.render(begun) == raw_text(made, BEGUN)
    assert another.notes([begun]) == []


@pytest.mark.parametrize("suffix", FORMATS)
def test_json_text_of_messages_is_messages_in_every_format(tmp_path, suffix):
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert load(tmp_path / f"a{suffix}", json.dumps(messages)).prompt == messages
    assert load(
        tmp_path / f"b{suffix}", json.dumps([{"from": "human", "value": "2+3?"}])
    ).prompt == [USER]
    for text in ("[1, 2] has which sum?", '["a", "b"]', "[x"):
        assert load(tmp_path / f"c{suffix}", text).prompt == text
    with pytest.raises(DataError, match="as Python prints them"):
        load(tmp_path / f"d{suffix}", str(messages))


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_conversation_that_ends_with_a_question_is_a_prompt(tmp_path, column):
    path = tmp_path / "d.jsonl"
    for messages in ([USER], json.dumps([USER]), [{"from": "human", "value": "2+3?"}]):
        path.write_text(json.dumps({column: messages, "answer": "5"}))
        loaded = load_problems(str(path))[0]
        assert (loaded.prompt, loaded.answer) == ([USER], "5")
    path.write_text(
        json.dumps({column: [USER, {"role": "assistant", "content": "5"}], "answer": "5"})
    )
    with pytest.raises(DataError, match="holds finished conversations"):
        load_problems(str(path))
