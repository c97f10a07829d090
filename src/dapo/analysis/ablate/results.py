"""The results of an experiment: read from its runs, or from the small files that are kept of them; one table of both.

    results.json      the experiment, each run's facts and accuracies per problem, the table
    results.parquet   a row per run and step: generated tokens, seconds without evaluations, accuracy, metrics

An accuracy is that of a run's last evaluation, which comes after its last step, in every row. What is called final of
other metrics is the mean over the last tenth of the steps (`steps_at_the_end`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import dapo
from dapo.analysis.ablate.experiment import ACCURACY, Experiment, Panel, PlannedRun
from dapo.config import Config
from dapo.core.errors import DataError
from dapo.core.files import atomic_file, atomic_write_text, read_json
from dapo.core.processor import cpu_model
from dapo.core.terminal import to_json
from dapo.runs.console import training_seconds
from dapo.runs.directory import RunDirectory, package_versions, read_evaluation
from dapo.runs.records import metrics_by_step

RESULTS_JSON, RESULTS_PARQUET = "results.json", "results.parquet"
FORMAT = 1
"""Of results.json."""
ENDED = ("finished", "solved")
"""The reasons with which a run has ended well."""
KEPT_METRICS = (
    "reward/mean",
    "reward/accuracy",
    "rollout/keep_rate",
    "rollout/response_tokens_mean",
    "rollout/truncated_fraction",
    "rollout/entropy_estimate",
    "loss/clip_high_fraction",
    "loss/token_prob_mean",
    "optim/skipped",
)
"""The metrics whose curves are always kept; those of the experiment's plots are as well."""
FINAL_METRICS = {
    "length": "rollout/response_tokens_mean",
    "truncated": "rollout/truncated_fraction",
    "entropy": "rollout/entropy_estimate",
}
"""What the table shows of a run's last steps."""
_LIST_OF_VALUES = re.compile(r"\[[^\[\]{}]*\]")
_KEYS = ("condition", "variant", "seed", "step", "tokens", "seconds", ACCURACY)


@dataclass(frozen=True)
class Results:
    """What is kept of an experiment."""

    facts: Mapping[str, Any]
    """The content of results.json without the table."""
    curves: pa.Table
    """The content of results.parquet."""

    @property
    def panels(self) -> list[Panel]:
        """The plots."""
        return [Panel(each["metric"], each["against"]) for each in self.facts["experiment"]["plots"]]

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions; one empty name where there are none."""
        return [each["name"] for each in self.facts["experiment"]["conditions"]]

    @property
    def variants(self) -> list[dict[str, Any]]:
        """The rows: name, after, own options."""
        found: list[dict[str, Any]] = self.facts["experiment"]["variants"]
        return found

    def finished(self, condition: str, variant: str) -> dict[int, dict[str, Any]]:
        """The finished runs of a row that were evaluated, by seed."""
        return {
            run["seed"]: run
            for run in self.facts["runs"]
            if (run["condition"], run["variant"]) == (condition, variant) and run["accuracies"] is not None
        }


def collect(experiment: Experiment, folder: Path, failures: Mapping[str, str] | None = None) -> Results:
    """Read the results of an experiment's runs as they stand.

    Args:
        experiment: The experiment.
        folder: Its folder.
        failures: Why runs have failed, by the name of the run.

    Raises:
        DataError: Metrics of a run are damaged, or runs of one condition were evaluated on different problems.
    """
    metrics = (*KEPT_METRICS, *(panel.metric for panel in experiment.panels if panel.metric != ACCURACY))
    runs, rows, problems = [], [], dict[str, list[str]]()
    for planned in experiment.runs():
        found, curve = _read_run(planned, folder / "runs" / planned.name, tuple(dict.fromkeys(metrics)))
        if (reason := (failures or {}).get(planned.name)) is not None and found["state"] not in ENDED:
            found |= {"state": "failed", "reason": reason}
        if (table := found.pop("table")) is not None:
            ids = problems.setdefault(planned.condition, sorted(table))
            if sorted(table) != ids:
                raise DataError(f"{planned.describe()} was evaluated on other problems than the runs before it")
            found["accuracies"] = [table[name] for name in ids]
        runs.append(found)
        rows += curve
    facts = {
        "format": FORMAT,
        "experiment": describe_experiment(experiment),
        "made_with": {"dapo": dapo.__version__, "packages": package_versions(), "processor": cpu_model()},
        "problems": problems,
        "runs": runs,
    }
    return Results(facts, _table_of(rows, tuple(dict.fromkeys(metrics))))


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """An experiment as JSON values, without paths of this machine."""
    return {
        "name": experiment.name,
        "base": experiment.base.name,
        "seeds": list(experiment.seeds),
        "set": list(experiment.shared),
        "conditions": [{"name": each.name, "set": list(each.own)} for each in experiment.conditions],
        "variants": [
            {"name": each.name, "after": each.after, "set": list(each.own), "previous": experiment.predecessor(each)}
            for each in experiment.variants
        ],
        "baseline": experiment.baseline,
        "plots": [{"metric": panel.metric, "against": panel.against} for panel in experiment.panels],
    }


def steps_at_the_end(steps: int) -> int:
    """How many of a run's steps its final metrics are the mean of: a tenth, at least one."""
    return max(1, ceil(steps / 10))


def write_results(results: Results, table: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write results.json, with the table, and results.parquet into a folder."""
    with atomic_file(folder / RESULTS_PARQUET) as temporary:
        pq.write_table(results.curves, temporary, compression="zstd")
    text = to_json({**results.facts, "table": table}, indent=2)
    # a line for a list of 300 accuracies, not 300; raw line breaks never stand in JSON strings
    lines = _LIST_OF_VALUES.sub(lambda found: re.sub(r"\n\s*", " ", found[0]), text)
    atomic_write_text(folder / RESULTS_JSON, lines + "\n")


def read_results(folder: Path) -> Results:
    """Read what `write_results` has written. Raises DataError where it is missing, damaged or of another version."""
    path = folder / RESULTS_JSON
    try:
        facts = read_json(path)
        curves = pq.read_table(folder / RESULTS_PARQUET)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no results that can be read ({error}); expected {RESULTS_JSON} and {RESULTS_PARQUET} "
            "of dapo ablate"
        ) from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise DataError(f"{path} is not of this version of dapo ablate; make it anew from the runs")
    facts.pop("table", None)
    return Results(facts, curves)


def merge(parts: Sequence[Results]) -> Results:
    """One experiment's results whose seeds were run in several places, as if they had been run in one.

    What was run must be the same but for the seeds; that the models were is not known from results. Of a run that
    stands in several parts the one that has ended is taken.

    Raises:
        DataError: The experiments or the evaluated problems differ, or a run has ended in several parts.
    """
    first = parts[0].facts
    for other in (part.facts for part in parts[1:]):
        for name in ("base", "set", "conditions", "variants", "baseline"):
            if other["experiment"][name] != first["experiment"][name]:
                raise DataError(f"results of different experiments cannot be put together: `{name}` differs")
    problems: dict[str, list[str]] = {}
    runs: dict[tuple[Any, ...], tuple[dict[str, Any], int]] = {}
    for i, facts in enumerate(part.facts for part in parts):
        for condition, ids in facts["problems"].items():
            if problems.setdefault(condition, ids) != ids:
                raise DataError("results that were evaluated on different problems cannot be put together")
        for run in facts["runs"]:
            key = (run["condition"], run["variant"], run["seed"])
            has_ended = run["state"] in ENDED
            if key in runs and has_ended and runs[key][0]["state"] in ENDED:
                raise DataError(
                    f"{run['variant']}, seed {run['seed']}, has ended in two of the folders: which one counts?"
                )
            if key not in runs or has_ended:
                runs[key] = (run, i)
    curves = []
    for i, part in enumerate(parts):
        table = part.curves.to_pydict()
        rows = zip(table["condition"], table["variant"], table["seed"], strict=True)
        curves.append(part.curves.filter(pa.array([runs[row][1] == i for row in rows], pa.bool_())))
    made_with = [part.facts["made_with"] for part in parts]
    packages = {name: _joined([each["packages"].get(name) for each in made_with]) for name in made_with[0]["packages"]}
    facts = {
        **first,
        "experiment": {
            **first["experiment"],
            "seeds": sorted({seed for part in parts for seed in part.facts["experiment"]["seeds"]}),
        },
        "made_with": {
            "dapo": _joined([each["dapo"] for each in made_with]),
            "packages": packages,
            "processor": _joined([each["processor"] for each in made_with]),
        },
        "problems": problems,
        "runs": [run for run, _ in sorted(runs.values(), key=lambda found: found[0]["seed"])],
    }
    return Results(facts, pa.concat_tables(curves, promote_options="default"))


def _joined(values: Sequence[str | None]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _read_run(planned: PlannedRun, path: Path, metrics: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The facts of a run, with its last evaluation as `table`, and the rows of its curve."""
    facts: dict[str, Any] = {
        "condition": planned.condition,
        "variant": planned.variant,
        "seed": planned.seed,
        "state": "not started",
        "reason": None,
        "accuracies": None,
        "table": None,
    }
    if not RunDirectory.is_run(path):
        return facts, []
    run = RunDirectory.open(path)
    reason = run.exit_reason()
    facts["state"] = "unfinished" if reason is None or reason.startswith("interrupted") else "failed"
    facts["reason"] = reason
    rows = metrics_by_step(run.metrics)
    evaluations = {step: found for step in (0, max(rows, default=0)) if (found := _evaluation(run, step))}
    name = next((each["name"] for each in evaluations.values()), None)
    curve = _curve(planned, rows, name, metrics)
    if reason not in ENDED:
        return facts, curve
    last = max(evaluations, default=0)
    if last:
        facts["table"] = {row["id"]: row["accuracy"] for row in evaluations[last]["table"]}
        facts["is_binary"] = bool(evaluations[last]["binary"])
    return facts | {"state": reason} | _figures(rows, curve, evaluations, planned.config), curve


def _evaluation(run: RunDirectory, step: int) -> dict[str, Any] | None:
    found = read_evaluation(run.eval(step), lambda text: None) if run.eval(step).is_file() else []
    return found[0] if found else None


def _figures(
    rows: Mapping[int, Mapping[str, Any]],
    curve: Sequence[Mapping[str, Any]],
    evaluations: Mapping[int, Mapping[str, Any]],
    config: Config,
) -> dict[str, Any]:
    """The numbers of a finished run that the table shows."""
    steps = sorted(step for step in rows if step > 0)
    last = [rows[step] for step in steps[-steps_at_the_end(len(steps)) :]]
    updates = sum(ceil(rows[step].get("rollout/groups_trained", 0) / config.train.minibatch_groups) for step in steps)
    skipped = sum(rows[step].get("optim/skipped") or 0 for step in steps)
    final = max(evaluations, default=0)
    return {
        "steps": len(steps),
        "tokens": curve[-1]["tokens"] if curve else 0,
        "seconds": curve[-1]["seconds"] if curve else 0.0,
        "accuracy_before": evaluations[0]["accuracy"] if 0 in evaluations else None,
        "accuracy": evaluations[final]["accuracy"] if final else None,
        "samples_per_problem": evaluations[final]["samples_per_problem"] if final else None,
        **{name: _mean([row.get(metric) for row in last]) for name, metric in FINAL_METRICS.items()},
        "updates": updates,
        "skipped": skipped / updates if updates else None,
    }


def _curve(
    planned: PlannedRun, rows: Mapping[int, Mapping[str, Any]], evaluation: str | None, metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per step: what had been spent when it was done, the accuracy after it, its metrics."""
    tokens, seconds, found = 0, 0.0, []
    for step, row in sorted(rows.items()):
        tokens += int(row.get("rollout/tokens_generated") or 0)
        took = training_seconds({name: value for name, value in row.items() if value is not None})
        seconds += took if isfinite(took) and step > 0 else 0.0
        key = (planned.condition, planned.variant, planned.seed, step, tokens, seconds)
        accuracy = row.get(f"eval/{evaluation}/accuracy")
        if step > 0 or accuracy is not None:
            own = {metric: row.get(metric) for metric in metrics}
            found.append(dict(zip(_KEYS, (*key, accuracy), strict=True)) | own)
    return found


def _table_of(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> pa.Table:
    kinds = [pa.string(), pa.string(), pa.int64(), pa.int32(), pa.int64(), pa.float32(), pa.float32()]
    fields = [*zip(_KEYS, kinds, strict=True), *((metric, pa.float32()) for metric in metrics)]
    return pa.Table.from_pylist([dict(row) for row in rows], pa.schema(fields))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None
