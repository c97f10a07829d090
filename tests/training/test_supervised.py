"""Supervised steps: the gradient, the tokens of demonstrations, what is refused or left out, and
exact resume.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dapo
from dapo.cli.train import resume_run, start_run
from dapo.config import Config, DataConfig
from dapo.config.data_spec import ANY_COLUMNS, Columns
from dapo.core.errors import ConfigError, DataError
from dapo.data.demonstrations import demonstration_from_row, turns_of
from dapo.data.prompts import PromptEncoder
from dapo.environments.thoughts import ends_in_thought
from dapo.training.demonstrations import AnswerEncoder
from dapo.types import Problem
from helpers.chat_templates import FAMILIES, tokenizer
from helpers.finished_runs import cut_copy
from helpers.tables import for_each_row
from helpers.tiny_policies import (
    assert_close,
    branching,
    float64_model,
    gradient_of,
    loaded,
    make_policy,
    plain_copy,
    ragged,
)
from helpers.tiny_runs import contents, differences, inputs_of, metrics, tiny

TURNS = [
    {"role": "user", "content": "4 + 3?"},
    {"role": "assistant", "content": "4 + 3"},
    {"role": "user", "content": "7"},
    {"role": "assistant", "content": "It is 7"},
]
ROWS: Sequence[dict[str, Any]] = [
    *({"prompt": f"What is {a} + 2?", "response": str(a + 2)} for a in range(9)),
    {"prompt": "What is 3 + 2?", "completion": "five"},
    {
        "prompt": [{"role": "user", "content": "Hi"}],
        "completion": [{"role": "assistant", "content": "Hello"}],
    },
    {"messages": TURNS},
    {"conversations": [{"from": "human", "value": "Sum?"}, {"from": "gpt", "value": "Yes"}]},
]


def write(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def supervised(path: Path, *overrides: str) -> Config:
    return tiny(
        "train.eval_every=3",
        "preset=sft",
        f"data.demonstrations={path}",
        "train.minibatch_groups=4",
        "train.num_steps=6",
        "train.save_every=1",
        "train.keep_checkpoints=9",
        "optim.lr=0.01",
        *overrides,
    )


def read(row: dict[str, Any]) -> Any:
    return demonstration_from_row(row, where="a.jsonl, line 1", source="a", columns=ANY_COLUMNS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    start_run(supervised(write(path / "sft.jsonl")), run_dir=path / "whole", config_name="t")
    return path / "whole"


def test_the_likelihood_of_the_demonstrations_rises_and_nothing_is_sampled(whole: Path) -> None:
    rows = [row for row in metrics(whole) if row["step"]]
    assert rows[-1]["loss/nll"] < 0.8 * rows[0]["loss/nll"]
    assert all(
        row["rollout/tokens_generated"] == 0 < row["rollout/tokens_in_minibatches"] for row in rows
    )
    assert not any(
        name.startswith(("reward/", "loss/policy", "loss/ratio")) for row in rows for name in row
    )
    assert not list(whole.glob("rollouts/*"))


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_byte(
    whole: Path, tmp_path: Path
) -> None:
    cut = cut_copy(whole, tmp_path / "cut", step=2)
    resume_run(cut, [])
    assert contents(cut) == contents(whole)


@pytest.mark.parametrize("microbatch_tokens", [1, 40, 10_000])
def test_the_gradient_is_that_of_the_mean_cross_entropy_in_any_cut(
    microbatch_tokens: int, tmp_path: Path
) -> None:
    samples = [
        replace(row, advantage=1.0)
        for row in ragged() + [replace(r, group_id=9 + r.group_id) for r in branching()]
    ]
    samples = [
        replace(row, mask=tuple(i % 3 != 1 for i in range(len(row.response_ids))))
        for row in samples
    ]
    own = loaded(float64_model())
    network = plain_copy(own)
    found = gradient_of(
        make_policy(own, microbatch_tokens=microbatch_tokens), samples, tmp_path / "x"
    )
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for row in samples:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        labels = torch.tensor(
            [-100] * len(row.prompt_ids)
            + [t if m else -100 for t, m in zip(row.response_ids, row.mask, strict=True)]
        )
        logits = network(ids).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits, labels[1:], ignore_index=-100, reduction="sum"
        )
        count += sum(row.mask)
    (total / count).backward()
    expected = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert_close(found, expected, relative=1e-10)


NO_PLAIN_ANSWER = ("single", "note behind a thought", "deepseek r1", "exaone deep")
"""The last two open a thought, and refuse an answer within it."""


@for_each_row(["name"], [[name] for name in FAMILIES if name not in NO_PLAIN_ANSWER])
def test_the_tokens_of_a_demonstration_are_those_of_the_template_up_to_the_end_of_the_turn(
    name: str,
) -> None:
    tokens = tokenizer(name)
    config = DataConfig(train="builtin:sums")
    prompts = PromptEncoder(tokens, config)
    problem = read({"prompt": "4 + 3?", "response": "It is 7"})
    answer = AnswerEncoder(tokens, config, prompts).encode(problem)
    prompt = prompts.encode(problem)
    assert answer.sampled is None
    end = prompts.turn_end
    assert answer.token_ids[-1] == (
        tokens.eos_token_id if end is None or end.token_id is None else end.token_id
    )
    has_end = end is not None and end.token_id is not None
    ours = (*prompt, *answer.token_ids) if has_end else (*prompt, *answer.token_ids[:-1])
    text = prompts.render_messages(
        [{"role": "user", "content": "4 + 3?"}, *turns_of(problem)], header=False
    )
    # the header of an answer is another one than that of a prompt
    if not text.startswith(prompts.render(problem)):
        assert prompts.decode_prompt(answer.token_ids).startswith("It is 7")
        return
    assert text.startswith(prompts.decode_prompt(ours))
    assert "It is 7" in prompts.decode_prompt(answer.token_ids)
    whole = prompts.encode_rendered(text)
    assert whole[: len(prompt)] != prompt or whole[: len(ours)] == ours


THOUGHT = "<think>\nx\n</think>\n\n"
ANSWER = "8798"
RESPONSES: dict[str, dict[str, str]] = {
    "no thought": {"content": ANSWER},
    "a thought": {"content": THOUGHT + ANSWER},
    "a thought without its opening mark": {"content": THOUGHT.removeprefix("<think>\n") + ANSWER},
    "a thought in its key": {"content": ANSWER, "reasoning_content": "x"},
}


@for_each_row(
    ["name"], [[name] for name in FAMILIES if name not in ("single", "note behind a thought")]
)
def test_a_demonstration_opens_no_thought_twice_and_answers_in_none(name: str) -> None:
    tokens = tokenizer(name)
    config = DataConfig(train="builtin:sums")
    prompts = PromptEncoder(tokens, config)
    encoder = AnswerEncoder(tokens, config, prompts)
    for kind, turn in RESPONSES.items():
        problem = Problem("1", "q", ANSWER, fields={"turns": [{"role": "assistant", **turn}]})
        opens = (name == "exaone deep" and kind != "a thought in its key") or (
            name == "deepseek r1" and kind == "no thought"
        )
        shows_thoughts = any(mark in FAMILIES[name].template for mark in ("</think>", "</thought>"))
        if opens or (kind == "a thought in its key" and not shows_thoughts):
            with pytest.raises(
                DataError, match=r"close this thought.*itself writes|shows no reasoning_content"
            ):
                encoder.encode(problem)
            continue
        text = prompts.decode_prompt([*prompts.encode(problem), *encoder.encode(problem).token_ids])
        assert text.count("<think>") <= 1
        assert text.count(ANSWER) == 1
        if kind != "no thought":
            assert text.count("x\n</think>") + text.count("x\n</thought>") == 1
        assert not ends_in_thought(text)
    if name == "qwen 3 thinking":
        turn = encoder.encode(Problem("1", "q", RESPONSES["a thought"]["content"])).token_ids
        assert prompts.decode_prompt(turn) == "x\n</think>\n\n8798<|im_end|>"


def test_the_option_that_a_refusal_of_several_turns_names_has_effect() -> None:
    problem = read({"messages": TURNS})
    for name in ("qwen 3", "qwen 3 thinking", "deepseek r1"):
        tokens = tokenizer(name)
        config = DataConfig(train="builtin:sums")
        prompts = PromptEncoder(tokens, config)
        first = Problem(
            "1",
            problem.prompt,
            "",
            fields={"turns": [with_thought(each) for each in turns_of(problem)]},
        )
        with pytest.raises(DataError, match=r"environment\.history=append keeps them as sampled"):
            AnswerEncoder(tokens, config, prompts).encode(first)
        answer = AnswerEncoder(tokens, config, prompts, history="append").encode(first)
        assert answer.sampled is not None
        parts = [
            prompts.decode_prompt(answer.token_ids[start:end]) for start, end in answer.sampled
        ]
        assert ["x\n</think>" in part for part in parts] == [True, True]


def with_thought(message: Any) -> dict[str, Any]:
    is_own = message["role"] == "assistant"
    return {**message, "content": THOUGHT + message["content"] if is_own else message["content"]}


THINKING_BY_OPTION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if not think }}{% endif %}"
)


def test_columns_for_the_template_act_on_every_turn_of_a_demonstration() -> None:
    tokens = tokenizer.__wrapped__("chatml")
    tokens.chat_template = THINKING_BY_OPTION
    by_option = DataConfig(train="builtin:sums", chat_template_kwargs={"think": True})
    encoder = AnswerEncoder(tokens, by_option, PromptEncoder(tokens, by_option))
    expected = encoder.encode(read({"messages": TURNS}))
    assert expected.sampled is not None
    plain = DataConfig(train="builtin:sums")
    encoder = AnswerEncoder(tokens, plain, PromptEncoder(tokens, plain), history="append")
    with pytest.raises(
        DataError, match=r"puts behind a turn depends on the columns of problem .*; leave out think"
    ):
        encoder.encode(read({"messages": TURNS, "chat_template_kwargs": {"think": True}}))
    one_turn = {"prompt": "4 + 3?", "response": "It is 7"}
    problem = read({**one_turn, "chat_template_kwargs": {"think": True}})
    prompts = PromptEncoder(tokens, plain)
    assert prompts.render(problem).endswith("<|im_start|>assistant\n")
    assert prompts.decode_prompt(encoder.encode(problem).token_ids) == "It is 7<|im_end|>"


def test_all_turns_of_the_assistant_are_imitated_and_nothing_else() -> None:
    tokens = tokenizer("chatml")
    config = DataConfig(train="builtin:sums")
    prompts = PromptEncoder(tokens, config)
    problem = read({"messages": TURNS})
    assert (problem.question, problem.answer) == ("4 + 3?", "It is 7")
    answer = AnswerEncoder(tokens, config, prompts).encode(problem)
    assert answer.sampled is not None
    parts = [prompts.decode_prompt(answer.token_ids[start:end]) for start, end in answer.sampled]
    assert parts == ["4 + 3<|im_end|>", "It is 7<|im_end|>"]
    text = prompts.decode_prompt([*prompts.encode(problem), *answer.token_ids])
    assert prompts.render_messages(TURNS, header=False).startswith(text)


def test_other_columns_change_nothing() -> None:
    row = {"prompt": "a", "response": "b"}
    assert read(row | {"turns": 3, "icon": b"x", "answer": "c"}) == read(row)
    # KTO's wanted responses, and labels that say nothing about a response
    for label in (True, 0, 1, "false", None):
        assert read(row | {"label": label}) == read(row)
    # a row without images, and the name of a container's image
    assert read(row | {"images": [], "videos": None, "image": "python:3.12"}) == read(row)


@for_each_row(
    ("row", "message"),
    [
        (
            {"prompt": "a"},
            "no demonstration; expected the columns prompt and response or completion",
        ),
        (
            {"response": "a"},
            "no prompt beside response; expected a column prompt or question or problem",
        ),
        ({"prompt": "a", "response": "  "}, "response is empty; a demonstration needs a response"),
        ({"prompt": "a", "response": []}, "response must be a list of messages, got list"),
        ({"prompt": "a", "response": True}, "response must be a list of messages, got bool True"),
        (
            {"prompt": "a", "response": [{"role": "user", "content": "b"}]},
            "has no assistant message",
        ),
        (
            {"prompt": "a", "response": TURNS},
            "response: the first message has the role user; a response starts with",
        ),
        (
            {"messages": [*TURNS, TURNS[3]]},
            "messages: two assistant messages follow each other; join them",
        ),
        ({"messages": TURNS[:1]}, "messages has no assistant message; a demonstration has"),
        (
            {"messages": TURNS[1:]},
            "messages starts with an assistant message; a demonstration has",
        ),
        (
            {"messages": [TURNS[0], {"role": "assistant", "content": ""}]},
            "message 2: the assistant's content is empty",
        ),
        (
            {"messages": [TURNS[0], {"role": "assistant", "tool_calls": []}]},
            "expected a mapping with role and content",
        ),
        (
            {"messages": TURNS, "images": [{"bytes": "q", "path": "q.png"}]},
            "the column images holds list, as images and recordings are held",
        ),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "label is false, as KTO marks an unwanted response",
        ),
        ({"messages": TURNS, "label": False}, "label is false, as KTO marks an unwanted response"),
        (
            {"messages": [*TURNS[:3], {**TURNS[3], "weight": 0}]},
            "message 4: weight 0 or train false says that this turn is not imitated",
        ),
        (
            {"messages": [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]},
            "message 2: weight 0 or train false says that this turn is not imitated",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Sum?", "weight": 0},
                    {"from": "gpt", "value": "Yes", "weight": 0},
                ]
            },
            "message 2: weight 0 or train false says that this turn is not imitated",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Sum?"},
                    {"from": "function_call", "value": "{}"},
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "3"},
                ]
            },
            "message 2: from must be human, gpt or one of system, developer, user, assistant, tool,"
            " got function_call",
        ),
    ],
)
def test_a_row_that_is_no_demonstration_is_refused_by_what_it_lacks(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: ") as error:
        read(row)
    assert message in str(error.value)


def test_a_column_system_is_the_first_message_unless_there_is_one() -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Sum?"}
    turns = [{"from": "user", "value": "Sum?"}, {"from": "assistant", "value": "Yes"}]
    for row in ({"conversations": turns}, {"prompt": "Sum?", "response": "Yes"}):
        assert read({**row, "system": "Be brief."}).prompt == [system, user]
        assert read({**row, "system": ""}) == read(row) == read({**row, "system": None})
        # OpenOrca's name
        assert read({**row, "system_prompt": "Be brief."}).prompt == [system, user]
        both = {"system": "Be brief.", "system_prompt": "Be long."}
        assert read({**row, **both}).prompt == [system, user]
    own = [{"from": "system", "value": "Be long."}, *turns]
    kept = read({"conversations": own, "system": "Be brief."})
    assert kept.prompt == [{"role": "system", "content": "Be long."}, user]
    # a weight of 0 says nothing about a turn that is not imitated anyway
    weighted = [{**turns[0], "weight": 0}, {**turns[1], "weight": 1}]
    assert read({"conversations": weighted}) == read({"conversations": turns})


def test_tools_as_a_list_of_json_texts_reach_a_demonstration() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    row = {"prompt": "Sum?", "response": "Yes"}
    texts = [json.dumps(tool) for tool in tools]
    assert read({**row, "tools": texts}).fields == {"tools": tools}
    assert read({**row, "tools": texts}) == read({**row, "tools": tools})


@pytest.mark.parametrize("columns", [ANY_COLUMNS, Columns(prompt="instruction")])
def test_a_question_of_alpacas_form_is_read_whole(columns: Columns) -> None:
    def read_alpaca(**more: Any) -> Problem:
        row = {"instruction": "Add.", "output": "3", **more}
        return demonstration_from_row(row, where="a.json, row 1", source="a", columns=columns)

    plain = read_alpaca(input="", history=[])
    assert (plain.prompt, plain.answer) == ("Add.", "3")
    assert read_alpaca(input="1 and 2").prompt == "Add.\n1 and 2"
    roles = ("user", "assistant", "user")
    texts = ("Hello.", "Hi.", "Add.\n1 and 2")
    assert read_alpaca(input="1 and 2", history=[["Hello.", "Hi."]]).prompt == [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
    ]
    with pytest.raises(DataError, match="row 1: history must hold pairs of a question and an"):
        read_alpaca(history=["Hello."])
    with pytest.raises(DataError, match="row 1: history must be a list of pairs"):
        read_alpaca(history="Hello.")


def test_what_is_held_out_or_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    held_out = [{"prompt": "What is 3 + 2?", "answer": "5"}]
    rows = [
        *ROWS,
        {"prompt": "long", "response": "x" * 99},
        {"prompt": "longer", "response": "x" * 100},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    other = write(tmp_path / "b.jsonl", held_out)
    config = supervised(path, f"data.eval={other}", "rollout.max_response_tokens=20")
    inputs = inputs_of(config)
    assert "2 demonstrations left out: their text is in the evaluation set" in inputs.notes
    assert "2 demonstrations left out: longer than rollout.max_response_tokens" in inputs.notes
    assert len(inputs.train) == len(rows) - 4 == len(inputs.answers)
    with pytest.raises(
        DataError, match=r"all 1 demonstrations are longer than rollout\.max_response_tokens=9"
    ):
        inputs_of(supervised(write(path, rows[-1:]), "rollout.max_response_tokens=9"))
    one = inputs_of(supervised(write(path, [{"prompt": "a", "response": r} for r in "xyz"])))
    assert "all 3 demonstrations answer the same problem" in one.notes
    ending = write(path, [{"prompt": "a", "response": "b<eos>c"}])
    with pytest.raises(
        DataError, match="contains <eos>, which ends a turn; leave it out, it is added"
    ):
        inputs_of(supervised(ending))


def test_a_demonstration_needs_positions_for_itself_alone(tmp_path: Path) -> None:
    # the paper's limit of a response is longer than the model's 4,096 positions
    options = ("rollout.max_response_tokens=20480", "data.max_prompt_tokens=20480")
    long_rows = [{"prompt": "a", "response": "x" * 5000}, {"prompt": "b" * 5000, "response": "x"}]
    path = write(tmp_path / "a.jsonl", [*ROWS, *long_rows])
    inputs = inputs_of(supervised(path, *options, "data.eval=null"))
    assert (
        "2 demonstrations left out: longer than the 4096 positions of tiny-random" in inputs.notes
    )
    assert len(inputs.train) == len(ROWS)
    with pytest.raises(DataError, match="all 2 demonstrations, prompt and response together, are"):
        inputs_of(supervised(write(path, long_rows), *options, "data.eval=null"))
    # an evaluation samples up to the limit
    held_out = write(tmp_path / "b.jsonl", [{"prompt": "c", "answer": "1"}])
    with pytest.raises(ConfigError, match="a response of 20480 exceed the 4096 positions"):
        inputs_of(supervised(write(path, ROWS), *options, f"data.eval={held_out}"))


@for_each_row(
    ("overrides", "message"),
    [
        (["advantage.estimator=gae"], "advantage.estimator=gae is for sampled responses"),
        (["loss.aggregate=sequence"], "loss.aggregate=sequence is for sampled responses"),
        (["loss.surrogate=gspo"], "loss.surrogate=gspo is for sampled responses"),
        (["loss.kl_coef=0.1", "loss.kl_in=reward"], "loss.kl_in=reward is for sampled responses"),
        (["train.passes_per_step=2"], "train.passes_per_step=2 is for sampled responses"),
        (["rollout.temperature=0.7"], "rollout.temperature=0.7 divides the logits"),
        (
            ["data.demonstrations=null"],
            "schedule=supervised imitates demonstrations; set data.demonstrations",
        ),
    ],
)
def test_options_of_sampled_responses_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        supervised(Path("sft.jsonl"), *overrides)
    assert message in str(error.value)


def test_rows_in_memory_are_demonstrations_for_a_call_from_python(tmp_path: Path) -> None:
    sizes = {"steps": 2, "minibatch_groups": 4, "max_response_tokens": 20, "lr": 1e-2, "threads": 1}
    run = dapo.train("tiny-random", demonstrations=ROWS, run_dir=tmp_path / "run", **sizes)
    assert (run.config.schedule, run.config.preset) == ("supervised", "sft")
    assert len(run.metrics) == 2
    by_preset = {"preset": "sft", "data": ROWS}
    same = dapo.train("tiny-random", run_dir=tmp_path / "same", **by_preset, **sizes)
    assert same.metrics["loss/nll"].equals(run.metrics["loss/nll"])
    checked = dapo.check("tiny-random", config={"preset": "sft"}, data=ROWS, minibatch_groups=4)
    assert checked.ok
    assert "4 demonstrations, 1 update" in str(checked)
    with pytest.raises(DataError, match=r"demonstrations, row 2: response is empty"):
        dapo.train(
            "tiny-random",
            demonstrations=[*ROWS[:1], {"prompt": "a", "response": ""}],
            run_dir=tmp_path / "b",
            **sizes,
        )


@pytest.mark.parametrize(
    "overrides",
    [["model.lora={rank: 2, alpha: 4}"], ["distributed.trainer_ranks=2"]],
    ids=["lora", "two_ranks"],
)
def test_adapters_and_ranks_train_on_demonstrations(
    overrides: list[str], whole: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "sft.jsonl")
    start_run(
        supervised(path, *overrides, "train.eval_every=0"),
        run_dir=tmp_path / "run",
        config_name="t",
    )
    found, expected = (
        [row for row in metrics(each) if row["step"]] for each in (tmp_path / "run", whole)
    )
    assert found[0]["loss/nll"] == pytest.approx(expected[0]["loss/nll"], rel=1e-5)
    assert found[-1]["loss/nll"] < found[0]["loss/nll"]
    if "lora" not in overrides[0]:
        assert found[-1]["loss/nll"] == pytest.approx(expected[-1]["loss/nll"], rel=1e-2)


def test_a_run_with_a_relative_path_is_resumed_from_another_folder_without_a_difference(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    write(tmp_path / "sft.jsonl")
    monkeypatch.chdir(tmp_path)
    start_run(
        supervised(Path("sft.jsonl"), "train.num_steps=3"),
        run_dir=tmp_path / "run",
        config_name="t",
    )
    monkeypatch.chdir(tmp_path / "there")
    capsys.readouterr()
    resume_run(tmp_path / "run", ["train.num_steps=6"])
    assert "different run" not in capsys.readouterr().out
    assert differences(contents(tmp_path / "run"), contents(whole)) == []
    held_out = write(tmp_path / "held_out.jsonl", [{"prompt": "a", "answer": "1"}])
    all_held_out = write(tmp_path / "one.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(
        DataError, match=r"data\.demonstrations: every problem is also in data\.eval"
    ):
        inputs_of(supervised(all_held_out, f"data.eval={held_out}"))


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"a": 2}}}]},
        {"content": None, "tool_calls": [{"function": {"name": "find", "arguments": '{"a": 2}'}}]},
        {"content": "so 7", "reasoning_content": "hm"},
    ],
)
def test_a_call_and_a_thought_of_a_demonstration_are_imitated_as_the_template_writes_them(
    turn,
) -> None:
    tokens = tokenizer("qwen 2.5")
    thought = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    copied = type(tokens)(tokenizer_object=tokens.backend_tokenizer, eos_token="</s>")
    copied.chat_template = FAMILIES["qwen 2.5"].template.replace(
        "{{ m.content }}", thought + "{{ m.content or '' }}"
    )
    prompts = PromptEncoder(copied, DataConfig(train="builtin:sums"))
    problem = read(
        {"messages": [{"role": "user", "content": "4 + 3?"}, {"role": "assistant", **turn}]}
    )
    answer = AnswerEncoder(copied, DataConfig(train="builtin:sums"), prompts).encode(problem)
    wanted = (
        '\n{"name": "find", "arguments": {"a": 2}}\n'
        if "tool_calls" in turn
        else "<think>hm</think>so 7"
    )
    text = prompts.decode_prompt(answer.token_ids)
    assert wanted in text
    assert text.endswith("<|im_end|>")
