"""`dapo clean`, and the end of a run: what stays on the disk, what still works, what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from dapo.cli.main import main
from dapo.policy.checkpoint import SavedWeights
from dapo.runs.checkpoints import bytes_below, has_weights_only
from dapo.runs.directory import RunDirectory
from helpers.commands import run
from helpers.paths import CONFIGS

TINY = (
    "train",
    str(CONFIGS / "tiny.yaml"),
    "train.threads=1",
    "train.num_steps=3",
    "train.save_every=1",
)
QUIET = ("data.eval=null", "log.rollouts=none")


def trained(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    code, out, _ = run(capsys, *TINY, *QUIET, "--run-dir", str(path), *options)
    assert code == 0
    return out


def checkpoints(path: Path) -> dict[int, bool]:
    """Whether each checkpoint has the optimizer's state."""
    return {
        int(each.name[5:]): not has_weights_only(each)
        for each in sorted((path / "checkpoints").iterdir())
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all of its checkpoints, which tests copy before they change it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, *QUIET, "--run-dir", str(path), "train.keep_checkpoints=9"])
    assert stopped.value.code == 0
    assert checkpoints(path) == {1: True, 2: True, 3: True}
    return path


def test_a_finished_run_keeps_the_optimizers_state_of_its_last_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out = trained(capsys, tmp_path / "run", "train.keep_checkpoints=null")
    assert checkpoints(tmp_path / "run") == {2: False, 3: True}
    further = f"train it further  dapo resume {tmp_path / 'run'} train.num_steps=6\n"
    assert further in out
    assert len(out[out.index("look at it  ") :].splitlines()) == 4


def test_a_run_of_weights_only_is_small_evaluated_and_exported_but_not_continued(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    whole = tmp_path / "whole"
    small = tmp_path / "small"
    for path, keep in ((whole, 1), (small, 0)):
        out = trained(capsys, path, "model.dtype=bfloat16", f"train.keep_checkpoints={keep}")
        assert checkpoints(path) == {3: keep == 1}
        assert ("dapo resume" in out) == (keep == 1)
    names = "*.safetensors"
    newest, reduced = (RunDirectory(path).checkpoints.path(3) for path in (whole, small))
    # 2 of 12 bytes per parameter
    assert bytes_below(reduced, names) < 0.2 * bytes_below(newest, names)
    for (name, exact), (_, stored) in zip(
        *(SavedWeights(each).named_tensors() for each in (newest, reduced)), strict=True
    ):
        assert stored.dtype == torch.bfloat16
        assert torch.equal(exact.to(torch.bfloat16), stored), name
    data = ("--data", "{builtin: {sums: {}}, size: 4}", "--samples-per-problem", "1", "--output")
    for path in (whole, small):
        assert run(capsys, "eval", str(path), *data, str(tmp_path / f"{path.name}.json"))[0] == 0
    first, second = (
        json.loads((tmp_path / f"{each}.json").read_text())["table"] for each in ("whole", "small")
    )
    assert [row["responses"] for row in first] == [row["responses"] for row in second]
    assert run(capsys, "export", str(small), str(tmp_path / "model"))[0] == 0
    for command in (
        ("resume", str(small), "train.num_steps=4"),
        ("fork", str(small), "--step", "3", "train.num_steps=4"),
    ):
        code, _, err = run(capsys, *command)
        assert (code, "holds only weights" in err, "train.keep_checkpoints=1" in err) == (
            2,
            True,
            True,
        )
    assert "already at step 3 of 3" in run(capsys, "resume", str(whole))[1]
    assert "to train on" not in run(capsys, "resume", str(small))[1]  # it could not
    assert run(capsys, "resume", str(whole), "train.num_steps=4")[0] == 0


def test_clean_lists_what_it_would_remove_and_removes_it_with_yes(
    capsys: pytest.CaptureFixture[str], whole: Path, tmp_path: Path
):
    path = Path(shutil.copytree(whole, tmp_path / "run"))
    before = bytes_below(path)
    code, out, _ = run(capsys, "clean", str(path))
    assert code == 0
    assert [line.split(": ")[1] for line in out.splitlines()[:-1]] == [
        "optimizer state of step 1",
        "optimizer state of step 2",
    ]
    assert out.splitlines()[-1].endswith("would be freed; nothing was removed, --yes does it")
    assert bytes_below(path) == before
    listed = json.loads(run(capsys, "clean", str(path), "--yes", "--json")[1])
    assert before - bytes_below(path) == pytest.approx(listed["bytes"], rel=0.02)
    assert checkpoints(path) == {1: False, 2: False, 3: True}
    assert run(capsys, "clean", str(path), "--yes")[1] == "nothing to remove\n"
    assert run(capsys, "clean", str(path), "--keep", "weights", "--yes")[0] == 0
    assert checkpoints(path) == {1: False, 2: False, 3: False}
    assert run(capsys, "clean", str(path), "--keep", "nothing", "--yes")[0] == 0
    assert checkpoints(path) == {}
    assert (path / "metrics.jsonl").is_file()
    assert run(capsys, "clean", str(path), "--keep", "some")[::2] == (
        2,
        "error: --keep some: expected one of newest, weights, nothing\n",
    )


def test_clean_refuses_runs_of_which_one_is_being_trained(
    capsys: pytest.CaptureFixture[str], whole: Path, tmp_path: Path
):
    live = Path(shutil.copytree(whole, tmp_path / "live"))
    ended = Path(shutil.copytree(whole, tmp_path / "ended"))
    with RunDirectory(live).lock(3):
        code, _, err = run(capsys, "clean", str(ended), str(live), "--yes", "--keep", "nothing")
    assert code == 2
    assert f"{live} is being trained; nothing was removed" in err
    assert len(checkpoints(live)) == len(checkpoints(ended)) == 3
