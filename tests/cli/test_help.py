"""Help: one whole line per command, by subject; no Python types; examples that work; 80 columns."""

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import typer

from dapo.cli.help import TEXTS
from dapo.cli.main import app
from dapo.config import build_config
from helpers.commands import run


def commands_below(
    command: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands_below(inner, (*path, name))


COMMANDS = dict(commands_below(typer.main.get_command(app)))
PATHS = pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("dapo", *path)))


@pytest.fixture(autouse=True)
def _terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")


@PATHS
def test_help_fits_80_columns_and_names_no_python_type(
    capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
):
    code, text, _ = run(capsys, *path, "--help")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    head = text.split("\n\n")[0]  # the usage
    assert not re.search(
        r"[<>{}]|\bstr\b|\bint\b|\bfloat\b|\bpath\b|\brange\b|\]\.\.\.\.\.\.", head
    )
    assert not re.search(r"<\w+( \w+)?>|list\[|x>=|<=x", text)
    assert "docs/" not in text  # a wheel has no such folder


@pytest.mark.parametrize(
    "path", [path for path, each in COMMANDS.items() if hasattr(each, "commands")]
)
def test_each_command_has_one_whole_sentence_in_the_list(
    capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
):
    command = COMMANDS[path]
    lines = run(capsys, *path, "--help")[1].splitlines()
    for name, inner in command.commands.items():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert line.split(maxsplit=1)[1] == inner.help.split("\n\n")[0].replace("\n", " ")
        assert re.fullmatch(r"[A-Z].*[^.]\.", line.split(maxsplit=1)[1])


@PATHS
def test_each_argument_and_option_is_explained_by_a_sentence(path: tuple[str, ...]):
    for parameter in COMMANDS[path].params:
        if not parameter.hidden:
            assert re.match(r"[A-Z0-9`-]|bash", parameter.help), parameter.name
            assert re.search(r"\.( \[default: [^]]+\])?$", parameter.help), parameter.help


@PATHS
def test_each_command_ends_with_two_examples_that_it_accepts(
    capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
):
    text = run(capsys, *path, "--help")[1]
    examples = re.search(r"\nExamples:\n((?:  dapo .*\n)+)", text)
    assert examples is not None
    lines = [line.split("#")[0].split() for line in examples[1].splitlines()]
    assert len(lines) == 2
    for program, *words in lines:
        assert (program, tuple(words[: len(path)])) == ("dapo", path)
        words = list(takewhile(lambda word: not word.startswith(">"), words))
        command = COMMANDS[()]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        # raises for a wrong option
        overrides = command.make_context("dapo", words).params.get("overrides") or []
        build_config({"model": "tiny-random", "data": {"train": "builtin:sums"}}, overrides)


def test_the_texts_belong_to_commands_that_exist():
    titles = [block.splitlines()[0] for block in TEXTS.read_text(encoding="utf-8").split("\n\n")]
    assert sorted(titles) == sorted(" ".join(("dapo", *path)) for path in COMMANDS)


def test_commands_are_listed_by_subject(capsys: pytest.CaptureFixture[str]):
    text = run(capsys, "--help")[1]
    groups = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", text, flags=re.MULTILINE))
    assert list(groups)[:5] == [
        "Train",
        "Look into runs",
        "Compare",
        "Data and rewards",
        "Options and configurations",
    ]
    named = {
        group: [line.split()[0] for line in lines.splitlines()] for group, lines in groups.items()
    }
    assert {"train", "resume", "check"} <= set(named["Train"])
    assert {"view", "doctor", "explain"} <= set(named["Look into runs"])
    assert {"eval", "compare", "ablate"} <= set(named["Compare"])
    assert {"data", "reward"} <= set(named["Data and rewards"])


@pytest.mark.parametrize("command", ["resume", "fork", "eval", "reward test"])
def test_where_there_is_no_file_options_are_not_those_of_a_file(
    capsys: pytest.CaptureFixture[str], command: str
):
    assert "of the file" not in run(capsys, *command.split(), "--help")[1]
