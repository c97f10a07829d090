"""A directory that is no model is answered with what it holds."""

from pathlib import Path

import pytest

from dapo.core.errors import ConfigError
from dapo.core.model_files import require_model_files


@pytest.mark.parametrize(
    ("names", "ending"),
    [
        ([], "it has no config.json"),
        (["b", "a"], "; it holds {folder}/a, {folder}/b: name the run or the model that you mean"),
        (["a", "b", "c", "d", "e"], "{folder}/b, {folder}/c and 2 more: name the run or the model"),
    ],
)
def test_a_folder_of_runs_is_answered_with_the_first_of_them(
    tmp_path: Path, names: list[str], ending: str
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(ConfigError) as raised:
        require_model_files(str(tmp_path))
    assert ending.format(folder=tmp_path) in str(raised.value)
    assert "file.txt" not in str(raised.value)
