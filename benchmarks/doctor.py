"""Does `dapo doctor` find planted faults, and is it silent on healthy runs? `python -m benchmarks.doctor`.

Each fault and each healthy run is trained with several seeds: a few minutes on one core. It also times the rules in a
run that trains. The table is for docs/lab/doctor.md.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.machine import describe_commit, today
from benchmarks.planted_faults import FAULTS, HEALTHY, HEALTHY_LOSSES, Case, fitted_model, judged_right, train_case
from benchmarks.worker_session import ROOT
from dapo.analysis.doctor import Diagnosis
from dapo.config import load_config
from dapo.runs.metrics_file import read_metrics
from dapo.training.rules.all_rules import LiveRules

ALL_HEALTHY = (*HEALTHY, *HEALTHY_LOSSES)
CASES = (*FAULTS, *ALL_HEALTHY)


def main() -> None:
    """Train all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1000, 2000], help="seeds of each run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dapo-doctor-") as temporary:
        folder = Path(temporary)
        model = fitted_model(folder / "model")
        found = {case.name: [_diagnosed(case, model, folder, seed) for seed in given.seeds] for case in CASES}
        last = sorted(folder.glob("*/run"))[0]
        print("\n".join([*table(found, given.seeds), "", *costs(last)]))
    print(f"\n{describe_commit(ROOT)}, {today()}")


def _diagnosed(case: Case, model: Path, folder: Path, seed: int) -> Diagnosis:
    path = folder / f"{CASES.index(case)}-{seed}"
    options = tuple(option for option in case.options if not option.startswith("train.seed="))
    own = sum(int(option.partition("=")[2]) for option in case.options if option.startswith("train.seed="))
    seeded = replace(case, options=(*options, f"train.seed={seed + own}"))
    with contextlib.redirect_stdout(io.StringIO()):
        diagnosis = train_case(seeded, model, path)
    print(f"{case.name}, seed {seed + own}: {_names(diagnosis)}", file=sys.stderr)
    return diagnosis


def table(found: dict[str, list[Diagnosis]], seeds: Sequence[int]) -> list[str]:
    """The rows for docs/lab/doctor.md: each fault with how often it was found, then the healthy runs as one row."""
    lines = ["| planted | finding | found | named first | other findings |", "|---|---|---|---|---|"]
    right = first = 0
    for case in FAULTS:
        of_case = found[case.name]
        hits = sum(judged_right(case, each) for each in of_case)
        leading = sum(bool(each.cases) and _first(each) == case.expected for each in of_case)
        others = sorted({c.finding.name for each in of_case for c in each.cases} - {case.expected})
        lines.append(
            f"| {case.name} | `{case.expected}` | {hits} of {len(of_case)} | {leading} | "
            f"{', '.join(f'`{name}`' for name in others)} |"
        )
        right, first = right + hits, first + leading
    total = len(FAULTS) * len(seeds)
    healthy = [each for case in ALL_HEALTHY for each in found[case.name]]
    alarms = sum(bool(each.issues) for each in healthy)
    lines += [
        "",
        f"Found: {right} of {total} ({len(FAULTS)} faults, {len(seeds)} seeds), {first} of them as the first.",
    ]
    lines += [f"False alarms: {alarms} of {len(healthy)} healthy runs ({len(ALL_HEALTHY)} configurations)."]
    return lines


def _first(diagnosis: Diagnosis) -> str:
    """The finding that came first in the run; of several, the one that is printed first."""
    return min(diagnosis.cases, key=lambda case: case.since).finding.name


def _names(diagnosis: Diagnosis) -> str:
    return ", ".join(f"{case.finding.name} (step {case.since})" for case in diagnosis.cases) or "nothing"


def costs(run: Path) -> list[str]:
    """Seconds of the rules per step, as the mean over many, beside those of a step of the tiny run."""
    records = read_metrics(run / "metrics.jsonl")
    watch = LiveRules(load_config(run / "config.yaml"), records)
    began, repeats = time.perf_counter(), 500
    for number in range(repeats):
        watch.add({**records[-1], "step": records[-1]["step"] + 1 + number})
    seconds = (time.perf_counter() - began) / repeats
    step_s = min(record["time/step_s"] for record in records if "time/step_s" in record)
    return [
        f"The rules take {1000 * seconds:.2f} ms per step; the shortest step of a tiny run took {1000 * step_s:.0f} ms."
    ]


if __name__ == "__main__":
    main()
