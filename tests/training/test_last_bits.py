"""What a run decides, and what the repository records of runs, does not depend on the last bit of BLAS or libm."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.last_bits import use_other_last_bits
from helpers.paths import ROOT, TESTS
from training.test_async_laws import GOLDEN, RUNS, recorded_run

OLDER_PROCESSOR = {
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""The instructions of x86 of 2008: sums and exp are rounded otherwise, and there are no compiled kernels."""


def test_the_recorded_runs_are_the_same_with_another_c_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exact = math.exp(0.1)
    use_other_last_bits(monkeypatch)
    assert 0 < abs(math.exp(0.1) - exact) < 1e-15
    golden = json.loads(GOLDEN.read_text())
    for name, options in RUNS.items():
        assert recorded_run(tmp_path / name, *options) == golden[name]


def test_the_recorded_runs_are_the_same_on_an_older_processor():
    """A process of its own: libraries choose their instructions when they are loaded."""
    files = [TESTS / "training/test_async_laws.py", TESTS / "training/test_train.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "recorded_runs or golden_run"]
    found = subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, env=os.environ | OLDER_PROCESSOR, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout
    assert f"{len(RUNS) + 1} passed" in found.stdout
