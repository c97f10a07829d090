"""Completion: the words that fit, as bash, zsh and fish ask for them, without torch."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from dapo.cli.completion import SHELLS, candidates
from dapo.cli.main import app
from dapo.config.option_fields import options_of, section_in
from helpers.commands import run
from helpers.paths import ROOT


def words(line: str) -> list[str]:
    return [word for word, _ in candidates(typer.main.get_command(app), line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dapo tr", ["train"]),
        ("dapo data de", ["dedupe", "decontaminate", "demonstrations"]),
        ("dapo train --run", ["--run-dir"]),
        ("dapo train x.yaml loss.clip", ["loss.clip_low=", "loss.clip_high="]),
        ("dapo train x.yaml --json optim.sch", ["optim.schedule="]),
        ("dapo train x.yaml optim.lr=1e-6 optim.sch", ["optim.schedule="]),
        ("dapo resume runs/a optim.schedule=c", ["optim.schedule=constant", "optim.schedule=cosine"]),
        ("dapo train x.yaml dynamic_sampling.enabled=t", ["dynamic_sampling.enabled=true"]),
        ("dapo train 'my file.yaml' loss.clip_l", ["loss.clip_low="]),
        ("dapo train 'my file", []),  # an open quote: files, of which the shell knows
        ("dapo train x.yaml --run-dir loss.clip", []),  # the value of an option
        ("dapo reward test math_", ["math_dapo"]),
        ("dapo reward test math reward.th", ["reward.threshold="]),
        ("dapo completion ", list(SHELLS)),
        ("dapo nothing at all", []),
        ("dapo data import ", []),
        ("dapo", []),
    ],
)  # fmt: skip
def test_the_last_word_is_completed_by_what_may_stand_there(line: str, expected: list[str]):
    assert words(line) == expected


def test_sections_come_first_and_a_sole_section_is_opened():
    sections = words("dapo train x.yaml ")
    assert {"loss.", "optim.", "preset="} <= set(sections)
    assert not any(word.startswith("loss.c") for word in sections)
    optim = {f"{name}=" for name, _ in options_of() if name.startswith("optim.")}
    assert set(words("dapo train x.yaml opt")) == optim


def test_every_option_is_reached_by_completing():
    for name, field in options_of():
        if section_in(field.annotation) is None:
            assert f"{name}=" in words(f"dapo resume runs/a {name}")


def test_a_path_is_left_to_the_shell():
    assert words("dapo train qui") == ["quickstart"]
    assert (
        words("dapo train ./")
        == words("dapo resume runs")
        == words("dapo eval --compare runs/")
        == []
    )


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "completion", "csh")[::2] == (
        2,
        "error: no completion for 'csh'; expected one of bash, fish, zsh\n",
    )


def test_completing_imports_no_torch_and_prints_nothing_but_words():
    code = (
        "import sys\nfrom dapo.cli.main import main\n"
        "try:\n    main(['completion', 'bash', '--line', 'dapo train x.yaml opt'])\n"
        "finally:\n    assert not {'torch', 'transformers', 'pyarrow'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stderr == ""
    assert all(line.startswith("optim.") and "\t" in line for line in done.stdout.splitlines())


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with `dapo` on the path and the scripts of the shells."""
    program = tmp_path / "dapo"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT / "src"} exec {sys.executable} -m dapo.cli.main "$@"\n'
    )
    program.chmod(0o755)
    for name in SHELLS:
        script = subprocess.run(
            [program, "completion", name], text=True, capture_output=True, check=True
        ).stdout
        (tmp_path / f"complete.{name}").write_text(script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    return tmp_path


def typed_in(command: list[str], *steps: tuple[str, str], folder: Path) -> str:
    """What an interactive shell shows; each step is typed when the text before it has appeared."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvp(command[0], command)
    shown = ""
    try:
        for expected, text in (*steps, ("", "")):
            start = len(shown)
            deadline = time.monotonic() + 100
            while expected not in shown[start:]:
                assert time.monotonic() < deadline, shown
                if select.select([terminal], [], [], 1)[0]:
                    shown += os.read(terminal, 4096).decode(errors="replace")
            os.write(terminal, text.encode())
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
    return shown


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def test_bash_completes_a_command_an_option_of_the_configuration_and_its_value(shell: Path):
    needs("bash")
    typed_in(
        ["bash", "--norc", "--noprofile", "-i"],
        ("", "PS1='ready> '; source complete.bash\n"),
        ("ready> ", ""),
        ("ready> ", "dapo tra\t"),
        ("train ", "my.yaml optim.sche\t"),
        ("optim.schedule=", "lin\t"),
        ("ear ", "rollout.temp\t"),  # after a whole word, a space
        ("rollout.temperature=", "\x03exit\n"),
        folder=shell,
    )


def test_zsh_completes_an_option_of_the_configuration(shell: Path):
    needs("zsh")
    typed_in(
        ["zsh", "-f", "-i"],
        ("", "PS1='ready> '; autoload -Uz compinit; compinit -u; source complete.zsh\n"),
        ("ready> ", ""),
        ("ready> ", "dapo tra\t"),
        ("train ", "my.yaml optim.sche\t"),
        ("dule=", "lin\t"),
        ("ear ", "\x03exit\n"),
        folder=shell,
    )  # fmt: skip


def test_fish_completes_commands_and_options_with_their_meanings(shell: Path):
    needs("fish")
    code = (
        "source complete.fish; complete -C 'dapo tra'; complete -C 'dapo train my.yaml loss.clip'"
    )
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], cwd=shell, text=True, capture_output=True, check=True
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [
        "train",
        "loss.clip_high=",
        "loss.clip_low=",
    ]
    assert done.stdout.count("\t") == 3
