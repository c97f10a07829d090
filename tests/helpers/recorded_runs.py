"""The runs whose numbers tests/golden/ records, and how they are made: `python -m
helpers.recorded_runs FOLDER`.
"""

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from pyarrow.parquet import read_table

from benchmarks.scripted_engine import ScriptedEngine
from dapo.cli.train import start_run
from dapo.training.state import Run
from helpers.fake_rollout import random_script
from helpers.paths import TESTS
from helpers.scripted_runs import scripted_run
from helpers.tiny_runs import metrics, tiny

GOLDEN_RUN = TESTS / "golden" / "tiny_20_steps.json"
GOLDEN_SCHEDULES = TESTS / "golden" / "schedules.json"
SAVES = ("train.num_steps=5", "train.save_every=1", "train.keep_checkpoints=9")
PREDICTIONS = ("dynamic_sampling.predict=true",)
SCHEDULES: dict[str, tuple[str, ...]] = {
    "sync": ("schedule=sync", "rollout.engines=0", "loss.engine_correction=none"),
    "one_step_off": ("schedule=one_step_off",),
    "one_step_off with predictions": ("schedule=one_step_off", *PREDICTIONS),
}
"""The runs whose digests are in GOLDEN_SCHEDULES."""


def golden_run(path: Path, *, steps: int = 20) -> list[dict[str, Any]]:
    """The metrics of the first steps of the run in GOLDEN_RUN, made now."""
    config = tiny(
        "model.dtype=float64", f"train.num_steps={steps}", "train.save_every=0", "optim.lr=0.0003"
    )
    start_run(config, run_dir=path, config_name="tiny")
    return metrics(path)


def assert_as_recorded(rows: list[dict[str, Any]]) -> None:
    """Assert that the first steps of the golden run are those recorded, but for rounding."""
    golden = json.loads(GOLDEN_RUN.read_text())
    assert [row["step"] for row in rows] == [row["step"] for row in golden[: len(rows)]]
    for row, recorded in zip(rows, golden, strict=False):
        assert row.keys() == recorded.keys()
        for name, value in recorded.items():
            is_equal = math.isclose(row[name], value, rel_tol=1e-5, abs_tol=1e-7)
            assert is_equal, (row["step"], name, row[name], value)


def recorded_schedule(path: Path, *options: str) -> dict[str, str]:
    """The digests of a run of SCHEDULES, made now with an engine that follows a script."""

    def change(run: Run) -> None:
        run.sampling.engine = ScriptedEngine(random_script, slots=6, logprob=-0.25)

    scripted_run(path, *SAVES, *options, change=change)
    return digests(path)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of a run's metrics, tables and states by file; tables by their values, whatever
    pyarrow writes.
    """
    contents: dict[str, Any] = {"metrics.jsonl": metrics(run)}
    for path in sorted([*run.glob("rollouts/*"), *run.glob("checkpoints/*/*")]):
        name = path.relative_to(run).as_posix()
        if path.suffix == ".parquet":
            contents[name] = read_table(path).to_pylist()
        elif path.name in ("updates", "prefetched_batch.json"):
            contents[name] = path.read_text()
        elif path.name == "state.json":
            state: dict[str, Any] = json.loads(path.read_text())
            state["train_state"].pop("wall_s")
            contents[name] = state
    return {
        name: hashlib.sha256(json.dumps(value).encode()).hexdigest()
        for name, value in contents.items()
    }


def main(folder: Path) -> None:
    """Record both files anew, as `make golden` does."""
    rows = golden_run(folder / "golden")
    GOLDEN_RUN.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    schedules = {
        name: recorded_schedule(folder / name, *options) for name, options in SCHEDULES.items()
    }
    GOLDEN_SCHEDULES.write_text(json.dumps(schedules, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
