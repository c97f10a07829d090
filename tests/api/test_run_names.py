"""The directory of a run that Python starts: its name tells the seed, or is the caller's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dapo
from dapo.api.entry_points import _make, _new_path, _seed_of
from dapo.core.errors import CheckpointError
from helpers.tables import for_each_row


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@for_each_row(
    ("options", "seed"),
    [
        ({"seed": 2}, 2),
        ({"train.seed": 0}, 0),
        ({"seed": np.int64(4)}, 4),
        ({"train": {"seed": 3, "num_steps": 1}}, 3),
        ({"lr": 1}, None),
    ],
)
def test_the_seed_of_a_call_is_read_in_each_spelling(options: dict[str, Any], seed: int | None):
    assert _seed_of(options) == seed


def test_a_directory_is_named_by_time_and_seed_or_by_the_caller_and_is_always_new(tmp_path: Path):
    assert _new_path("run", None, 2).name.endswith("-seed2")
    assert "seed" not in _new_path("run", None, None).name
    for expected in ("wide", "wide-2", "wide-3"):
        path = _new_path("run", "wide", 2)
        assert path == Path("runs") / expected
        path.mkdir(parents=True)


def test_two_calls_of_one_second_do_not_share_a_directory():
    path = Path("runs/run-20260314-150926")
    _make(path)
    with pytest.raises(CheckpointError, match=f"another call has just begun a run in {path}"):
        _make(path)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_is_no_path(name: str):
    with pytest.raises(dapo.ConfigError, match="name: expected the name of a directory in runs/"):
        dapo.train("tiny-random", data="builtin:sums", name=name)


def test_one_name_is_enough():
    with pytest.raises(dapo.ConfigError, match="run_dir and name both name the run's directory"):
        dapo.train("tiny-random", data="builtin:sums", name="a", run_dir="b")
