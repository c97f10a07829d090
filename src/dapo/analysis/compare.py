"""Compares two runs: options, accuracy on held-out problems, training curves, tokens and seconds.

All differences are b - a and paired by problem. If both runs also sampled with the same random
numbers, as forks of one run do, the pairing removes most of the chance of sampling as well
(`evaluation/pairing.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dapo.config.option_entries import option_differences
from dapo.core.errors import DataError
from dapo.evaluation.pairing import (
    Paired,
    mean_over_steps,
    paired_difference,
    paired_problems,
    who_is_better,
)
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import first_and_last_evaluation, read_evaluation
from dapo.runs.manifest import Fork, describe_changes
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.rollout_table import CURVES, problem_means
from dapo.runs.stored_config import load_run_config, option_changes

CURVE_METRICS = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "entropy": "loss/entropy",
    "length": "rollout/response_tokens_mean",
}
"""The name of each curve's metric in metrics.jsonl."""
COSTS = {
    "tokens_generated": "rollout/tokens_generated",
    "tokens_trained": "rollout/tokens_in_minibatches",
    "seconds": "time/step_s",
}


DECIDING_OPTIONS = ("reward.verifier", "reward.options", "reward.threshold")
"""The options by which an equal response gets another reward, so that rewards do not compare."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about one of the runs."""

    path: str
    steps: int
    seed: int
    exit_reason: str | None  # reason for its end; None while it trains
    # parent, step, branch and changed options of a fork; None for another run
    fork: Mapping[str, Any] | None


@dataclass(frozen=True)
class HeldOut:
    """The accuracies of two evaluations of the same problems, and their paired difference."""

    step_a: int
    step_b: int
    accuracy_a: float | None
    accuracy_b: float | None
    difference: Mapping[str, Any]  # A `Paired` as JSON values
    better: int  # number of problems on which b is better
    worse: int
    is_binary: bool  # whether the verifier decides right or wrong; otherwise accuracies are scores
    # whether the i-th responses to a problem were sampled with the same random numbers
    shares_draws: bool


@dataclass(frozen=True)
class Curve:
    """One metric of both runs by step, and its difference over the problems of both."""

    a: Sequence[float | None]
    b: Sequence[float | None]
    differences: Sequence[Mapping[str, Any]]
    """A `Paired` per step; without pairs if a run has no table of the step's responses."""
    # the mean difference over these steps, a `Paired`; `pairs` counts the pairs of all steps
    mean: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The comparison that `dapo compare` reports; `asdict` of it is JSON."""

    a: RunFacts
    b: RunFacts
    equal_up_to: int  # the last step up to which all metrics except times are equal
    options: Mapping[str, Sequence[Any]]  # the options that differ, with the values in a and b
    steps: Sequence[int]  # the steps after `equal_up_to` that both runs have made
    held_out: Mapping[str, HeldOut]
    """`final`: after the last evaluation of each run; `best`: after the most accurate one of each.
    """
    curves: Mapping[str, Curve]
    costs: Mapping[str, Sequence[float]]  # tokens and seconds of `steps`, in a and in b
    notes: Sequence[str]  # the comparisons that could not be made, and why
    without_final: str  # why `held_out` has no `final`; empty if it has


def compare_runs(a: str | Path, b: str | Path) -> Comparison:
    """Compare two run directories, finished or not.

    Raises CheckpointError for no run, DataError for a damaged file.
    """
    runs = (RunDirectory.open(a), RunDirectory.open(b))
    notes: list[str] = []
    configs = [load_run_config(run) for run in runs]
    metrics = [metrics_by_step(run.metrics) for run in runs]
    equal = equal_steps(*metrics)
    steps = sorted(step for step in metrics[0].keys() & metrics[1].keys() if step > equal)
    for run in runs:
        for change in option_changes(run):
            options = describe_changes(change["options"])
            notes.append(f"{run.path} changed options after step {change['after_step']}: {options}")
    facts_a, facts_b = (
        _facts_of(run, rows, config.train.seed)
        for run, rows, config in zip(runs, metrics, configs, strict=True)
    )
    held_out, without_final = _held_out(runs, metrics, notes)
    return Comparison(
        a=facts_a,
        b=facts_b,
        equal_up_to=equal,
        options=option_differences(*configs),
        steps=steps,
        held_out=held_out,
        curves=_curves(runs, metrics, steps, notes),
        costs={
            name: [sum(rows[step].get(metric) or 0 for step in steps) for rows in metrics]
            for name, metric in COSTS.items()
        },
        notes=notes,
        without_final=without_final,
    )


def _facts_of(run: RunDirectory, rows: Mapping[int, Mapping[str, Any]], seed: int) -> RunFacts:
    fork = Fork.of(run)
    return RunFacts(
        path=str(run.path),
        steps=max(rows, default=0),
        seed=seed,
        exit_reason=run.exit_reason(),
        fork=None if fork is None else asdict(fork),
    )


def equal_steps(a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the last step up to which all metrics except times are equal; 0 if none."""
    step = 1
    while step in a and step in b and _without_times(a[step]) == _without_times(b[step]):
        step += 1
    return step - 1


def final_evaluation(run: RunDirectory) -> dict[str, Any] | None:
    """Return the last readable evaluation of a run; None without one."""
    return next(iter(reversed(first_and_last_evaluation(run))), None)


def _without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("time/")}


def _held_out(
    runs: Sequence[RunDirectory],
    metrics: Sequence[Mapping[int, Mapping[str, Any]]],
    notes: list[str],
) -> tuple[dict[str, HeldOut], str]:
    """Compare the last and the best evaluations of the runs, if they have any.

    Returns the comparisons, and why the last evaluations are not compared.
    """
    last = [final_evaluation(run) for run in runs]
    if last[0] is None or last[1] is None:
        notes.append(
            "no comparison on held-out problems: a run has no evaluation (data.eval,"
            " train.eval_every)"
        )
        return {}, "a run has no evaluation"
    pairs = {"final": [last[0], last[1]]}
    best = [
        _best(run, rows, evaluation["name"])
        for run, rows, evaluation in zip(runs, metrics, pairs["final"], strict=True)
    ]
    if best[0] is not None and best[1] is not None:
        pairs["best"] = [best[0], best[1]]
    compared: dict[str, HeldOut] = {}
    reasons: dict[str, str] = {}
    for kind, (first, second) in pairs.items():
        try:
            compared[kind] = compare_evaluations(first, second)
        except DataError as error:
            reasons[kind] = str(error)
            notes.append(f"the {kind} evaluations on held-out problems cannot be compared: {error}")
    return compared, reasons.get("final", "")


def _best(
    run: RunDirectory, rows: Mapping[int, Mapping[str, Any]], name: str
) -> dict[str, Any] | None:
    """Return the most accurate evaluation of a run, the earliest of equals."""
    metric = f"eval/{name}/accuracy"
    evaluated = [step for step, row in rows.items() if row.get(metric) is not None]
    evaluated.sort(key=lambda step: (-rows[step][metric], step))
    for step in evaluated:
        evaluation = read_evaluation(run.eval(step))
        if evaluation:
            return evaluation
    return None


def compare_evaluations(a: Mapping[str, Any], b: Mapping[str, Any]) -> HeldOut:
    """Pair two evaluations of runs. Raises DataError if their settings or problems differ."""
    difference = paired_difference(a, b)
    return HeldOut(
        step_a=a["step"],
        step_b=b["step"],
        accuracy_a=a["accuracy"],
        accuracy_b=b["accuracy"],
        difference=difference,
        better=difference["better"],
        worse=difference["worse"],
        is_binary=bool(a["binary"]),
        shares_draws=a.get("seed") == b.get("seed"),
    )


def _curves(
    runs: Sequence[RunDirectory],
    metrics: Sequence[Mapping[int, Mapping[str, Any]]],
    steps: Sequence[int],
    notes: list[str],
) -> dict[str, Curve]:
    by_step: list[dict[str, Paired]] = []
    num_unpaired = 0
    for step in steps:
        tables = [run.rollouts(step) for run in runs]
        if all(table.is_file() for table in tables):
            a, b = (problem_means(table) for table in tables)
            by_step.append({name: paired_problems(a[name], b[name]) for name in CURVES})
        else:
            num_unpaired += 1
            by_step.append({name: Paired(None, None, None, 0, 0.0, 0.0) for name in CURVES})
    if num_unpaired:
        notes.append(
            f"{num_unpaired} of {len(steps)} steps are not paired: a run keeps no judged responses"
            " (log.rollouts)"
        )
    return {
        name: Curve(
            a=[metrics[0][step].get(CURVE_METRICS[name]) for step in steps],
            b=[metrics[1][step].get(CURVE_METRICS[name]) for step in steps],
            differences=[pairings[name].as_json() for pairings in by_step],
            mean=mean_over_steps([pairings[name] for pairings in by_step]).as_json(),
        )
        for name in CURVES
    }


# --- the result in words


def verdict(comparison: Comparison) -> str:
    """Say which run is better: on held-out problems, else in training, with the difference."""
    last = min(comparison.a.steps, comparison.b.steps)
    if not comparison.steps and comparison.equal_up_to:
        return f"equal in all {last} common steps"
    final = _final_with_pairs(comparison)
    if final is not None:
        return f"{who_is_better(final.difference)}: {_final_accuracies(final)}"
    reason = f"; held-out problems are not compared: {comparison.without_final or 'none in common'}"
    for name, curve in logged_curves(comparison).items():
        if name in ("accuracy", "reward") and curve.mean["difference"] is not None:
            differing = [
                option
                for option in comparison.options
                if any(f"{option}.".startswith(f"{deciding}.") for deciding in DECIDING_OPTIONS)
            ]
            if differing:
                return f"undecided: the runs differ in {' and '.join(differing)}{reason}"
            better = who_is_better(curve.mean)
            in_training = f"in training {name}, {_paired(curve.mean, name)}"
            return f"{better}: {in_training}{reason}"
    if comparison.without_final:
        return f"undecided: no training problems in common{reason}"
    return "undecided: the runs have no evaluations or training problems in common"


def _final_with_pairs(comparison: Comparison) -> HeldOut | None:
    """Return the comparison of the last evaluations; None if no problem has a verdict in both."""
    final = comparison.held_out.get("final")
    return final if final is not None and final.difference["pairs"] else None


def best_of(comparisons: Sequence[Comparison]) -> str:
    """Name the run whose last evaluation is the most above that of the first run.

    It is the best if it is significantly above each other run, too.
    """
    better = []
    is_evaluated = False
    for comparison in comparisons:
        final = _final_with_pairs(comparison)
        if final is None:
            continue
        is_evaluated = True
        if _is_above_zero(final.difference):
            better.append((final.difference["difference"], comparison.b.path, final))
    first = comparisons[0].a.path
    if not is_evaluated:
        return f"undecided: no run has an evaluation of the same problems as {first}"
    if not better:
        return f"no run is significantly better than {first}"
    _, path, final = max(better, key=lambda entry: entry[0])
    others = []
    for comparison in comparisons:
        other = comparison.b.path
        # one that cannot be compared may be better
        if other != path and not _is_better(path, other):
            others.append(other)
    if others:
        undecided = f"no difference to {' or '.join(others)} can be told"
        return f"{path} is highest; {undecided}: {_final_accuracies(final)}"
    return f"{path} is best: {_final_accuracies(final)}"


def _is_better(path: str, other: str) -> bool:
    """Return True if the last evaluation of a run is significantly above that of another one."""
    evaluations = [final_evaluation(RunDirectory.open(run)) for run in (other, path)]
    if evaluations[0] is None or evaluations[1] is None:
        return False
    try:
        held_out = compare_evaluations(evaluations[0], evaluations[1])
    except DataError:
        return False
    return _is_above_zero(held_out.difference)


def _is_above_zero(difference: Mapping[str, Any]) -> bool:
    return difference["low"] is not None and difference["low"] > 0


def _final_accuracies(final: HeldOut) -> str:
    """Return both accuracies, or mean scores, and their paired difference."""
    name, label, unit = "score", "mean score", ""
    if final.is_binary:
        name, label, unit = "accuracy", "accuracy", " %"
    accuracy_a = value_text(final.accuracy_a, name)
    accuracy_b = value_text(final.accuracy_b, name)
    return f"{label} {accuracy_a} and {accuracy_b}{unit}, {_paired(final.difference, name)}"


def _paired(estimate: Mapping[str, Any], name: str) -> str:
    """Return a paired difference, its interval and the number of pairs."""
    difference, interval = interval_texts(estimate, name)
    text = f"b - a {difference or 'unknown'}"
    if interval:
        text += f" (95 % interval {interval})"
    return f"{text}, {estimate['pairs']:,} pairs"


def logged_curves(comparison: Comparison) -> dict[str, Curve]:
    """Return the curves that a run has logged; a verifier of scores has no accuracy."""
    return {
        name: curve
        for name, curve in comparison.curves.items()
        if any(mean_text(values, name) for values in (curve.a, curve.b))
    }


def interval_texts(estimate: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a difference and its 95 % interval; empty for what is unknown."""
    difference = value_text(estimate["difference"], name, sign="+")
    if estimate["low"] is None:
        return difference, ""
    low = value_text(estimate["low"], name, sign="+")
    high = value_text(estimate["high"], name, sign="+")
    return difference, f"{low} to {high}"


def value_text(value: float | None, name: str, *, sign: str = "") -> str:
    """Return a value of a curve, an accuracy in percent; empty for None."""
    if value is None:
        return ""
    if name == "accuracy":
        value = 100 * value
    digits = 1 if name in ("accuracy", "length") else 3
    return f"{value:{sign}.{digits}f}"


def mean_text(values: Sequence[float | None], name: str) -> str:
    """Return the mean of the values that are known; empty without one."""
    numbers = [value for value in values if value is not None]
    return value_text(sum(numbers) / len(numbers), name) if numbers else ""
