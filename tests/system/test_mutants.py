"""The table of deliberate mistakes applies to the source as it stands now."""

from pathlib import Path

import pytest

from benchmarks import mutants
from helpers.paths import ROOT


def test_every_deliberate_mistake_still_applies_and_names_tests_that_exist(tmp_path: Path):
    table = mutants.read_mutants()
    assert len({mutant.name for mutant in table}) == len(table) >= 75
    for mutant in table:
        copy, original = mutant.path(tmp_path), mutant.path(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
        assert mutant.apply(tmp_path) == original.read_text(encoding="utf-8")
        compile(copy.read_text(encoding="utf-8"), mutant.name, "exec")
        assert all((ROOT / "tests" / name).is_file() for name in mutant.tests), mutant.name


def test_a_mistake_whose_text_is_gone_is_named(tmp_path: Path):
    (tmp_path / "src" / "dapo").mkdir(parents=True)
    (tmp_path / "src" / "dapo" / "x.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "a = 2"):
        with pytest.raises(ValueError, match=r"swap: 'a = .' stands [02] times in src/dapo/x.py; expected once"):
            mutants.Mutant("swap", "x.py", old, "b = 1", ("t",)).apply(tmp_path)
