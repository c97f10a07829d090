"""Laws of `schedule: async`: what a bound of 0 and of 1 equals, and what holds for every bound on staleness."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from benchmarks.scripted_engine import ScriptedEngine
from dapo.training.state import Run
from helpers.fake_rollout import random_script
from helpers.paths import TESTS
from helpers.scripted_runs import scripted_run
from helpers.tiny_runs import metrics

GOLDEN = TESTS / "golden" / "schedules.json"
SAVES = ("train.num_steps=5", "train.save_every=1", "train.keep_checkpoints=9")
PREDICTIONS = ("dynamic_sampling.predict=thompson", "dynamic_sampling.weights=inverse")
RUNS: dict[str, tuple[str, ...]] = {
    "sync": ("schedule=sync", "rollout.engines=0", "loss.engine_correction=none"),
    "one_step_off": ("schedule=one_step_off",),
    "one_step_off with predictions": ("schedule=one_step_off", *PREDICTIONS),
}
"""The runs whose digests are in GOLDEN, written by the loops of 2026-11, before `async` replaced `one_step_off`."""


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of a run's metrics, tables and states by file; tables by their values, whatever pyarrow writes."""
    found = {"metrics.jsonl": metrics(run)}
    for path in sorted([*run.glob("rollouts/*"), *run.glob("checkpoints/*/*")]):
        name = path.relative_to(run).as_posix()
        if path.suffix == ".parquet":
            found[name] = read_table(path).to_pylist()
        elif path.name in ("updates", "prefetched_batch.json"):
            found[name] = path.read_text()
        elif path.name == "state.json":
            state: dict[str, Any] = json.loads(path.read_text())
            state["train_state"].pop("wall_s")
            found[name] = state
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in found.items()}


def recorded_run(path: Path, *options: str) -> dict[str, str]:
    def change(run: Run) -> None:
        run.sampling.engine = ScriptedEngine(random_script, slots=6, logprob=-0.25)

    scripted_run(path, *SAVES, *options, change=change)
    return digests(path)


@pytest.mark.parametrize("name", RUNS)
def test_the_recorded_runs_of_each_schedule_stay_as_they_were(tmp_path: Path, name: str):
    found, golden = recorded_run(tmp_path / "run", *RUNS[name]), json.loads(GOLDEN.read_text())[name]
    assert len(golden) > 10
    assert [file for file in found.keys() | golden.keys() if found.get(file) != golden.get(file)] == []


if __name__ == "__main__":  # make golden
    folder = Path(sys.argv[1])
    GOLDEN.write_text(json.dumps({name: recorded_run(folder / name, *RUNS[name]) for name in RUNS}, indent=1) + "\n")
