"""The outputs that README and pages show are those of their commands."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from docs import outputs
from helpers.commands import run as run_command
from helpers.paths import ROOT
from helpers.tables import for_each_row

GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.usefixtures("forked_workers")
def test_commands_of_seconds_print_what_the_pages_show(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """`make nightly` repeats the commands of minutes."""
    monkeypatch.setenv("COLUMNS", str(outputs.COLUMNS))

    def run_here(command: str, types: str, folder: Path) -> str:
        monkeypatch.chdir(folder)
        out = ""
        for words in map(shlex.split, command.split(" && ")):
            if words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                out = run_command(capsys, *words[1:])[1]
        return out

    commands = []
    for path in outputs.pages():
        folder = tmp_path / path.stem
        folder.mkdir()
        page = path.read_text(encoding="utf-8")
        for shown, text in outputs.outputs_of(page, folder, run_here, is_cheap=True):
            commands.append(shown.command)
            assert outputs.difference(shown, text) == ""
    assert [command.split()[1] for command in commands] == [
        "compare", "check", "check", "check", "check", "data", "test",
    ]  # fmt: skip


@pytest.mark.parametrize("path", GUIDE, ids=lambda path: path.name)
def test_each_output_of_the_guide_names_its_command(path: Path):
    page = path.read_text(encoding="utf-8")
    assert len(outputs.shown_in(page)) == len(re.findall(r"^```text$", page, re.MULTILINE))


AGREE = [
    ("", "12 of 132 are wrong", "12 of 132\nare  wrong"),
    ("measures", "finished, step 3/3, 12 s ago", "finished, step 3/3, 2h05m ago"),
    ("measures", "210 tok/s, 4.6 s, left 4m", "1,210 tok/s, 14 s, left 2m05s"),
    ("measures", "5.7 of 23.5 GiB, 269 MB of disk", "5.7 of 1,007 GiB, 2.69 GB of disk"),
    ("measures", "runs/a-20261128-230102 in /tmp/x", "runs/a-20270101-000000 in /home/me"),
    ("numbers", "reward -0.327  kept  72.7%", "reward +1.02  kept 100%"),
    ("numbers", "never  20  62%  ####\n────", "never  3  9%  #\n──"),
    ("numbers", "accuracy ▁▃█ 70.0% now", "accuracy ▁▂▃▄ 31.2% now"),
    ("text", "#  verdict\n0  wrong  I think", "#  verdict\n0  correct  48\n1  wrong"),
]
DIFFER = [
    ("", "12 s", "13 s"),
    ("measures", "step 3/3, 12 s ago", "step 2/3, 12 s ago"),
    ("measures", "accuracy 70.0%", "accuracy 71.0%"),
    ("numbers", "better on 35 problems", "worse on 35 problems"),
    ("numbers", "kept 72.7%", "kept -"),
    ("text", "#  verdict\n0  wrong", "#  judged\n0  wrong"),
]


@for_each_row(
    ["differs", "one", "other", "agree"],
    [*((*row, True) for row in AGREE), *((*row, False) for row in DIFFER)],
)
def test_only_what_may_differ_on_another_machine_is_not_compared(
    differs: str, one: str, other: str, agree: bool
):
    words = outputs.agreeing_words(one, differs)
    assert (words == outputs.agreeing_words(other, differs)) == agree


def test_a_page_shows_the_lines_that_its_comment_chooses_and_the_end_of_a_live_display():
    page = """\
<!-- output: dapo train my.yaml
lines: ^step (1|9)
takes: 4 min -->

```text
$ dapo train my.yaml
```
"""
    (shown,) = outputs.shown_in(page)
    received = "step 1\r\nbar 10%\r\x1b[1A\x1b[2K\r\x1b[2Kstep 2\r\nstep 9\x1b[0m  \r\nbar 100%\r\n"
    screen = outputs.screen_text(received)
    assert screen.split() == ["step", "2", "step", "9", "bar", "100%"]
    assert shown.show(f"step 1\n{screen}") == "$ dapo train my.yaml\nstep 1\n...\nstep 9\n"
    assert shown.takes == "4 min"


@pytest.mark.parametrize("line", ["differ: numbers", "differs: seconds"])
def test_a_comment_that_says_something_else_is_refused(line: str):
    with pytest.raises(ValueError, match="expected one of"):
        outputs.shown_in(f"<!-- output: dapo\n{line} -->\n\n```text\n```\n")
