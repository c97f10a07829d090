"""The table of deliberate mistakes applies to the source as it stands now."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import mutants
from helpers.paths import ROOT


def test_every_deliberate_mistake_still_applies_and_names_tests_that_exist(tmp_path: Path):
    table = mutants.read_mutants()
    assert len({mutant.name for mutant in table}) == len(table) >= 75
    assert sum(not mutant.function for mutant in table) < len(table) / 8
    for mutant in table:
        copy = mutant.path(tmp_path)
        original = mutant.path(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
        assert mutant.apply(tmp_path) == original.read_text(encoding="utf-8")
        compile(copy.read_text(encoding="utf-8"), mutant.name, "exec")
        for test in mutant.tests:
            name, _, function = test.partition("::")
            assert f"def {function}" in (ROOT / "tests" / name).read_text(encoding="utf-8"), (
                mutant.name
            )


def test_a_mistake_whose_text_is_gone_is_named(tmp_path: Path):
    (tmp_path / "src" / "dapo").mkdir(parents=True)
    (tmp_path / "src" / "dapo" / "x.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "a = 2"):
        with pytest.raises(
            ValueError, match=r"swap: 'a = .' stands [02] times in src/dapo/x.py; expected once"
        ):
            mutants.Mutant("swap", "x.py", old, "b = 1", ("t",)).apply(tmp_path)


def test_a_mistake_is_made_in_its_function_alone(tmp_path: Path):
    (tmp_path / "src" / "dapo").mkdir(parents=True)
    path = tmp_path / "src" / "dapo" / "x.py"
    text = (
        "def f():\n    return 1\n\n\nclass C:\n    @property\n    def f(self):\n        return 1\n"
    )
    path.write_text(text)
    mutants.Mutant("two", "x.py", "return 1", "return 2", ("t",), "C.f").apply(tmp_path)
    assert path.read_text() == text[:-2] + "2\n"
    with pytest.raises(ValueError, match=r"src/dapo/x.py:C.g is gone; name the function"):
        mutants.Mutant("two", "x.py", "return 1", "return 2", ("t",), "C.g").apply(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "y = f(a, b=[1, 2])",
        "y = f(\n    a,\n    b=[1, 2],\n)",
        "y = f(\n    a,  # why\n    b=[\n        1,\n        2,\n    ],\n)",
    ],
)
def test_a_mistake_is_made_in_any_layout_of_the_code(tmp_path: Path, text: str):
    (tmp_path / "src" / "dapo").mkdir(parents=True)
    path = tmp_path / "src" / "dapo" / "x.py"
    path.write_text(f"x = 1\n{text}\nz = 'f(a,b=[1,2])'\n")
    mutants.Mutant("swap", "x.py", "f(a, b=[1, 2])", "g()", ("t",)).apply(tmp_path)
    assert path.read_text() == "x = 1\ny = g()\nz = 'f(a,b=[1,2])'\n"


def test_a_piece_leaves_out_what_its_file_holds_and_begins_nothing_after_its_time(tmp_path: Path):
    table = mutants.read_mutants()
    path = tmp_path / "outcomes.jsonl"
    assert len(mutants.remaining(table, path)) == len(table)
    path.write_text(json.dumps({"mutant": table[0].name, "failed": [], "seconds": 1}) + "\n")
    left = mutants.remaining(table, path)
    assert sorted(m.name for m in left) == sorted(m.name for m in table[1:])
    changes = sum(one.tests != other.tests for one, other in pairwise(left))
    # those of the same test files follow each other
    assert changes == len({m.tests for m in left}) - 1
    console = Console(soft_wrap=True)
    assert (
        mutants._run(left, console, jobs=1, thorough=False, into=path, ends=time.monotonic()) == []
    )
    assert len(path.read_text().splitlines()) == 1


def test_a_file_of_outcomes_gives_the_list_of_survivors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, second, *others = [mutant.name for mutant in mutants.read_mutants()]
    path = tmp_path / "outcomes.jsonl"
    outcomes = [
        (first, []),
        (first, ["a test"]),
        (second, []),
        *((name, ["a test"]) for name in others[1:]),
    ]
    path.write_text(
        "".join(json.dumps({"mutant": name, "failed": failed}) + "\n" for name, failed in outcomes)
    )
    assert mutants.report(path, Console(soft_wrap=True)) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"{len(others)} of {len(others) + 2} caught",
        f"survive: {second}",
        f"not run: {others[0]}",
    ]
