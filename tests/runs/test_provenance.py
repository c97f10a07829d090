"""What a checkpoint was made with: every change that can move a byte is named, and nothing else
is.
"""

from pathlib import Path

import pytest
import torch

from dapo.core.files import atomic_write_json
from dapo.libs import cpu_kernels
from dapo.runs.manifest import PROVENANCE_FILE, provenance, provenance_diff
from dapo.types import Problem
from helpers.tiny_runs import tiny

PROBLEMS = [Problem("1", "Q", "A"), Problem("2", "R", "B", "s", {"level": 3})]


def changes(folder: Path, now: dict[str, dict[str, object]]) -> list[str]:
    atomic_write_json(folder / PROVENANCE_FILE, provenance(tiny(), PROBLEMS, []))
    return provenance_diff(folder, now, step=4)


def test_nothing_is_named_where_nothing_that_moves_a_byte_has_changed(tmp_path: Path):
    assert changes(tmp_path, provenance(tiny(), PROBLEMS, [])) == []
    free = (
        "train.num_steps=99",
        "train.save_every=7",
        "train.eval_every=3",
        "train.keep_checkpoints=1",
    )
    assert changes(tmp_path, provenance(tiny(*free, "log.rollouts=none"), PROBLEMS, [])) == []


@pytest.mark.parametrize(
    "problems",
    [
        PROBLEMS[::-1],
        PROBLEMS[:1],
        [PROBLEMS[0], Problem("2", "R", "b", "s", {"level": 3})],
        [PROBLEMS[0], Problem("2", "R", "B", "s", {"level": 4})],
    ],
)
def test_other_problems_are_named_by_number_and_checksum(tmp_path: Path, problems: list[Problem]):
    (line,) = changes(tmp_path, provenance(tiny(), problems, []))
    assert line.startswith("warning: training problems was 2 with checksum ")
    assert f"and is {len(problems)} with checksum" in line
    assert line.endswith("from here on, results belong to a different run")


def test_options_and_the_number_of_threads_are_named_with_old_and_new(tmp_path: Path):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        now = provenance(tiny("optim.lr=0.5", "train.threads=7"), PROBLEMS, [])
    finally:
        torch.set_num_threads(before)
    assert changes(tmp_path, now) == [
        "warning: optim.lr was 0.003 up to step 4 and is 0.5 now; from here on, results belong to a different run",
        "warning: train.threads was 1 up to step 4 and is 7 now; from here on, results belong to a different run",
        (
            f"warning: number of threads was {before} up to step 4 and is {before + 1} now; "
            "from here on, results may differ by rounding"
        ),
    ]


def test_the_folder_of_a_model_is_the_same_from_the_root_as_from_the_start_folder(tmp_path: Path):
    atomic_write_json(
        tmp_path / PROVENANCE_FILE, provenance(tiny("model=./models/own"), PROBLEMS, [])
    )

    def lines(model: str) -> list[str]:
        return provenance_diff(tmp_path, provenance(tiny(f"model={model}"), PROBLEMS, []), step=4)

    assert lines("/work/models/own") == []
    (line,) = lines("/work/models/other")
    assert line.startswith("warning: model.name was ./models/own up to step 4")


def test_layers_that_are_compiled_no_longer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_compiled = cpu_kernels.is_compiled()
    with monkeypatch.context() as patch:
        patch.setattr(cpu_kernels, "is_compiled", lambda: not is_compiled)
        now = provenance(tiny(), PROBLEMS, [])
    before, after = ("compiled", "not compiled") if is_compiled else ("not compiled", "compiled")
    (line,) = changes(tmp_path, now)
    assert line.startswith(
        f"warning: layers was {before} up to step 4 and is {after} now; from here on, results may"
    )


def test_a_smaller_microbatch_is_no_other_run(tmp_path: Path):
    now = provenance(tiny("train.microbatch_tokens=123", "train.recompute=true"), PROBLEMS, [])
    before = provenance(tiny(), PROBLEMS, [])["options"]
    assert changes(tmp_path, now) == [
        (
            f"warning: train.microbatch_tokens was {before['train.microbatch_tokens']} up to step 4"
            " and is 123 now; from here on, results may differ by rounding"
        ),
        (
            f"warning: train.recompute was {before['train.recompute']} up to step 4 and is True"
            " now; from here on, results may differ by rounding"
        ),
    ]


def test_a_checkpoint_without_the_file_is_resumed_without_a_word(tmp_path: Path):
    assert provenance_diff(tmp_path, provenance(tiny(), PROBLEMS, []), step=4) == []
