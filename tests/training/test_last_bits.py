"""What a run decides, and what the repository records of runs, does not depend on the last bit of
BLAS or libm.
"""

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.last_bits import use_other_last_bits
from helpers.paths import ROOT, TESTS
from helpers.recorded_runs import (
    GOLDEN_SCHEDULES,
    SCHEDULES,
    assert_as_recorded,
    golden_run,
    recorded_schedule,
)
from helpers.tables import for_each_row

PREDICTING = "one_step_off with predictions"
FIRST_STEPS = 5

OLDER_PROCESSOR = {
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""The instructions of x86 of 2008: sums and exp are rounded otherwise, and there are no compiled
kernels.
"""


DECIDING = (
    "algo/chance.py",
    "algo/sampling.py",
    "sampling/selection.py",
    "sampling/problem_stats.py",
    "sampling/dynamic_sampling.py",
    "sampling/rollout_metrics.py",
    "training/rules/mean_test.py",
)


@for_each_row("name", DECIDING)
def test_no_number_of_the_selection_comes_from_a_power_or_a_product_of_vectors(name: str):
    """Python's powers are the C library's and numpy's products are BLAS's; a patch of `math`
    reaches neither.
    """
    tree = ast.parse((ROOT / "src/dapo" / name).read_text())
    operations = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    assert [
        ast.unparse(node) for node in operations if isinstance(node.op, ast.Pow | ast.MatMult)
    ] == []


def test_the_recorded_runs_are_the_same_with_another_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    exact = math.exp(0.1)
    use_other_last_bits(monkeypatch)
    assert 0 < abs(math.exp(0.1) - exact) < 1e-15
    golden = json.loads(GOLDEN_SCHEDULES.read_text())
    for name, options in SCHEDULES.items():
        assert recorded_schedule(tmp_path / name, *options) == golden[name]


def test_recorded_runs_are_the_same_on_an_older_processor(tmp_path: Path):
    """In a process of their own: libraries choose their instructions when they are loaded."""
    environment = os.environ | OLDER_PROCESSOR | {"PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"}
    subprocess.run(
        [sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, check=True
    )
    found = json.loads((tmp_path / "digests.json").read_text())
    assert found == json.loads(GOLDEN_SCHEDULES.read_text())[PREDICTING]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 1 + FIRST_STEPS
    assert_as_recorded(rows)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "digests.json").write_text(
        json.dumps(recorded_schedule(folder / "scripted", *SCHEDULES[PREDICTING]))
    )
    (folder / "rows.json").write_text(json.dumps(golden_run(folder / "trained", steps=FIRST_STEPS)))
