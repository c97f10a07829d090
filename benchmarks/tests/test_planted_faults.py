"""Faults planted in real short runs are found with their cause, and healthy runs raise no alarm."""

from pathlib import Path

import pytest
import torch

from benchmarks.planted_faults import (
    FAULTS,
    HEALTHY,
    HEALTHY_LOSSES,
    Case,
    fitted_model,
    judged_right,
    train_case,
)
from dapo.algo.surrogate_table import SURROGATES
from dapo.config import build_config

MISSES = 1
"""Planted faults that may go unnoticed."""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = fitted_model(tmp_path_factory.mktemp("fitted") / "model")
    torch.set_num_threads(threads)
    return path


def misjudged(cases: tuple[Case, ...], model: Path, folder: Path) -> dict[str, list[str]]:
    """The findings of the doctor for each run that it misjudges."""
    found = {
        case.name: (case, train_case(case, model, folder / str(i))) for i, case in enumerate(cases)
    }
    return {
        name: [each.finding.name for each in diagnosis.cases]
        for name, (case, diagnosis) in found.items()
        if not judged_right(case, diagnosis)
    }


def test_planted_faults_are_found_with_their_cause(tmp_path: Path, model: Path):
    assert len(FAULTS) >= 20
    assert len({case.expected for case in FAULTS}) >= 16
    wrong = misjudged(FAULTS, model, tmp_path)
    assert len(wrong) <= MISSES, wrong


def test_twenty_healthy_runs_raise_no_alarm(tmp_path: Path, model: Path):
    assert len(HEALTHY) == 20
    assert misjudged(HEALTHY, model, tmp_path) == {}


@pytest.mark.parametrize("case", HEALTHY_LOSSES, ids=lambda case: case.name)
def test_a_healthy_run_of_every_preset_and_loss_raises_no_alarm(
    case: Case, tmp_path: Path, model: Path
):
    assert misjudged((case,), model, tmp_path) == {}


def test_the_healthy_runs_hold_every_surrogate():
    raw = {"model": {"name": "none", "dtype": "float32"}, "data": {"train": "builtin:sums"}}
    trained = {build_config(raw, case.options).loss.surrogate for case in HEALTHY_LOSSES}
    assert trained == set(SURROGATES)
