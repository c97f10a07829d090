"""The part `quickstart`: whole trainings of two commits with the same seeds, by each run's own
metrics.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.paired.positions import positions_of_run
from benchmarks.paired.sides import BASE, Side, Target, in_turn, row
from benchmarks.quiet import ProcessorTime
from benchmarks.worker_session import ROOT
from dapo.policy.builtin_models import smollm2_directory
from dapo.runs.metrics_file import read_metrics

CONFIG = Path("configs") / "quickstart.yaml"
LATE_FROM = 10
"""The first of the steps in which the policy has sharpened."""
TARGETS = {"training": Target(0.60, at_most=True), "late": Target(0.50, at_most=True)}
TARGETS |= {"evaluation": Target(0.60, at_most=True)}
KINDS = {
    "update": "positions of the update: prompts once a group, and fed tokens",
    "decode": "decoded positions",
    "prefill": "prefilled positions, a prompt once a group",
}


def measure_quickstart(
    sides: Sequence[Side],
    *,
    steps: int,
    rounds: int,
    seed: int,
    options: Sequence[str],
    log: Callable[[str], None],
) -> dict[str, Any]:
    """One training of each side in every round, both with the round's seed and the base's
    configuration.

    Raises subprocess.CalledProcessError where a training fails.
    """
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    base = next(side for side in sides if side.name == BASE)
    for index in range(rounds):
        overrides = [f"train.num_steps={steps}", f"train.seed={seed + index}", *options]
        for side in in_turn(sides, index):
            log(
                f"quickstart: round {index + 1} of {rounds}, seed {seed + index}: {side.name}"
                f" ({side.commit})"
            )
            found = _train(side, base.root / CONFIG, overrides)
            runs[side.name].append(found)
            log("  " + ", ".join(f"{key} {found[key]:.1f} s" for key in ("training", "evaluation")))
    return {
        "rows": rows_of(runs, steps),
        "runs": runs,
        "steps": steps,
        "first_seed": seed,
        "options": list(options),
    }


def rows_of(runs: dict[str, list[dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """Seconds with their targets, counts of tokens, and positions: those of the sides, and distinct
    ones among them.
    """

    def values(key: str) -> dict[str, list[float]]:
        return {side: [float(run[key]) for run in of_side] for side, of_side in runs.items()}

    names = {
        "training": f"training, {steps} steps without evaluations",
        "late": f"steps {LATE_FROM} to {steps}",
    }
    names |= {
        "evaluation": "evaluations after steps",
        "generation": "generation",
        "update": "update",
    }
    measured = [
        key for key in names if all(run.get(key) for of_side in runs.values() for run in of_side)
    ]
    rows = [row(names[key], "s", values(key), TARGETS.get(key)) for key in measured]
    rows.append(row("generated tokens", "tokens", values("generated_tokens")))
    rows.append(row("held-out accuracy at the end", "", values("accuracy")))
    for kind, name in KINDS.items():
        rows.append(row(f"{name}: all", "positions", values(f"{kind}_all")))
        rows.append(row(f"{name}: distinct", "positions", values(f"{kind}_distinct")))
    return rows


def _train(side: Side, config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The report of one training, and the share of the processor that other processes used
    meanwhile.
    """
    log_path = ROOT / "benchmarks" / "logs" / f"paired-{side.name}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="dapo-paired-") as folder,
        open(log_path, "wb") as output,
    ):
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "dapo",
            "train",
            str(config),
            *overrides,
            "--run-dir",
            str(run),
        ]
        environment = {**os.environ, **side.environment, "HF_HUB_OFFLINE": "1"}
        before = ProcessorTime.now()
        own_before = _children_s()
        # in a folder of its own: nothing but PYTHONPATH says whose package it is
        subprocess.run(
            command,
            check=True,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        others = ProcessorTime.now().share_since(before, own_s=_children_s() - own_before)
        found = figures_of(read_metrics(run / "metrics.jsonl")) | _positions(run)
        return found | {"accuracy": _accuracy(run), "others_share": others}


def figures_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds by phase and counts, from the metrics of a run.

    The evaluation before the first step has no seconds.
    """
    steps = [record for record in records if record["step"] > 0]
    training = [record["time/step_s"] - record.get("time/evaluate_s", 0.0) for record in steps]
    computed = dict.fromkeys(key for record in steps for key in record if "shared" in key)
    return {
        "step_s": training,
        "training": sum(training),
        "late": sum(training[LATE_FROM - 1 :]),
        "evaluation": sum(record.get("time/evaluate_s", 0.0) for record in steps),
        "generation": sum(record["time/generate_s"] for record in steps),
        "update": sum(
            record["time/update_s"] + record.get("time/old_logprobs_s", 0.0) for record in steps
        ),
        "generated_tokens": sum(record["rollout/tokens_generated"] for record in steps),
        # what the run itself says of the positions it computed
        "counted": {key: [record.get(key) for record in steps] for key in computed},
    }


def _accuracy(run: Path) -> float:
    """In the last evaluation."""
    newest = max((run / "eval").glob("step_*.json"))
    return float(json.loads(newest.read_text(encoding="utf-8"))["accuracy"])


def _positions(run: Path) -> dict[str, Any]:
    steps = positions_of_run(run, AutoTokenizer.from_pretrained(smollm2_directory()))
    sums = {f"{kind}_all": sum(step[kind][0] for step in steps) for kind in KINDS}
    sums |= {f"{kind}_distinct": sum(step[kind][1] for step in steps) for kind in KINDS}
    return sums | {"positions_by_step": steps}


def _children_s() -> float:
    """Processor seconds of all ended children of this process, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
