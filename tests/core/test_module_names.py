"""A function is found by the name of its module, or of the file of it, also without __init__.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.core.errors import RewardError
from dapo.core.loading import load_callable, module_file
from helpers.tables import for_each_row

CODE = "def score():\n    return 7\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a module two folders deep; what is imported is forgotten."""
    (tmp_path / "work_r" / "gen").mkdir(parents=True)
    (tmp_path / "work_r" / "gen" / "rewards_fn.py").write_text(CODE)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "far.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "work_r"]:
        del sys.modules[name]


@pytest.mark.parametrize("has_init", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "work_r.gen.rewards_fn",
        "work_r/gen/rewards_fn.py",
        "./work_r/gen/rewards_fn.py",
        "{folder}/work_r/gen/rewards_fn.py",
    ],
)
def test_a_module_in_folders_is_loaded_by_its_name_and_by_its_file(
    folder: Path, has_init: bool, name: str
):
    if has_init:
        (folder / "work_r" / "__init__.py").touch()
        (folder / "work_r" / "gen" / "__init__.py").touch()
    name = name.format(folder=folder)
    assert module_file(name) == folder / "work_r" / "gen" / "rewards_fn.py"
    assert load_callable(f"{name}:score", error=RewardError)() == 7


@for_each_row(
    ["name"],
    [
        ("work_r",),
        ("work_r.gen",),
        ("work_r.gen.none",),
        ("work_r.gen.rewards_fn.none",),
        ("no.no",),
    ],
)
def test_what_is_no_module_has_no_file(folder: Path, name: str):
    assert module_file(name) is None


def test_a_file_elsewhere_is_answered_with_its_name_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder / "work_r")
    for name in ("../outside/far.py", f"{folder}/outside/far.py"):
        with pytest.raises(RewardError, match="PYTHONPATH, and name it far:score"):
            load_callable(f"{name}:score", error=RewardError)
