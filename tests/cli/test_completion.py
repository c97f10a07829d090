"""Completion by typer: our callbacks offer options of the configuration with their values,
configurations and pages.
"""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.cli.arguments import complete_option
from dapo.config.option_fields import options_of, section_in
from helpers.paths import ROOT
from helpers.tables import for_each_row


def completed(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The words that bash proposes at the end of a line."""
    from dapo.cli.main import main

    words = line.split(" ")
    monkeypatch.setenv("_DAPO_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


@for_each_row(
    ("line", "expected"),
    [
        ("dapo tr", ["train"]),
        ("dapo data de", ["dedupe", "decontaminate", "demonstrations"]),
        ("dapo train --run", ["--run-dir"]),
        ("dapo train qui", ["quickstart"]),
        ("dapo show configs qui", ["quickstart"]),
        ("dapo show qui", ["quickstart"]),
        ("dapo show loss.clip_h", ["loss.clip_high"]),
        ("dapo show docs comi", ["coming_from"]),
        ("dapo train x.yaml loss.clip", ["loss.clip_low=", "loss.clip_high="]),
        (
            "dapo train x.yaml optim.lr=1e-6 optim.w",
            ["optim.warmup_steps=", "optim.warmup_ratio=", "optim.weight_decay="],
        ),
        ("dapo resume runs/a optim.sch", ["optim.schedule=constant", "optim.schedule=linear", "optim.schedule=cosine"]),
        ("dapo train x.yaml dynamic_sampling.enabled=t", ["dynamic_sampling.enabled=true"]),
        ("dapo test math_", ["math_dapo"]),
        ("dapo test calc", ["calculator"]),
        ("dapo test math reward.th", ["reward.threshold="]),
        ("dapo data select a b reward.th", ["reward.threshold="]),
        ("dapo eval runs/", []),  # files, of which the shell knows
    ],
)  # fmt: skip
def test_the_last_word_is_completed_by_what_may_stand_there(
    line: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert completed(line, monkeypatch, capsys) == expected


def test_every_option_is_proposed_with_its_meaning():
    meanings = {word.partition("=")[0]: meaning for word, meaning in complete_option("")}
    assert meanings == {
        name: field.description or ""
        for name, field in options_of()
        if not section_in(field.annotation)
    }


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`dapo` on the path."""
    program = tmp_path / "dapo"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT / "src"} exec {sys.executable} -m dapo "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    return program


def test_completing_imports_no_torch_and_prints_nothing_but_words():
    code = (
        "import sys\nfrom dapo.cli.main import main\n"
        "try:\n    main([])\n"
        "finally:\n    assert not {'torch', 'transformers', 'pyarrow'} & sys.modules.keys()\n"
    )
    line = {
        "_DAPO_COMPLETE": "complete_bash",
        "COMP_WORDS": "dapo train x.yaml loss.",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | line,
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stderr == ""
    assert all(word.startswith("loss.") for word in done.stdout.splitlines())
    assert "loss.clip_high=" in done.stdout


def typed_in(command: list[str], *steps: tuple[str, str], folder: Path) -> None:
    """Type each text into an interactive shell when the text before it has appeared."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvp(command[0], command)
    shown = ""
    try:
        for expected, text in steps:
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


def test_bash_completes_a_command_and_an_option_of_the_configuration(program: Path):
    typed_in(
        ["bash", "--norc", "--noprofile", "-i"],
        ("", "PS1='ready> '; eval \"$(dapo --show-completion)\"\n"),
        ("ready> ", ""),
        ("ready> ", "dapo tra\t"),
        ("train ", "my.yaml optim.warmup_s\t"),
        ("teps=", "\x03exit\n"),
        folder=program.parent,
    )
