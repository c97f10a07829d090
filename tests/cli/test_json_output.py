"""`--json`: every command that reports prints one object, with the keys that docs/programs.md
lists.
"""

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from dapo.analysis.ablate.experiment import shipped_ladders
from dapo.cli.main import app, main
from dapo.core.errors import EXIT_CODES
from dapo.core.terminal import print_json, stdout_to_stderr
from helpers.paths import CONFIGS, ROOT

PAGE = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
TINY = str(CONFIGS / "tiny.yaml")
SUMS = "{builtin: {sums: {}}, size: 6}"
VERIFIER = ("reward.verifier=dapo.rewards.examples:has_digit", "eval.max_response_tokens=4")
WITHOUT = {
    "chat": "talks with a person",
    "convert": "prints a configuration file",
}
"""Commands without --json, and why."""


class Answer(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def found(self) -> dict[str, Any]:
        """The object on the standard output, which holds nothing else."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def answer(*arguments: object) -> Answer:
    """Run a command with --json in this process."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments), "--json"])
    return Answer(int(stopped.value.code or 0), out.getvalue(), err.getvalue())


def commands(command: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command of the command line by its words."""
    for name, inner in (command or typer.main.get_command(app)).commands.items():
        if hasattr(inner, "commands"):
            yield from commands(inner, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", inner


def documented(command: str) -> set[str]:
    """The keys in the first column of the tables below a command's heading."""
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if f"`dapo {command}`" in heading:
            cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
            return set(re.findall(r"`([^`]+)`", " ".join(cells)))
    return set()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A run of one step, and what its command printed."""
    path = tmp_path_factory.mktemp("runs") / "run"
    options = ("train.num_steps=1", "train.threads=1", "data.eval.builtin.sums.low=1")
    return path, answer("train", TINY, *options, "--run-dir", path)


def test_a_command_that_reports_has_json_and_is_documented():
    reporting = {name: command for name, command in commands() if name not in WITHOUT}
    assert len(reporting) > 15
    for name, command in reporting.items():
        words = {word for parameter in command.params for word in parameter.opts}
        assert "--json" in words, name
        assert f"`dapo {name}" in PAGE, name


def test_a_run_ends_with_the_object_of_its_status_and_its_progress_is_on_the_standard_error(
    trained: tuple[Path, Answer],
):
    path, of_train = trained
    assert of_train.code == 0
    assert "step 1/1" in of_train.err
    status = answer("status", path)
    assert status.found == {"runs": [of_train.found]}
    assert set(of_train.found) == documented("status")
    assert of_train.found["state"] == "finished"
    assert of_train.found["summary"] == json.loads((path / "summary.json").read_text())
    again = answer("resume", path)
    assert "already at step 1 of 1" in again.err
    assert again.found == of_train.found


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("check", [TINY]),
        ("eval", ["RUN", "--data", SUMS, "--samples-per-problem", "2", "--by-problem"]),
        ("test", ["exact", "--data", SUMS]),
        ("test", ["calculator", "--data", SUMS]),
        ("data stats", ["RUN"]),
        ("data import", [SUMS, "OUT.jsonl"]),
        ("data dedupe", [SUMS, "OUT.jsonl"]),
        (
            "data select",
            [SUMS, "OUT.jsonl", "--model", "RUN", "--samples", "2", "--low", "0", "--high", "1"],
        ),
        ("data decontaminate", [SUMS, "OUT.jsonl", "--against", "builtin:gcd"]),
        ("export", ["RUN", "OUT"]),
        ("submit", [TINY, "--dry-run"]),
    ],
)
def test_an_object_has_the_keys_of_the_page_and_nothing_else_is_printed(
    trained: tuple[Path, Answer], tmp_path: Path, command: str, arguments: list[str]
):
    names = {
        "RUN": str(trained[0]),
        "OUT": str(tmp_path / "out"),
        "OUT.jsonl": str(tmp_path / "out.jsonl"),
    }
    given = answer(*command.split(), *(names.get(word, word) for word in arguments))
    assert given.code == 0, given.err
    assert given.found
    assert set(given.found) <= documented(command)


def test_what_a_function_prints_at_its_import_is_not_in_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "loud_filter.py").write_text("print('hello')\ndef keep(group): return True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = answer("check", TINY, "dynamic_sampling.filter=loud_filter:keep")
    assert given.found["problems"] == []
    assert "hello" in given.err


def test_a_ladder_is_an_object_as_well():
    path = shipped_ladders()["table1"]
    shown = {"name": "table1", "path": str(path), "text": path.read_text(encoding="utf-8")}
    assert answer("ablate", "--show", "table1").found == shown


def test_two_evaluations_are_compared_in_one_object(trained: tuple[Path, Answer], tmp_path: Path):
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        given = answer("eval", "tiny-random", "--data", SUMS, "--output", file, *VERIFIER)
        assert {**given.found, "table": json.loads(file.read_text())["table"]} == json.loads(
            file.read_text()
        )
    both = answer("eval", "--compare", *files).found
    assert set(both) == {"first", "second", "comparison"}
    assert both["comparison"]["difference"] == 0
    assert "table" not in both["first"]


def test_an_error_is_an_object_as_well_and_the_message_for_people_stays(tmp_path: Path):
    for arguments, kind in (
        (("check", "nowhere.yaml"), "ConfigError"),
        (("status", tmp_path), "CheckpointError"),
        (("train", TINY, "reward.verifier=maths"), "RewardError"),
        (("data", "stats", tmp_path / "none.jsonl"), "DataError"),
        (("check", TINY, "--no-such-option"), "UsageError"),
    ):
        given = answer(*arguments)
        assert given.code == 2
        assert set(given.found) == {"error", "kind", "exit_code"}
        assert (given.found["kind"], given.found["exit_code"]) == (kind, 2)
        assert given.found["error"] in given.err


def test_a_folder_stands_for_its_runs_and_without_a_name_it_is_runs(
    trained: tuple[Path, Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "runs").symlink_to(trained[0].parent)
    monkeypatch.chdir(tmp_path)
    for arguments in ((), ("runs",)):
        assert [each["run"] for each in answer("status", *arguments).found["runs"]] == ["runs/run"]
    (tmp_path / "runs").unlink()
    assert "no run directory runs" in answer("status").found["error"]


def test_what_cannot_work_is_in_the_object_and_in_the_exit_code():
    given = answer(
        "check",
        TINY,
        "train.device=cpu",
        "model.name=Qwen/Qwen2.5-32B",
        "rollout.native.slots=16384",
    )
    assert given.code == 2
    assert "needs" in given.found["problems"][0]
    suspicious = answer("test", VERIFIER[0].partition("=")[2])
    assert (suspicious.code, suspicious.found["suspicious"]) == (1, True)


def test_the_exit_codes_of_the_help_are_those_of_the_page():
    table = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1]
    assert re.findall(r"^\| ([\dn +]+) \|", table, flags=re.MULTILINE) == list(EXIT_CODES)
    with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(out.getvalue().split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code}: {meaning}" in shown


class Ascii(io.StringIO):
    """A stream that has no letters beyond ASCII."""

    encoding = "ascii"  # type: ignore[assignment]


def test_json_is_valid_whatever_the_numbers_and_the_encoding(monkeypatch: pytest.MonkeyPatch):
    stream = Ascii()
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", other)
    with stdout_to_stderr():
        print("a note")
    print_json({"nan": float("nan"), "inf": [float("inf")], "text": "é\U0001f600\x1b"})
    assert json.loads(stream.getvalue()) == {"nan": None, "inf": [None], "text": "é\U0001f600\x1b"}
    assert stream.getvalue().isascii()
    assert other.getvalue() == "a note\n"
