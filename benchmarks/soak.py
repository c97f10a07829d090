"""`make soak`: 2,000 steps of a tiny model in one process, observed from outside: does anything
grow?

Linux only: memory and file handles are read from /proc. Prints the figures; exit code 1 where
something grows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pyarrow.parquet import read_table

from benchmarks.memory import rss_bytes
from benchmarks.worker_session import ROOT
from dapo.runs.metrics_file import read_metrics

OPTIONS = (
    "rollout.prompts_per_step=1",
    "rollout.max_response_tokens=4",
    "overlong.buffer_tokens=2",
    "optim.lr=1.0e-9",
    "train.minibatch_groups=1",
    "train.threads=1",
    "train.save_every=20",
    "train.eval_every=100",
    # full from the first steps on: with more, a step of bad luck that asks for more groups at once
    # than any before raises the engine's peak, as late as after a thousand steps, and hides what
    # grows from step to step
    "rollout.native.slots=8",
)
"""All that a run does, at the smallest size: rollouts, updates, checkpoints, evaluations, a
verifier process.
"""

MAX_GROWTH_PERCENT = 2.0
SAMPLES_PER_WINDOW = 20


@dataclass(frozen=True)
class Snapshot:
    """The state of the run as another process sees it."""

    step: int
    rss_bytes: int
    handles: int
    rows: int
    """Rows of the newest table of responses, read during the run."""


def main() -> int:
    """0: flat; 1: something grew, or the run failed."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--from-step", type=int, default=200, help="growth is counted from here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dapo-soak-") as folder:
        snapshots, seconds = watch_run(Path(folder) / "run", steps=arguments.steps)
    found = growth(snapshots, from_step=arguments.from_step) | {
        "seconds": round(seconds),
        "snapshots": len(snapshots),
    }
    print(json.dumps(found, indent=1))
    is_flat = (
        found["memory_growth_percent"] < MAX_GROWTH_PERCENT
        and found["handles"][1] <= found["handles"][0]
    )
    print("flat" if is_flat else "something grows")
    return 0 if is_flat else 1


def watch_run(run: Path, *, steps: int) -> tuple[list[Snapshot], float]:
    """`dapo train` to its last step, observed several times a second; the snapshots, and the
    seconds.

    Raises CalledProcessError if the run fails, and DataError if one of its files is not readable at
    some moment.
    """
    command = [
        sys.executable,
        "-m",
        "dapo",
        "train",
        str(ROOT / "configs" / "tiny.yaml"),
        "--run-dir",
        str(run),
    ]
    command += [*OPTIONS, f"train.num_steps={steps}"]
    started = time.monotonic()
    snapshots = []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            found = snapshot(run, process.pid)
            # after its last step it evaluates and draws
            if found is not None and found.step < steps:
                snapshots.append(found)
            # reading all metrics takes the longer, the more
            time.sleep(max(0.1, (time.monotonic() - started) / 500))
    finally:
        process.kill()  # needed only if a snapshot failed
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return snapshots, time.monotonic() - started


def snapshot(run: Path, process: int) -> Snapshot | None:
    """The process and its files as they are now; None where it has not written metrics yet, or has
    just ended.
    """
    tables = sorted((run / "rollouts").glob("step_*.parquet"))
    if not (run / "metrics.jsonl").exists() or not tables:
        return None
    try:
        memory = rss_bytes(process)
        handles = len(list(Path(f"/proc/{process}/fd").iterdir()))
    except OSError:
        return None  # it has ended, and is for us to reap
    return Snapshot(
        read_metrics(run / "metrics.jsonl")[-1]["step"],
        memory,
        handles,
        read_table(tables[-1]).num_rows,
    )


def growth(snapshots: Sequence[Snapshot], *, from_step: int) -> dict[str, Any]:
    """Medians of the first snapshots from a step on against those of the last."""
    counted = [each for each in snapshots if each.step >= from_step]
    size = min(SAMPLES_PER_WINDOW, len(counted) // 2)
    if not size:
        raise ValueError(
            f"{len(counted)} snapshots from step {from_step} on are too few; give more --steps"
        )
    first = counted[:size]
    last = counted[-size:]
    memory = [median(each.rss_bytes for each in window) for window in (first, last)]
    return {
        "steps": [[window[0].step, window[-1].step] for window in (first, last)],
        "memory_mib": [round(value / 2**20, 1) for value in memory],
        "memory_growth_percent": round(100 * (memory[1] / memory[0] - 1), 2),
        "handles": [median(each.handles for each in window) for window in (first, last)],
    }


if __name__ == "__main__":
    sys.exit(main())
