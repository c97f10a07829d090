"""Calls with the names of other libraries: each is answered by the same call in dapo's names."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dapo
from dapo.api.call_site import CallSite
from dapo.api.foreign_calls import CALLS, NAMES, Function, foreign_answer, is_option
from dapo.api.python_words import in_python, keyword_of
from dapo.config.option_fields import options_of
from dapo.config.other_names import COUNTERPARTS
from helpers.tables import for_each_row

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
    "steps": 1,
}
COMMANDS_OF_OTHERS = ("trl grpo", "hf upload", "rollouts/")
REMARKS = sorted(
    {row.remark for rows in COUNTERPARTS.values() for row in rows}
    | {row.remark for rows in NAMES.values() for row in rows.values()}
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [float(any(map(str.isdigit, text))) for text in completions]


def varied(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def refusal(call: Any) -> str:
    with pytest.raises((dapo.DapoError, AttributeError)) as refused:
        call()
    return str(refused.value)


class Game:
    """An environment."""


def pasted(message: str) -> str:
    """The call in a message."""
    lines = message.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"    \S", line)]
    assert starts, message
    return "\n".join(lines[starts[0] : starts[-1] + 1]).strip()


@for_each_row("remark", REMARKS)
def test_each_remark_of_each_table_is_python_or_prose(remark: str):
    text = in_python(remark)
    for code in re.findall(r"`([^`]*)`", re.sub("the command `[^`]*`", "", text)):
        if code not in COMMANDS_OF_OTHERS:
            ast.parse(f"call({code})")
    assert in_python(text) == text
    prose = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"--\w|CONFIG\.yaml|\bdapo (train|resume|eval|export) ", prose), text
    assert "null" not in re.findall(r"\w+", re.sub(r"`std_level=null`", "", text)), text


@for_each_row("call", sorted(NAMES.keys() - {"dapo"}))
def test_each_row_of_the_names_of_python_leads_to_what_the_function_takes(call: str):
    from dapo.api.session import Session

    owner = {"collect": Session, "generate": dapo.Run, "evaluate": dapo.Run}
    owner["export"] = dapo.Run
    parameters = inspect.signature(getattr(owner.get(call, dapo), call)).parameters
    for name, row in NAMES[call].items():
        assert bool(row.here) != bool(row.remark) or row.here == "on_step", name
        if row.here:
            assert row.here in parameters or is_option(row.here), name
        assert name not in parameters, name
        # what an option is called already needs no row, except where it cannot be given
        if call in CALLS and call != "resume" and CALLS[call] == "train":
            assert not is_option(name) or call == "session", name


@for_each_row("option", [name for name, _ in options_of() if "." in name])
def test_a_keyword_means_its_option_and_no_other(option: str):
    from dapo.api.keywords import option_named

    keyword = keyword_of(option)
    # `model`, `data` and `reward` are arguments, and short forms of their sections
    short_forms = {"model": "model.name", "data": "data.train", "reward": "reward.verifier"}
    assert keyword is None or short_forms.get(keyword, option_named(keyword)) == option


OBJECT = object()
WHOLE_CALLS: dict[str, Any] = {
    "TRL": lambda: dapo.train(
        model="tiny-random",
        train_dataset=ROWS,
        reward_funcs=digits,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        max_steps=1,
        processing_class=OBJECT,
    ),
    "TRL's GRPOConfig, two rewards": lambda: dapo.train(
        model="tiny-random",
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        reward_funcs=[digits, varied],
        args=SimpleNamespace(
            reward_weights=[1, 0.2],
            output_dir="trl",
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=8,
            num_train_epochs=0.25,
            epsilon_high=0.3,
            lr_scheduler_type="cosine",
        ),
    ),
    "TRL's classes": lambda: dapo.GRPOTrainer(
        model="tiny-random",
        reward_funcs=digits,
        args=dapo.GRPOConfig(num_generations=4, max_completion_length=8, max_steps=1),
        train_dataset=ROWS,
    ).train(),
    "verl": lambda: dapo.train(
        **{
            "actor_rollout_ref.model.path": "tiny-random",
            "data.train_files": "builtin:sums",
            "data.train_batch_size": 2,
            "actor_rollout_ref.rollout.n": 4,
            "data.max_response_length": 8,
            "trainer.total_training_steps": 1,
        },
        compute_score=digits,
    ),
    "verl's sections": lambda: dapo.train(
        data={"train_files": "builtin:sums", "train_batch_size": 2, "max_response_length": 8},
        actor_rollout_ref={"model": {"path": "tiny-random"}, "rollout": {"n": 4}},
        trainer={"total_training_steps": 1},
        reward=digits,
    ),
    "by position": lambda: dapo.train("tiny-random", ROWS, digits, **SMALL),
}


def config_of(
    model: Any, data: Any, reward: Any = None, run_dir: Any = None, **options: Any
) -> Any:
    """The options of a call of `dapo.train`, which does not run."""
    from dapo.api.keywords import build_scaled, read_keywords

    options.pop("eval_data", None)
    source = data if isinstance(data, str) else "builtin:sums"
    settings = {"model.name": model, "data.train": source}
    values, _, _ = read_keywords(settings, reward, options)
    return build_scaled({}, values, where="here")[0]


@for_each_row("name", WHOLE_CALLS)
def test_a_whole_call_of_another_library_is_answered_with_a_call_that_runs(name: str):
    message = refusal(WHOLE_CALLS[name])
    assert "missing" not in message
    assert "1 + 1 =" not in message, "rows are printed"
    assert "object at" not in message
    code = pasted(message).removeprefix("run = ")
    variables = {**globals(), "dapo": SimpleNamespace(train=config_of)}
    config = eval(code, variables)
    if name == "TRL":
        config = eval(code, globals()).config  # a run
    assert config.rollout.group_size == 4
    assert config.rollout.prompts_per_step == 2
    # .25 epochs of 8 rows
    assert config.with_steps_of_epochs(len(ROWS)).train.num_steps == 1
    assert config.model.name == "tiny-random"


def test_the_call_to_paste_has_the_texts_of_the_caller():
    lr = 1e-3
    message = refusal(
        lambda: dapo.train(model="tiny-random", train_dataset=ROWS[2:], learning_rate=lr, beta=0.5)
    )
    assert pasted(message) == 'dapo.train("tiny-random", data=ROWS[2:], lr=lr, kl_coef=0.5)'
    keywords = {"model": "tiny-random", "train_dataset": ROWS, "learning_rate": 0.1, "beta": [{}]}
    message = refusal(lambda: dapo.train(**keywords))
    assert pasted(message) == 'dapo.train("tiny-random", data=ROWS, kl_coef=..., lr=0.1)'


SINGLE: dict[str, tuple[Any, str]] = {
    "output_dir": (lambda: dapo.train(output_dir="x"), 'output_dir="x" is run_dir="x" here'),
    "callbacks": (lambda: dapo.train(callbacks=[digits]), "on_step"),
    "processing_class": (
        lambda: dapo.train(processing_class=OBJECT),
        "the model's own tokenizer is used",
    ),
    "reward_weights": (
        lambda: dapo.train(reward=[digits, varied], reward_weights=[1, 0.2]),
        "reward={digits: 1, varied: 0.2}",
    ),
    "optim_lr": (lambda: dapo.train(optim_lr=1e-5), "optim_lr=1e-5 is lr=1e-5 here"),
    "optim__lr": (lambda: dapo.train(optim__lr=1e-5), "optim__lr=1e-5 is lr=1e-5 here"),
    "epochs": (
        lambda: dapo.train(data=ROWS, prompts_per_step=2, num_epochs=2),
        "num_epochs=2 is epochs=2 here",
    ),
    "env": (lambda: dapo.train(env=Game), "env=Game is environment=Game here"),
    "environment_factory": (
        lambda: dapo.train(environment_factory=Game),
        "environment_factory=Game is environment=Game here",
    ),
    "loss_fn": (lambda: dapo.train(loss_fn=digits), "loss_fn=digits is loss=digits here"),
    "patience": (lambda: dapo.train(early_stopping_patience=3), "`dapo.STOP`, returned by"),
    "verl's rows": (
        lambda: dapo.train(**{"data.train_files": ROWS}),
        "data.train_files=ROWS is data=ROWS here",
    ),
    "compute_score": (
        lambda: dapo.train(compute_score=digits),
        "compute_score=digits is reward=digits here",
    ),
    "beta": (lambda: dapo.train(beta=0.1), "TRL's beta=0.1 is kl_coef=0.1 here"),
    "lr_scheduler_type": (
        lambda: dapo.train(lr_scheduler_type="cosine"),
        '**{"optim.schedule": "cosine:0"}',
    ),
    "args": (lambda: dapo.train(args=SimpleNamespace(beta=0.1)), "kl_coef=0.1"),
    "resume's data": (lambda: dapo.resume("x", data=ROWS), "a run keeps its data"),
    "session's directory": (lambda: dapo.session("x", run_dir="x"), "session.export('DIR')"),
    "a trainer": (lambda: dapo.GRPOConfig, "keywords of the call that trains"),
    "a method of runs": (lambda: dapo.evaluate, "run.evaluate()"),
    "a misspelt function": (lambda: dapo.trian, "did you mean train?"),
    "data that is missing": (lambda: dapo.train("tiny-random"), "data is missing: give rows"),
    "a value twice": (
        lambda: dapo.train("tiny-random", data=ROWS, optim={"lr": 1e-4}, lr=1e-3),
        "optim.lr is set twice in one call",
    ),
    "a model twice": (
        lambda: dapo.session("tiny-random", **{"model": {"dtype": "float32"}}),
        "multiple values",
    ),
    "generate's n": (lambda: dapo.Run("x").generate("1", n=2), "n=2 is samples=2 here"),
    "generate's length": (
        lambda: dapo.Run("x").generate("1", max_response_tokens=2),
        "max_response_tokens=2 is max_new_tokens=2 here",
    ),
    "generate's two": (
        lambda: dapo.Run("x").generate("1", n=2, max_tokens=4),
        'dapo.Run("x").generate("1", samples=2, max_new_tokens=4)',
    ),
    "generate's misspelt": (lambda: dapo.Run("x").generate("1", smaples=2), "mean samples?"),
    "evaluate's n": (
        lambda: dapo.Run("x").evaluate(ROWS, n=4),
        "n=4 is samples_per_problem=4 here",
    ),
    "evaluate's two": (
        lambda: dapo.Run("x").evaluate(eval_dataset=ROWS, num_samples=4),
        'dapo.Run("x").evaluate(ROWS, samples_per_problem=4)',
    ),
    "evaluate's misspelt": (
        lambda: dapo.Run("x").evaluate(ROWS, temprature=0),
        "unknown option temprature; did you mean temperature?",
    ),
    "resume's steps by position": (lambda: dapo.resume("x", 20), 'dapo.resume("x", steps=20)'),
    "a run's step": (lambda: dapo.Run("x").step, "run.state.step is its newest step"),
    "a run's misspelt": (lambda: dapo.Run("x").rolouts, "did you mean rollouts?"),
    "rows as model": (lambda: dapo.train(ROWS), "; rows are data=ROWS"),
    "questions as rows": (
        lambda: dapo.train("tiny-random", data=["What is 1 + 1?"]),
        "data: got a list of texts, which are files; rows are dicts",
    ),
    "a model in place of a run": (
        lambda: dapo.compare("x", "tiny-random"),
        "there is no run 'x'; with a model it is run.compare('x')",
    ),
    "a result of another module": (lambda: dapo.StepResult, "`dapo.environments.StepResult`"),
    "export's": (lambda: dapo.Run("x").export(output_dir="y"), 'output_dir="y" is path="y" here'),
}


@for_each_row("name", SINGLE)
def test_one_name_of_another_library_is_answered_in_a_sentence_of_python(name: str):
    call, expected = SINGLE[name]
    message = refusal(call)
    assert expected in message
    assert "dapo show docs coming_from" not in message


@for_each_row(
    "name",
    sorted({row.name for row in COUNTERPARTS["trl"]} - {"model", "reward_weights"}),
)
def test_each_name_of_trl_alone_is_answered_in_python(name: str):
    function = Function("train", ("model", "data", "reward", "run_dir", "on_step"), True)
    if function.takes(name):
        return
    message = foreign_answer(function, {name: 1}, CallSite())
    assert message is not None
    assert "dapo show docs coming_from" not in message
    assert not re.search(r"--\w|\byaml\b", message), message


class LlamaForCausalLM:
    def save_pretrained(self, path: str) -> None:
        raise AssertionError

    def __repr__(self) -> str:
        return "a whole network"


class Tokenizer(LlamaForCausalLM):
    def encode(self, text: str) -> list[int]:
        raise AssertionError


MODEL = LlamaForCausalLM()
OBJECTS: dict[str, tuple[Any, str]] = {
    "train": (lambda: dapo.train(MODEL, data=ROWS), "model: expected a name, a directory or a run"),
    "session": (lambda: dapo.session(MODEL), "`model.save_pretrained('DIR')`"),
    "compare": (lambda: dapo.Run("x").compare(MODEL), "other: expected a name"),
    "teacher": (lambda: dapo.train("tiny-random", data=ROWS, teacher=MODEL), "teacher: expected"),
    "a reference": (
        lambda: dapo.train("tiny-random", data=ROWS, **{"loss.reference.model": MODEL}),
        "pass 'DIR'",
    ),
    "a reference in its section": (
        lambda: dapo.train("tiny-random", data=ROWS, loss={"reference": {"model": MODEL}}),
        "pass 'DIR'",
    ),
    "a configuration": (
        lambda: dapo.train(config={"model": MODEL}, data=ROWS),
        "got a LlamaForCausalLM object",
    ),
    "a tokenizer": (
        lambda: dapo.train(Tokenizer(), data=ROWS),  # type: ignore[arg-type]
        "the model's own tokenizer is used",
    ),
    "another object": (lambda: dapo.train("tiny-random", lora=OBJECT), "got an object object"),
    "a sink": (
        lambda: dapo.train("tiny-random", data=ROWS, sinks=MODEL),
        "sinks: expected names of trackers",
    ),
    "an unknown sink": (
        lambda: dapo.train("tiny-random", data=ROWS, sinks="tensorbord"),
        "got 'tensorbord'",
    ),
    "a set's name": (
        lambda: dapo.train("tiny-random", data=ROWS, eval_data={"a b": ROWS}),
        "eval_data: the name of a data set has letters",
    ),
}


@for_each_row("name", OBJECTS)
def test_an_object_where_a_name_is_expected_is_called_by_its_type(name: str):
    call, expected = OBJECTS[name]
    message = refusal(call)
    assert expected in message
    assert not re.search("a whole network|object at 0x", message), message
    assert message.count("\n") == 0


class Peft:
    """As peft's LoraConfig."""

    r = 4
    lora_alpha = 8
    target_modules = frozenset({"q_proj"})
    lora_dropout = 0.0
    bias = "none"
    task_type = "CAUSAL_LM"


@for_each_row(
    ("given", "rank", "alpha", "said"),
    [
        (True, 16, 32.0, ""),
        (8, 8, 32.0, ""),
        ({"rank": 8, "alpha": 4}, 8, 4.0, ""),
        ({"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}, 4, 8.0, "lora_dropout=0.1 is not used"),
        (Peft(), 4, 8.0, "target_modules=['q_proj'] is not used"),
    ],
)
def test_adapters_are_a_switch_a_rank_a_mapping_or_pefts_configuration(
    given: Any, rank: int, alpha: float, said: str, capsys: pytest.CaptureFixture[str]
):
    from dapo.api.keywords import build_scaled, options_from

    base = {"model": "tiny-random", "data": "builtin:sums"}
    config, _ = build_scaled(base, options_from({"lora": given}), where="here")
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (rank, alpha)
    assert said in capsys.readouterr().out


@for_each_row(
    ("text", "expected"),
    [
        ("log.sinks=tensorboard", ["tensorboard"]),
        ("log.sinks=[tensorboard, wandb]", ["tensorboard", "wandb"]),
        ("log.sinks=tensorboard,wandb", ["tensorboard", "wandb"]),
        ("log.sinks=null", []),
        ("profile.steps=3", [3]),
        ("environment.tools=my_tools:search", ("my_tools:search",)),
        (
            "environment.tools=[my_tools:search, my_tools:read]",
            ("my_tools:search", "my_tools:read"),
        ),
    ],
)
def test_one_text_stands_for_a_list_of_it(text: str, expected: Any):
    from dapo.config import build_config

    config = build_config({"model": "tiny-random", "data": "builtin:sums"}, [text])
    assert config.value_of(text.partition("=")[0]) == expected


def test_held_out_sets_in_memory_are_evaluated_by_name(tmp_path: Path):
    from dapo.api.in_memory_data import stored_data

    sets = {"easy": ROWS[:2], "hard": ROWS[2:4], "file": "held.jsonl"}
    file = tmp_path / "held_out.jsonl"
    for given in (sets, {"mix": sets}):
        stored = stored_data(given, file, argument="eval_data")
        parts = stored.source["mix"]
        assert parts["file"] == "held.jsonl"
        assert stored.rows == {Path(parts["easy"]): ROWS[:2], Path(parts["hard"]): ROWS[2:4]}
        assert stored.labels["eval_data['easy']"] == Path(parts["easy"])
    for source in ("a.jsonl", {"path": "a.jsonl"}, {"mix": {"a": "b.jsonl"}}, ["a", "b"]):
        assert stored_data(source, file, argument="data").source == source
    run = dapo.train(
        "tiny-random",
        data=ROWS[4:],
        eval_data={"easy": ROWS[:2], "hard": ROWS[2:4]},
        reward=digits,
        run_dir="run",
        **SMALL,
    )
    assert run.state.evaluations.keys() >= {"easy", "hard"}
    # a row is named as the argument has it
    message = refusal(
        lambda: dapo.train("tiny-random", data=ROWS, eval_data={"a": [{"x": "1"}]}, **SMALL)
    )
    assert "eval_data['a'], row 1" in message

    # another metric in an evaluation, with the temperature of evaluations
    result = run.evaluate(ROWS, reward=varied, temperature=0.0, samples_per_problem=2)
    assert not result.summary["binary"]
    responses = result.table["responses"]
    assert all(len({each["text"] for each in several}) == 1 for several in responses)
    assert dapo.resume(run, steps=2, sinks="tensorboard").config.log.sinks == ["tensorboard"]
