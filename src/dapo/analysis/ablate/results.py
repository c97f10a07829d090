"""Collects results of an experiment from its runs, or reads results.json, which outlives them.

The file holds the experiment, the table, and each run's facts, curve and accuracy on every problem.
A curve has a value per step in each column: generated tokens and seconds so far, accuracy, metrics.
The accuracy of a run comes from its last evaluation, after its last step. The final value of a
metric is its mean over the last tenth of the steps.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import dapo
from dapo.analysis.ablate.experiment import ACCURACY, Experiment, Panel, PlannedRun
from dapo.config import Config
from dapo.core.errors import DataError
from dapo.core.files import atomic_write_text, read_json
from dapo.core.processor import cpu_model
from dapo.core.terminal import to_json
from dapo.runs.directory import ENDED, RunDirectory
from dapo.runs.evaluations import read_evaluation
from dapo.runs.manifest import package_versions
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.status import end_state
from dapo.runs.time_left import training_seconds

RESULTS_JSON = "results.json"
FORMAT = 2  # the version of results.json
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
"""The metrics whose curves are always kept, besides those of the experiment's plots."""
FINAL_METRICS = {
    "length": "rollout/response_tokens_mean",
    "truncated": "rollout/truncated_fraction",
    "entropy": "rollout/entropy_estimate",
}
"""The columns of the table that show the mean of a metric over a run's last steps."""
_DIGITS = 6  # significant digits of the values of a curve
_LIST_OF_VALUES = re.compile(r"\[[^\[\]{}]*\]")


@dataclass(frozen=True)
class Results:
    """The results of an experiment."""

    facts: Mapping[str, Any]  # the content of results.json without the table

    @property
    def panels(self) -> list[Panel]:
        plots = self.facts["experiment"]["plots"]
        panels = []
        for plot in plots:
            windows = tuple(map(tuple, plot.get("windows", ())))
            panels.append(Panel(**{**plot, "windows": windows}))
        return panels

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions; one empty name where there are none."""
        return [condition["name"] for condition in self.facts["experiment"]["conditions"]]

    @property
    def variants(self) -> list[dict[str, Any]]:
        """The rows: name, inherited row, own options."""
        return list(self.facts["experiment"]["variants"])

    def runs(self, condition: str, variant: str) -> list[dict[str, Any]]:
        """Return the facts of a row's runs."""
        return [
            run
            for run in self.facts["runs"]
            if (run["condition"], run["variant"]) == (condition, variant)
        ]

    def is_binary(self, condition: str) -> bool:
        """Return True if evaluations have accuracies, False for mean scores."""
        runs = [run for run in self.facts["runs"] if run["condition"] == condition]
        if not all(run.get("is_binary", True) for run in runs):
            return False
        curves = [run["curve"].get(ACCURACY, ()) for run in runs]
        return all(value is None or 0 <= value <= 1 for curve in curves for value in curve)

    def finished(self, condition: str, variant: str) -> dict[int, dict[str, Any]]:
        """Return the facts of a row's finished runs, by seed."""
        return {
            run["seed"]: run
            for run in self.runs(condition, variant)
            if run["accuracies"] is not None
        }


def collect(
    experiment: Experiment, folder: Path, failures: Mapping[str, str] | None = None
) -> Results:
    """Collect results of finished and unfinished runs; `failures` has reasons by run name.

    Raises DataError if metrics are damaged, or if runs of one condition were evaluated on different
    problems.
    """
    plotted = [panel.metric for panel in experiment.panels if panel.metric != ACCURACY]
    metrics = tuple(dict.fromkeys([*KEPT_METRICS, *plotted]))
    runs = []
    problems = dict[str, list[str]]()
    for run in experiment.runs():
        facts, accuracies = _read_run(run, folder / "runs" / run.name, metrics)
        reason = (failures or {}).get(run.name)
        if reason is not None and facts["state"] not in ENDED:
            facts |= {"state": "failed", "reason": reason}
        if accuracies is not None:
            ids = problems.setdefault(run.condition, sorted(accuracies))
            if sorted(accuracies) != ids:
                raise DataError(
                    f"{run.describe()} was evaluated on different problems than the runs before it"
                )
            facts["accuracies"] = [accuracies[name] for name in ids]
        runs.append(facts)
    return Results(
        {
            "format": FORMAT,
            "experiment": describe_experiment(experiment),
            "made_with": {
                "dapo": dapo.__version__,
                "packages": package_versions(),
                "processor": cpu_model(),
            },
            "problems": problems,
            "runs": runs,
        }
    )


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment as JSON values, without paths of this machine."""
    return {
        "name": experiment.name,
        "base": experiment.base.name,
        "seeds": list(experiment.seeds),
        "set": list(experiment.shared),
        "conditions": [
            {"name": entry.name, "set": list(entry.own)} for entry in experiment.conditions
        ],
        "variants": [
            {
                "name": entry.name,
                "inherits": entry.inherits,
                "set": list(entry.own),
                "previous": experiment.predecessor(entry),
            }
            for entry in experiment.variants
        ],
        "baseline": experiment.baseline,
        "plots": [
            {key: value for key, value in asdict(panel).items() if value}
            for panel in experiment.panels
        ],
    }


def steps_at_the_end(steps: int) -> int:
    """Return how many last steps a final metric averages: a tenth, at least one."""
    return max(1, ceil(steps / 10))


def write_results(results: Results, table: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write results.json, with the table, into a folder."""
    text = to_json({**results.facts, "table": table}, indent=2)
    # one line for a list of 300 accuracies, not 300; JSON strings never contain raw line breaks
    lines = _LIST_OF_VALUES.sub(lambda match: re.sub(r"\n\s*", "", match[0]), text)
    atomic_write_text(folder / RESULTS_JSON, lines + "\n")


def read_results(folder: Path) -> Results:
    """Read results.json of a folder.

    Raises DataError if it is missing, damaged or of another version.
    """
    path = folder / RESULTS_JSON
    try:
        facts = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path} ({error}); expected the results that dapo ablate writes"
        ) from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise DataError(
            f"{path} was written by another version of dapo ablate; write it again from the runs"
        )
    return Results({name: value for name, value in facts.items() if name != "table"})


def merge(parts: Sequence[Results]) -> Results:
    """Merge the results of one experiment whose seeds were run in several places.

    The experiments must be equal except for their seeds; results cannot show whether they began
    with the same weights. If several parts contain a run, the one that has ended counts. Raises
    DataError if experiments or evaluated problems differ, or if a run has ended in several parts.
    """
    first = parts[0].facts
    problems: dict[str, list[str]] = {}
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    for facts in (part.facts for part in parts):
        for name in ("base", "set", "conditions", "variants", "baseline"):
            if facts["experiment"][name] != first["experiment"][name]:
                raise DataError(
                    f"results of different experiments cannot be merged: `{name}` differs"
                )
        for condition, ids in facts["problems"].items():
            if problems.setdefault(condition, ids) != ids:
                raise DataError(
                    "results that were evaluated on different problems cannot be merged"
                )
        for run in facts["runs"]:
            key = (run["condition"], run["variant"], run["seed"])
            has_ended = run["state"] in ENDED
            if key in runs and has_ended and runs[key]["state"] in ENDED:
                raise DataError(
                    f"{run['variant']}, seed {run['seed']}, has ended in two of the folders:"
                    " remove one"
                )
            if key not in runs or has_ended:
                runs[key] = run
    seeds = sorted({seed for part in parts for seed in part.facts["experiment"]["seeds"]})
    made_with = [part.facts["made_with"] for part in parts]
    packages = {
        name: _joined(versions["packages"].get(name) for versions in made_with)
        for name in made_with[0]["packages"]
    }
    return Results(
        {
            **first,
            "experiment": {**first["experiment"], "seeds": seeds},
            "made_with": {
                "dapo": _joined(versions["dapo"] for versions in made_with),
                "processor": _joined(versions["processor"] for versions in made_with),
                "packages": packages,
            },
            "problems": problems,
            "runs": sorted(runs.values(), key=lambda run: run["seed"]),
        }
    )


def _joined(values: Iterator[str | None]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _read_run(
    entry: PlannedRun, path: Path, metrics: Sequence[str]
) -> tuple[dict[str, Any], dict[str, float | None] | None]:
    """Return the facts of a run, and its accuracies by problem or None."""
    facts: dict[str, Any] = {
        "condition": entry.condition,
        "variant": entry.variant,
        "seed": entry.seed,
        "state": "not started",
        "reason": None,
        "accuracies": None,
        "curve": {},
    }
    if not RunDirectory.is_run(path):
        return facts, None
    run = RunDirectory.open(path)
    reason = run.exit_reason()
    rows = metrics_by_step(run.metrics)
    evaluations = {}
    for step in (0, max(rows, default=0)):
        file = run.eval(step)
        evaluation = read_evaluation(file) if file.is_file() else None
        if evaluation:
            evaluations[step] = evaluation
    name = next((evaluation["name"] for evaluation in evaluations.values()), None)
    facts |= {"reason": reason, "curve": _curve(rows, name, metrics)}
    if reason not in ENDED:
        is_stopped = reason is None or end_state(reason) == "stopped"
        return facts | {"state": "unfinished" if is_stopped else "failed"}, None
    facts |= {"state": reason} | _figures(rows, facts["curve"], evaluations, entry.config)
    last = max(evaluations, default=0)
    if last == 0:
        return facts, None
    facts["is_binary"] = bool(evaluations[last]["binary"])
    return facts, {row["id"]: row["accuracy"] for row in evaluations[last]["table"]}


def _figures(
    rows: Mapping[int, Mapping[str, Any]],
    curve: Mapping[str, Sequence[Any]],
    evaluations: Mapping[int, Mapping[str, Any]],
    config: Config,
) -> dict[str, Any]:
    """Return the table's numbers of a finished run."""
    steps = sorted(step for step in rows if step > 0)
    last = [rows[step] for step in steps[-steps_at_the_end(len(steps)) :]]
    minibatches = sum(
        ceil(rows[step].get("rollout/groups_trained", 0) / config.train.minibatch_groups)
        for step in steps
    )
    updates = config.train.passes_per_step * minibatches
    skipped = sum(rows[step].get("optim/skipped") or 0 for step in steps)
    figures = {
        "steps": len(steps),
        "tokens": curve["tokens"][-1] if curve else 0,
        "seconds": curve["seconds"][-1] if curve else 0.0,
        "accuracy_before": evaluations[0]["accuracy"] if 0 in evaluations else None,
        "accuracy": None,
        "samples_per_problem": None,
    }
    final = max(evaluations, default=0)
    if final > 0:
        figures["accuracy"] = evaluations[final]["accuracy"]
        figures["samples_per_problem"] = evaluations[final]["samples_per_problem"]
    for name, metric in FINAL_METRICS.items():
        figures[name] = _mean([row.get(metric) for row in last])
    figures["updates"] = updates
    figures["skipped"] = skipped / updates if updates else None
    return figures


def _curve(
    rows: Mapping[int, Mapping[str, Any]], evaluation: str | None, metrics: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the columns of a run's curve; a metric without a value in the run has none."""
    tokens = 0
    seconds = 0.0
    columns: dict[str, list[Any]] = {}
    for step, row in sorted(rows.items()):
        tokens += int(row.get("rollout/tokens_generated") or 0)
        values = {name: value for name, value in row.items() if value is not None}
        step_s = training_seconds(values)
        if step > 0 and isfinite(step_s):
            seconds += step_s
        accuracy = row.get(f"eval/{evaluation}/accuracy")
        if step > 0 or accuracy is not None:
            point = {"step": step, "tokens": tokens, "seconds": seconds, ACCURACY: accuracy}
            point |= {name: row.get(name) for name in metrics}
            for name, value in point.items():
                columns.setdefault(name, []).append(_rounded(value))
    return {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _rounded(value: float | None) -> float | None:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None and isfinite(value)]
    return fmean(numbers) if numbers else None
