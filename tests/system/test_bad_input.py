"""Wrong inputs: the common ones with the exact message of `messages.txt`, which says what was
expected, what came and what to do; hostile ones are refused without a traceback.
"""

import contextlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

import pytest

from dapo.cli.main import main
from dapo.config import build_config, load_config
from dapo.config.option_fields import options_of
from dapo.core.errors import ConfigError, DapoError, DataError, RewardError
from dapo.core.secrets import find_secrets, mask_options
from dapo.data.problems import load_problems
from dapo.rewards import build_verifier
from helpers import paths
from helpers.fresh_commands import FreshCommands
from helpers.message_table import Case, printable, read_cases, write_cases
from helpers.run_files import new_run

TABLE = Path(__file__).with_name("messages.txt")
CASES = read_cases(TABLE)
IS_REWRITTEN = os.environ.get("DAPO_MESSAGES") == "rewrite"
"""Set by `make messages`."""
TINY = str(paths.TINY)
BASE = {
    "model": "tiny-random",
    "data": {"train": "builtin:sums"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 8},
    "overlong": {"buffer_tokens": 4},
    "train": {"minibatch_groups": 2},
}
LONG = {
    "long": "n" * 300,
    "long245": "n" * 245,
    "nested": "[" * 500 + "]" * 500,
    "dotted": ".".join(["a"] * 500),
}
"""Texts that a command of the table names as `{long}`."""


# --- how each section of the table takes its inputs, in an empty current folder {dir}


def message_of(act: Callable[[], object], kind: type[DapoError]) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.exit_code == 2
    return str(caught.value)


def of_option(override: str, folder: Path) -> str:
    """An override of the command line, over BASE."""
    return message_of(
        lambda: build_config(BASE, ["" if override == '""' else override]), ConfigError
    )


def of_options(expression: str, folder: Path) -> str:
    """The options of a file, and a list of overrides."""
    return message_of(lambda: build_config(*eval(expression)), ConfigError)


def of_config_path(path: str, folder: Path) -> str:
    return message_of(lambda: load_config(path), ConfigError)


def of_config_file(expression: str, folder: Path) -> str:
    """The content of c.yaml."""
    written(folder / "c.yaml", eval(expression))
    return message_of(lambda: load_config(folder / "c.yaml"), ConfigError)


def of_data_source(expression: str, folder: Path) -> str:
    if "gym" in expression:
        pytest.importorskip("reasoning_gym")
    return message_of(lambda: load_problems(eval(expression)), DataError)


def of_data_rows(expression: str, folder: Path) -> str:
    """The content of d.jsonl."""
    return of_data_file(f'"d.jsonl", {expression}', folder)


def of_data_file(expression: str, folder: Path) -> str:
    """Name and content."""
    name, content = eval(expression)
    written(folder / name, content)
    return message_of(lambda: load_problems(str(folder / name)), DataError)


def of_verifier(expression: str, folder: Path) -> str:
    """Verifier and options."""
    verifier, options = eval(expression)
    return message_of(lambda: build_verifier(verifier, options=options), RewardError)


def of_command(command: str, folder: Path) -> str:
    """The last line that `dapo COMMAND` prints; `{long}` is a text of LONG, and an escape such as
    \\0 its character.
    """
    made(folder)
    before = set(folder.rglob("*")) | {folder / "runs"}
    for name, text in LONG.items():
        command = command.replace(f"{{{name}}}", text)
    out = io.StringIO()
    err = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stopped,
    ):
        main(command.encode("latin-1", "backslashreplace").decode("unicode_escape").split(" "))
    assert stopped.value.code == 2
    assert "Traceback" not in out.getvalue() + err.getvalue()
    assert set(folder.rglob("*")) <= before
    return [line for line in err.getvalue().splitlines() if line.strip()][-1]


def written(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def made(folder: Path) -> dict[str, Path]:
    """Things in the way."""
    paths = {name: folder / name for name in ("file", "full", "nomodel", "halfrun", "emptyrun")}
    paths["file"].write_text("x")
    for name in ("full", "nomodel"):
        paths[name].mkdir()
    (paths["full"] / "a").write_text("x")
    paths["pipe"] = folder / "pipe.jsonl"
    os.mkfifo(paths["pipe"])
    (paths["nomodel"] / "config.json").write_text('{"model_type": "llama"}')
    new_run(paths["halfrun"]).config.unlink()
    new_run(paths["emptyrun"])
    return paths


@pytest.fixture(scope="module")
def found() -> Iterator[dict[Case, str]]:
    """The messages of this session, which `make messages` writes into the table."""
    messages: dict[Case, str] = {}
    yield messages
    if IS_REWRITTEN:
        write_cases(TABLE, messages)


ANSWERS: dict[str, Callable[[str, Path], str]] = {
    "option": of_option,
    "options": of_options,
    "config file": of_config_file,
    "config path": of_config_path,
    "data source": of_data_source,
    "data rows": of_data_rows,
    "data file": of_data_file,
    "verifier": of_verifier,
    "command": of_command,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.section}: {case.input[:40]}")
def test_a_wrong_input_is_answered_with_the_message_of_the_table(
    case: Case, found: dict[Case, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    made_of = {"{dir}": str(tmp_path), "{tiny}": TINY}
    given = reduce(lambda text, name: text.replace(name, made_of[name]), made_of, case.input)
    message = printable(ANSWERS[case.section](given, tmp_path))
    found[case] = reduce(lambda text, name: text.replace(made_of[name], name), made_of, message)
    for name, text in LONG.items():
        found[case] = found[case].replace(text, f"{{{name}}}")
    assert IS_REWRITTEN or found[case] == case.message


def test_the_table_has_one_entry_for_each_input_that_users_get_wrong():
    assert len(set(CASES)) == len(CASES) <= 40
    assert {case.section for case in CASES} == set(ANSWERS)
    assert {case.input for case in CASES} >= set(NEED_THE_MODEL)


HOSTILE = (
    ("option", "optim.lr=${no.such}"),
    ("config file", "'a: ' + '[' * 100 + ']' * 100"),
    ("config file", "'train: {num_steps: ' + '9' * 5000 + '}'"),
    ("config file", "'model: a\\x00b\\n'"),
    ("config file", "bytes(range(128, 256))"),
    ("config file", "\"model: !!python/object/apply:os.system ['echo x']\\n\""),
    ("config file", "'model: &a [*a]\\n'"),
    ("data source", "{'builtin': 'sums', 'size': 10**12}"),
    ("data source", "'a' * 5000 + '.jsonl'"),
    ("data rows", "'[' * 100_000"),
    ("data rows", "'{\"prompt\": \"a\", \"answer\": ' + '9' * 5000 + '}'"),
    ("data rows", 'b\'{"prompt": "caf\\xe9", "answer": "2"}\''),
    ("data rows", '\'{"prompt": "a\\\\ud800", "answer": "2"}\''),
    ("data rows", '\'{"prompt": "1", "answer": "2", "answer": "3"}\''),
    ("data file", "'d.parquet', b'hello'"),
    ("verifier", "'\\ud800:c', {}"),
    ("command", "train {tiny} rollout.native.slots=1000000000000"),
    ("command", "train {tiny} reward.options={nested}"),
    ("command", "train {tiny} {dotted}=1"),
    ("command", "train {long}"),
    ("command", "eval tiny-random --data builtin:sums --output {long245}"),
    ("command", "data stats {dir}/pipe.jsonl"),
    ("command", "train \\udcff"),
    ("command", "train a\\x00b.yaml"),
)
"""Inputs that are made to break a program: depth, length, numbers, bytes and files of other kinds."""


@pytest.mark.parametrize(
    ("section", "text"), HOSTILE, ids=[f"{section}: {text[:40]!a}" for section, text in HOSTILE]
)
def test_a_hostile_input_is_refused_with_a_message(
    section: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    text = text.replace("{dir}", str(tmp_path)).replace("{tiny}", TINY)
    message = printable(ANSWERS[section](text, tmp_path))
    assert 10 < len(message) < 2000
    assert "Error(" not in message


# --- within a second


def command_of(case: Case, folder: Path) -> list[str]:
    """The command line that meets a wrong input of the table, in its own folder."""
    paths = {"{dir}": str(folder), "{tiny}": TINY}
    text = reduce(lambda text, name: text.replace(name, paths[name]), paths, case.input)
    base = folder / "base.yaml"
    base.write_text(json.dumps(BASE))
    if case.section == "command":
        return text.split(" ")
    if case.section == "option":
        return ["train", str(base), text]
    if case.section == "config path":
        return ["train", text]
    if case.section == "options":
        options, overrides = eval(text)
        base.write_text(json.dumps(options))
        return ["train", str(base), *overrides]
    if case.section == "config file":
        written(folder / "c.yaml", eval(text))
        return ["train", "c.yaml"]
    if case.section == "data source":
        return ["train", str(base), f"data.train={json.dumps(eval(text))}"]
    if case.section == "verifier":
        name, options = eval(text)
        return ["train", str(base), f"reward.verifier={name}", f"reward.options={options}"]
    name, content = eval(text) if case.section == "data file" else ("d.jsonl", eval(text))
    written(folder / name, content)
    return ["train", str(base), f"data.train={name}", "reward.verifier=math"]


NEED_THE_MODEL = {
    "train {tiny} data.max_prompt_tokens=1": "the model's tokenizer counts a prompt's tokens",
    "train {tiny} rollout.max_response_tokens=5000": "the model's config.json has its positions",
}
"""The inputs that are wrong only for the model, with what must be loaded to know it."""
REFUSED_AT_ONCE = [
    "train {tiny} data.eval=no.jsonl",
    "train {tiny} data.train=[no.jsonl,neither.jsonl]",
    "train {tiny} data.train=bare.jsonl reward.verifier=math",
    "train {tiny} data.train=rows.jsonl reward.verifier=own_rewards:unit",
    "train {tiny} data.train=rows.jsonl reward.verifier=own_rewards:brevit",
    "train {tiny} reward.verifier=no_such:f",
    "train {tiny} environment=no_such:Game",
    "train {tiny} dynamic_sampling.filter=no_such:f",
    "train {tiny} loss.function=no_such:f",
    "train {tiny} audit.verifier=no_such:f",
    "train {tiny} model=./no",
    "train {tiny} model=no/such",
    "train {tiny} model={dir}/full",
    "train {tiny} model={dir}/nomodel",
    "train {tiny} preset=distill loss.reference.model=./no",
    "train {tiny} log.sinks=[mlflow]",
    "check {tiny} data.train=no.jsonl",
    "check {tiny} model=./no",
    "submit {tiny} data.train=no.jsonl --dry-run",
    "resume no",
    "resume halfrun",
    "clean no",
    "clean emptyrun no",
    "status no",
    "fork no",
    "fork emptyrun",
    "export no out",
    "export emptyrun out",
    "export emptyrun full",
    "eval no --data builtin:sums",
    "eval tiny-random --data no.jsonl",
    "eval --compare tiny-random no --data builtin:sums",
    "doctor no",
    "explain no",
    "compare no neither",
    "view no",
    "test maths",
    "test no_such:f",
    "ablate no",
    "show no.such",
    "convert no.py",
    "data stats no.jsonl",
    "data import no.csv out.jsonl",
    "data dedupe no.jsonl out.jsonl",
]
for package, option in {
    "wandb": "log.sinks=[wandb]",
    "trackio": "log.sinks=[trackio]",
    "vllm": "rollout.engine=vllm",
}.items():
    if find_spec(package) is None:
        REFUSED_AT_ONCE.append(f"train {{tiny}} {option}")
TRIES = 3
"""Of which the fastest counts: other processes slow a command by half."""


@pytest.fixture(scope="module")
def fresh() -> Iterator[FreshCommands]:
    commands = FreshCommands()
    yield commands
    commands.close()


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.input not in NEED_THE_MODEL),
        *(Case("command", text) for text in REFUSED_AT_ONCE),
    ],
    ids=lambda case: f"{case.section}: {case.input[:60]}",
)
def test_a_wrong_input_is_refused_sooner_than_the_command_line_is_imported_and_without_torch(
    case: Case, fresh: FreshCommands, tmp_path: Path
):
    """The import, about a second, is the measure of the processor."""
    folder = tmp_path / "folder"
    folder.mkdir()
    made(folder)
    (folder / "own_rewards.py").write_text(
        "def unit(completions, unit, **others):\n    return [1.0] * len(completions)\n"
    )
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    command = command_of(case, folder)
    shares = []
    for _ in range(TRIES):
        answer = fresh.run(command, folder)
        assert (answer.code, answer.heavy) == (2, []), answer.err
        assert "Traceback" not in answer.err
        shares.append(answer.command_s / answer.start_s)
        if shares[-1] < 1:
            return
    pytest.fail(f"{' '.join(command)} took {min(shares):.2f} times as long as its start")


# --- numbers and secrets


KINDS = {name: set(re.findall(r"\w+", repr(info.annotation))) for name, info in options_of()}
NUMBERS = [
    name
    for name, kinds in KINDS.items()
    if {"int", "float"} & kinds and not {"list", "dict", "tuple"} & kinds
]
MADE_OR_WAITED_FOR = (
    "slots",
    "threads",
    "workers",
    "engines",
    "ranks",
    "size",
    "groups",
    "tokens",
    "rank",
    "steps",
    "_s",
    "_gib",
    "_per_step",
    "_per_problem",
    "sequences",
    "parallel",
    "per_process",
    "every",
    "checkpoints",
)


def test_every_number_among_the_options_is_found():
    assert len(NUMBERS) == 63
    assert {
        "rollout.native.slots",
        "train.threads",
        "reward.timeout_s",
        "eval.max_response_tokens",
    } <= set(NUMBERS)


EXTREME = (10**12, 10**30, "1e308", -1, ".nan", ".inf")


def assert_refused_or_computed_with(name: str, value: object) -> None:
    taken: float | None = None
    with contextlib.suppress(ConfigError):
        config = build_config(BASE, ["model.lora={}", f"{name}={value}"])
        taken = reduce(getattr, name.split("."), config)
    if taken is not None:
        case = f"{name}={value} is {taken}"
        assert math.isfinite(taken), case
        assert taken >= 0 or name == "reward.threshold", case
        assert not isinstance(taken, int) or taken < 2**63, case
        assert not name.endswith(MADE_OR_WAITED_FOR), case  # all these values are refused


def test_no_number_takes_an_option_beyond_what_can_be_computed_with():
    """Each option with two of the values; `make nightly` has all of them."""
    values = itertools.cycle(EXTREME)
    for name in NUMBERS:
        assert_refused_or_computed_with(name, next(values))
        assert_refused_or_computed_with(name, next(values))


@pytest.mark.nightly
@pytest.mark.parametrize("value", EXTREME)
def test_no_extreme_number_takes_an_option_beyond_what_can_be_computed_with(value: object):
    for name in NUMBERS:
        assert_refused_or_computed_with(name, value)


def test_what_is_named_like_a_secret_is_refused_and_its_value_is_not_repeated():
    secrets = {
        "api_key",
        "key",
        "openaiApiKey",
        "token",
        "hf_token",
        "access-token",
        "password",
        "client_secret",
    }
    harmless = {
        "stop_token",
        "eos_token",
        "max_tokens",
        "answer_key",
        "tokenizer",
        "api_key_env",
        "secretary",
    }
    options = dict.fromkeys(secrets | harmless, "v4lue")
    assert {name for name, _ in find_secrets(options)} == secrets
    assert {name for name, value in mask_options(options).items() if value != "v4lue"} == secrets
    assert [name for name, _ in find_secrets({"math": {"auth": {"password": "x"}}})] == [
        "math.auth.password"
    ]
    assert list(find_secrets({"api_key": "", "token": 3, "password": None})) == []
    with pytest.raises(ConfigError) as caught:
        build_config(BASE, ["reward.options.api_key=v4lue"])
    assert "v4lue" not in str(caught.value)
