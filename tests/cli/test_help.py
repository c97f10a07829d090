"""Help: every command, argument and option is explained, every example works, every line fits the
terminal.
"""

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import typer

from dapo.cli.arguments import ASK, COMPARE, DATA, INSPECT, REFERENCE, TRAIN
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
LEAVES = [path for path, command in COMMANDS.items() if not hasattr(command, "commands")]


def test_each_command_argument_and_option_is_explained_by_a_sentence():
    for path, command in COMMANDS.items():
        assert re.match(r"[A-Z][^\n]*\.(\n|$)", command.help), path
        for parameter in command.params:
            assert parameter.hidden or re.fullmatch(r"[A-Z].*\.", parameter.help), (
                path,
                parameter.name,
            )


def test_the_example_of_each_command_is_one_that_it_accepts():
    for path in LEAVES:
        program, *words = COMMANDS[path].epilog.removeprefix("Example: ").split()
        assert (program, tuple(words[: len(path)])) == ("dapo", path)
        arguments = list(takewhile(lambda word: word != ">", words[len(path) :]))
        # raises for a wrong option
        overrides = COMMANDS[path].make_context("dapo", arguments).params.get("overrides")
        build_config({"model": "tiny-random", "data": {"train": "builtin:sums"}}, overrides or [])


def test_each_help_names_all_parameters_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in COMMANDS.items():
        code, text, _ = run(capsys, *path, "--help")
        assert code == 0, path
        shown = re.sub(r"\x1b\[[\d;]*m", "", text)
        assert max(map(len, shown.splitlines())) <= 80, path
        for parameter in command.params:
            is_argument = parameter.opts == [parameter.name]
            name = parameter.metavar if is_argument else parameter.opts[0]
            assert parameter.hidden or name in shown, (path, name)


def test_the_help_of_status_names_both_exit_codes():
    expected = "The exit code is 1 if a run failed, and 2 if one cannot be read."
    assert expected in COMMANDS[("status",)].help


def test_commands_are_grouped_by_subject():
    panels: dict[str, list[str]] = {}
    for name, command in COMMANDS[()].commands.items():
        panels.setdefault(command.rich_help_panel, []).append(name)
    assert list(panels) == [TRAIN, INSPECT, COMPARE, ASK, DATA, REFERENCE]
    assert {"train", "resume", "check", "convert"} <= set(panels[TRAIN])
    assert {"chat", "generate", "serve"} == set(panels[ASK])
    assert {"view", "doctor", "explain"} <= set(panels[INSPECT])
    assert {"eval", "compare", "ablate"} == set(panels[COMPARE])
    assert {"data", "test"} == set(panels[DATA])
    assert {"show"} == set(panels[REFERENCE])
    assert len(COMMANDS[()].commands) == 21


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        ("completion bash", "completion; dapo --install-completion completes"),
        ("report runs/a --output a.html", "report; dapo view RUN_DIR --save FILE.html writes one"),
        ("options loss", "options; their list is dapo show options"),
        ("docs losses", "docs; their list is dapo show docs"),
        ("reward test math", "reward; dapo test REWARD judges responses with one"),
        ("environment test calculator", "environment; dapo test ENVIRONMENT plays one"),
        ("ask tiny-random", "ask; dapo generate MODEL_OR_RUN PROMPT prints answers; dapo chat"),
    ],
)
def test_a_command_that_one_might_try_is_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str], words: str, replacement: str
):
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"Error: there is no command {replacement}")


def test_without_arguments_the_help_is_shown_and_nothing_is_reported(
    capsys: pytest.CaptureFixture[str],
):
    code, out, err = run(capsys)
    assert (code, err) == (2, "")
    assert "dapo [OPTIONS] COMMAND" in out
