"""Whether predicting which problems carry a signal saves anything: tokens, time and updates to an
accuracy.

    python -m benchmarks.predict [--seeds 3] [--tasks quickstart mix] [--modes off on]

Each run is one `dapo train` in a folder of its own, stopped once it has reached the highest target;
the seeds are paired: the runs of a seed have the same problems, stream and keys. A command that was
interrupted goes on where it stopped, finished runs are not repeated. `--table` prints what is
there. Seconds leave out evaluations; tokens and updates do not depend on how busy the machine is.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "predict.json"
TARGETS = (0.75, 0.9)
MODES = {
    "off": (),
    "on": ("dynamic_sampling.predict=true",),
}
EVALUATED = (
    "{builtin: {sums: {high: 12}, products: {high: 10}, largest: {count: 3}}, size: 60, seed: 2}"
)
# sums and products teach; which of two numbers is larger is soon always right; the other three
# never are
MIXED = (
    "{builtin: {sums: {high: 12}, products: {high: 10}, largest: {count: 2}, sort_digits: {count:"
    " 8}, remainders: {low: 100000, high: 999999, divisor: 999}, differences: {low: 100000, high:"
    " 999999}}, size: 6000, seed: 1}"
)
# a random policy that can learn to begin its answers to sums with a digit; nothing can be learned
# of the other four
TINY = (
    (
        "data.train={builtin: {sums: {}, largest: {}, remainders: {}, gcd: {}, letter_counts: {}},"
        " size: 6000, seed: 1}"
    ),
    "data.eval={builtin: {sums: {}}, size: 60, seed: 2}",
    "reward.verifier=benchmarks.reward:three_kinds",
    "rollout.prompts_per_step=8",
    "rollout.group_size=8",
    "rollout.native.slots=64",
    "dynamic_sampling.max_groups_per_step=80",
    "optim.lr=0.0004",
    "train.minibatch_groups=8",
)
TASKS = {
    "tiny mix": TINY,
    "quickstart": (f"data.eval={EVALUATED}",),
    "mix": (
        f"data.train={MIXED}",
        "data.eval={builtin: {sums: {high: 12}, products: {high: 10}}, size: 60, seed: 2}",
    ),
}
NUM_STEPS = 120
FIGURES = {"tokens": "generated tokens", "updates": "updates", "seconds": "seconds"}
_POLL_S = 2.0


def run_directory(folder: Path, task: str, mode: str, seed: int) -> Path:
    """Where a run lies."""
    return folder / f"{task}-{mode}-{seed}".replace(" ", "_")


def train(path: Path, overrides: Sequence[str], log: Path) -> None:
    """Start or resume a run, and stop it when it has reached the highest target."""
    if (path / "config.yaml").exists():
        command = ["resume", str(path)]
    else:
        command = ["train", *overrides, "--run-dir", str(path)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dapo", *command], stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                if reached(curve(path))[TARGETS[-1]] is not None:
                    process.send_signal(signal.SIGTERM)
                    process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()


def curve(path: Path) -> list[dict[str, float]]:
    """The result of each evaluation of a run, with the tokens and time spent until then."""
    spent: dict[str, float] = dict.fromkeys((*FIGURES, "judged", "skipped"), 0)
    points = []
    file = path / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for row in map(json.loads, filter(str.strip, lines)):
        spent["tokens"] += row.get("rollout/tokens_generated", 0)
        spent["updates"] += "optim/lr" in row
        spent["seconds"] += row.get("time/step_s", 0) - row.get("time/evaluate_s", 0)
        spent["judged"] += row.get("rollout/groups_generated", 0)
        spent["skipped"] += row.get("rollout/problems_skipped", 0)
        accuracy = [
            value
            for name, value in row.items()
            if name.startswith("eval/") and name.count("/") == 2
        ]
        names = [
            name
            for name in row
            if name.startswith("eval/") and name.endswith("/accuracy") and name.count("/") == 2
        ]
        if names and accuracy:
            points.append({"step": row["step"], "accuracy": row[names[0]], **spent})
    return points


def reached(points: Sequence[Mapping[str, float]]) -> dict[float, Mapping[str, float] | None]:
    """The first evaluation at or above each target."""
    return {
        target: next((p for p in points if p["accuracy"] >= target), None) for target in TARGETS
    }


def is_finished(points: Sequence[Mapping[str, float]]) -> bool:
    """Whether a run needs no more steps."""
    return bool(points) and (
        points[-1]["step"] >= NUM_STEPS or reached(points)[TARGETS[-1]] is not None
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, write the results, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "predict", help="of the runs"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(given.seeds):
        for task in given.tasks:
            for mode in given.modes:
                path = run_directory(given.folder, task, mode, seed)
                if not given.table and not is_finished(curve(path)):
                    train(
                        path,
                        options(task, mode, seed, given.threads),
                        given.folder / f"{path.name}.log",
                    )
                    write_results(given.folder)
    write_results(given.folder)
    print("\n".join(table(json.loads(RESULTS.read_text(encoding="utf-8")))))


def options(task: str, mode: str, seed: int, threads: int) -> list[str]:
    """The overrides of a run."""
    config = ROOT / "configs" / ("tiny.yaml" if task == "tiny mix" else "quickstart.yaml")
    schedule = [
        f"train.num_steps={NUM_STEPS}",
        "train.eval_every=2",
        "train.save_every=10",
        "log.rollouts=none",
    ]
    return [
        str(config),
        *TASKS[task],
        *MODES[mode],
        *schedule,
        f"train.seed={seed}",
        f"train.threads={threads}",
    ]


def write_results(folder: Path) -> None:
    """Put the curves of all runs that are there into one small file, beside those of runs that are
    elsewhere.
    """
    found: dict[str, Any] = {
        "command": "python -m benchmarks.predict",
        "threads_per_run": 1,
        "curves": {},
    }
    if RESULTS.is_file():
        found["curves"] = json.loads(RESULTS.read_text(encoding="utf-8"))["curves"]
    for task in TASKS:
        for mode in MODES:
            for path in sorted(folder.glob(f"{task}-{mode}-[0-9]".replace(" ", "_"))):
                if points := curve(path):
                    key = f"{task}/{mode}/{path.name.rpartition('-')[2]}"
                    found["curves"][key] = [
                        {k: round(v, 4) for k, v in point.items()} for point in points
                    ]
    order = [f"{task}/{mode}/" for task in TASKS for mode in MODES]
    found["curves"] = dict(
        sorted(found["curves"].items(), key=lambda item: _position(item[0], order))
    )
    RESULTS.write_text(
        json.dumps(found, indent=None).replace("}, {", "},\n{") + "\n", encoding="utf-8"
    )


def _position(key: str, order: Sequence[str]) -> tuple[int, int]:
    """Where a curve stands in the file: by task, mode and seed."""
    name, _, seed = key.rpartition("/")
    return order.index(f"{name}/"), int(seed)


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: each task and target, the median of each figure over the seeds, and the paired
    ratio to off.
    """
    curves: dict[tuple[str, str], dict[int, list[dict[str, float]]]] = {}
    for key, points in results["curves"].items():
        task, mode, seed = key.split("/")
        curves.setdefault((task, mode), {})[int(seed)] = points
    yield (
        "| task | accuracy | mode | seeds | generated tokens | updates | seconds | fewer tokens"
        " than off, by seed |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for target in TARGETS:
        for (task, mode), by_seed in curves.items():
            at = {seed: reached(points)[target] for seed, points in by_seed.items()}
            there = {seed: point for seed, point in at.items() if point is not None}
            base = {
                seed: reached(points)[target]
                for seed, points in curves.get((task, "off"), {}).items()
            }
            ratios = [
                f"{off['tokens'] / point['tokens']:.2f}x"
                for seed, point in there.items()
                if (off := base.get(seed))
            ]
            figures = [
                f"{median(p[name] for p in there.values()):,.0f}" if there else "-"
                for name in FIGURES
            ]
            yield (
                f"| {task} | {target:.0%} | {mode} | {len(there)} of {len(at)} |"
                f" {' | '.join(figures)} | {', '.join(ratios)} |"
            )


if __name__ == "__main__":
    main()
