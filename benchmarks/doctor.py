"""Does `dapo doctor` find planted faults, and is it silent on healthy runs?

`python -m benchmarks.doctor`.

Each fault and each healthy run is trained with several seeds: half an hour on one core. It also
times the rules in a run that trains. The table is for docs/doctor.md. With `--into FILE
--minutes 9` no run begins after nine minutes: the same command again is the next piece, and the
last one prints the table.
"""

import argparse
import contextlib
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.machine import describe_commit, today
from benchmarks.planted_faults import (
    FAULTS,
    HEALTHY,
    HEALTHY_LOSSES,
    Case,
    fitted_model,
    judged_right,
    train_case,
)
from benchmarks.worker_session import ROOT
from dapo.analysis.doctor import Diagnosis
from dapo.config import load_config
from dapo.runs.metrics_file import read_metrics
from dapo.training.rules.all_rules import LiveRules

ALL_HEALTHY = (*HEALTHY, *HEALTHY_LOSSES)
CASES = (*FAULTS, *ALL_HEALTHY)


@dataclass(frozen=True)
class Outcome:
    """The findings of a run, those that came first at the front, and whether the planted cause is
    among them.
    """

    case: str
    seed: int
    findings: list[str]
    is_right: bool
    has_issues: bool


def main() -> None:
    """Train the cases that the file does not hold, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1000, 2000], help="seeds of each run"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="add the outcomes to a file, and take those in it"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no run later; needs --into"
    )
    given = parser.parse_args()
    if given.minutes < math.inf and given.into is None:
        parser.error("--minutes needs --into FILE, which tells the next piece what is done")
    torch.set_num_threads(1)
    ends = time.monotonic() + 60 * given.minutes
    known = read_outcomes(given.into)
    wanted = [
        (case, seed) for cases in (FAULTS, ALL_HEALTHY) for seed in given.seeds for case in cases
    ]
    wanted = [(case, seed) for case, seed in wanted if (case.name, seed) not in known]
    with tempfile.TemporaryDirectory(prefix="dapo-doctor-") as temporary:
        folder = Path(temporary)
        model = fitted_model(folder / "model")
        for case, seed in wanted:
            if time.monotonic() >= ends:
                print("the same command again is the next piece", file=sys.stderr)
                return
            outcome = diagnosed(case, model, folder, seed)
            known[case.name, seed] = outcome
            if given.into is not None:
                with given.into.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
        print("\n".join(table(known, given.seeds)))
        if runs := sorted(folder.glob("*/run")):
            print("\n".join(["", *costs(runs[0])]))
    print(f"\n{describe_commit(ROOT)}, {today()}")


def read_outcomes(path: Path | None) -> dict[tuple[str, int], Outcome]:
    """The outcomes of a file by case and seed."""
    lines = (
        path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    )
    found = [Outcome(**json.loads(line)) for line in lines]
    return {(each.case, each.seed): each for each in found}


def diagnosed(case: Case, model: Path, folder: Path, seed: int) -> Outcome:
    """Train a case with a seed beside its own, and diagnose it."""
    options = tuple(option for option in case.options if not option.startswith("train.seed="))
    own = sum(
        int(option.partition("=")[2]) for option in case.options if option.startswith("train.seed=")
    )
    seeded = replace(case, options=(*options, f"train.seed={seed + own}"))
    with contextlib.redirect_stdout(io.StringIO()):
        diagnosis = train_case(seeded, model, folder / f"{CASES.index(case)}-{seed}")
    print(f"{case.name}, seed {seed + own}: {_names(diagnosis)}", file=sys.stderr)
    names = [each.finding.name for each in sorted(diagnosis.cases, key=lambda each: each.since)]
    return Outcome(case.name, seed, names, judged_right(case, diagnosis), bool(diagnosis.issues))


def table(found: Mapping[tuple[str, int], Outcome], seeds: Sequence[int]) -> list[str]:
    """The rows for docs/doctor.md: each fault with how often it was found, then the healthy
    runs as one row.
    """
    lines = [
        "| planted | finding | found | named first | other findings |",
        "|---|---|---|---|---|",
    ]
    right = first = 0
    for case in FAULTS:
        of_case = [found[case.name, seed] for seed in seeds]
        hits = sum(each.is_right for each in of_case)
        leading = sum(each.findings[:1] == [case.expected] for each in of_case)
        others = sorted({name for each in of_case for name in each.findings} - {case.expected})
        lines.append(
            f"| {case.name} | `{case.expected}` | {hits} of {len(of_case)} | {leading} | "
            f"{', '.join(f'`{name}`' for name in others)} |"
        )
        right = right + hits
        first = first + leading
    total = len(FAULTS) * len(seeds)
    healthy = [found[case.name, seed] for case in ALL_HEALTHY for seed in seeds]
    alarms = [each for each in healthy if each.has_issues]
    lines += [
        "",
        (
            f"Found: {right} of {total} ({len(FAULTS)} faults, {len(seeds)} seeds), {first} of them"
            " as the first."
        ),
    ]
    lines += [
        f"False alarms: {len(alarms)} of {len(healthy)} healthy runs ({len(ALL_HEALTHY)}"
        " configurations)."
    ]
    lines += [f"- {each.case}, seed {each.seed}: {', '.join(each.findings)}" for each in alarms]
    return lines


def _names(diagnosis: Diagnosis) -> str:
    return (
        ", ".join(f"{case.finding.name} (step {case.since})" for case in diagnosis.cases)
        or "nothing"
    )


def costs(run: Path) -> list[str]:
    """Seconds of the rules per step, as the mean over many, beside those of a step of the tiny
    run.
    """
    records = read_metrics(run / "metrics.jsonl")
    watch = LiveRules(load_config(run / "config.yaml"), records)
    began = time.perf_counter()
    repeats = 500
    for number in range(repeats):
        watch.add({**records[-1], "step": records[-1]["step"] + 1 + number})
    seconds = (time.perf_counter() - began) / repeats
    step_s = min(record["time/step_s"] for record in records if "time/step_s" in record)
    return [
        f"The rules take {1000 * seconds:.2f} ms per step; the shortest step of a tiny run took"
        f" {1000 * step_s:.0f} ms."
    ]


if __name__ == "__main__":
    main()
