"""Reading the checkpoint of a run that trains, and deletes it meanwhile."""

from pathlib import Path

import pytest

from dapo.core.errors import CheckpointError
from dapo.policy.checkpoint import SavedWeights


def test_a_checkpoint_that_the_run_has_deleted_says_to_repeat_the_command(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"step_000141 is gone: .* repeat the command"):
        SavedWeights(tmp_path / "step_000141")
    (tmp_path / "step_000142").mkdir()
    with pytest.raises(CheckpointError, match=r"step_000142/policy.json cannot be read"):
        SavedWeights(tmp_path / "step_000142")
