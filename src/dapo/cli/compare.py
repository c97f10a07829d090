"""`dapo compare`: prints the comparison of runs as tables, or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from dapo.analysis.compare import Comparison, Curve, RunFacts, compare_runs
from dapo.cli.formatting import TITLE, number, ruled_table
from dapo.config.option_fields import option_text
from dapo.core.terminal import print_json, printable
from dapo.runs.console import SafeConsole

DIFFERENCE = ("b - a", "95 % interval")
RATIO = "ratio"
LEGEND = (
    f"{RATIO}: variance of the difference without pairing, over its variance with pairing; without"
    " pairing, the same interval needs this many times the problems"
)
UNITS = {
    "reward": "reward",
    "accuracy": "accuracy, %",
    "entropy": "entropy, nats",
    "length": "length, tokens",
}


def print_comparisons(paths: Sequence[Path], *, by_step: bool, as_json: bool) -> None:
    """Compare the first run with each other run; print tables, or one JSON object."""
    comparisons = [compare_runs(paths[0], path) for path in paths[1:]]
    if as_json:
        print_json({"comparisons": [asdict(comparison) for comparison in comparisons]})
        return
    console = SafeConsole()
    if len(comparisons) == 1:
        _print_pair(console, comparisons[0], by_step=by_step)
    else:
        console.print(_overview(comparisons))


def _print_pair(console: SafeConsole, comparison: Comparison, *, by_step: bool) -> None:
    console.print(printable(f"a  {_describe_run(comparison.a)}"), soft_wrap=True)
    console.print(printable(f"b  {_describe_run(comparison.b)}"), soft_wrap=True)
    console.print(_aligned(comparison), soft_wrap=True)
    if comparison.options:
        console.print(_options(comparison))
    if not comparison.steps and comparison.equal_up_to:
        return
    if comparison.held_out:
        console.print(_held_out(comparison))
    if comparison.steps:
        console.print(_curves(comparison))
        console.print(_costs(comparison))
        if by_step:
            console.print(_by_step(comparison))
    console.print(LEGEND, soft_wrap=True)
    for note in comparison.notes:
        console.print(note, soft_wrap=True)


def _describe_run(run: RunFacts) -> str:
    text = f"{run.path}: {run.steps} steps, seed {run.seed}"
    if run.fork is None:
        return text
    text += f", forked from {run.fork['parent']} at step {run.fork['step']}"
    if run.fork["branch"] is not None:
        text += f", branch {run.fork['branch']}"
    return text


def _aligned(comparison: Comparison) -> str:
    """Say from which step on the runs differ."""
    last = min(comparison.a.steps, comparison.b.steps)
    if not comparison.steps:
        return f"equal in all {last} common steps" if last else "no common step"
    if comparison.equal_up_to:
        shared = f"equal up to step {comparison.equal_up_to}"
    else:
        shared = "different from the first step on"
    return f"{shared}; compared below: steps {comparison.steps[0]} to {comparison.steps[-1]}"


def _table(title: str, *names: str) -> Table:
    # only the first column, with names, wraps
    return ruled_table(Column(names[0], overflow="fold"), *names[1:], title=title, **TITLE)


def _options(comparison: Comparison) -> Table:
    table = _table("Options that differ", "", "a", "b")
    for name, values in comparison.options.items():
        table.add_row(*(printable(text) for text in (name, *map(option_text, values))))
    return table


def _held_out(comparison: Comparison) -> Table:
    example = next(iter(comparison.held_out.values()))
    draws = "same" if example.shares_draws else "different"
    unit = "accuracy" if example.is_binary else "score"
    quantity = "Accuracy in %" if example.is_binary else "Mean score"
    title = f"{quantity} on {example.difference['pairs']} held-out problems, {draws} random numbers"
    table = _table(title, "evaluation (steps)", "a", "b", *DIFFERENCE, "better/worse", RATIO)
    for kind, evaluation in comparison.held_out.items():
        table.add_row(
            f"{kind} ({evaluation.step_a}, {evaluation.step_b})",
            _number(evaluation.accuracy_a, unit),
            _number(evaluation.accuracy_b, unit),
            *_interval(evaluation.difference, unit),
            f"{evaluation.better}/{evaluation.worse}",
            _ratio(evaluation.difference),
        )
    return table


def _curves(comparison: Comparison) -> Table:
    title = (
        f"Training, mean of steps {comparison.steps[0]} to {comparison.steps[-1]} (differences:"
        " of problems sampled in both)"
    )
    table = _table(title, "", "a", "b", *DIFFERENCE, "pairs", RATIO)
    for name, curve in _logged_curves(comparison).items():
        mean_a = _mean(curve.a, name)
        mean_b = _mean(curve.b, name)
        if not mean_a and not mean_b:
            continue
        table.add_row(
            UNITS[name],
            mean_a,
            mean_b,
            *_interval(curve.mean, name),
            str(curve.mean["pairs"]),
            _ratio(curve.mean),
        )
    return table


def _logged_curves(comparison: Comparison) -> dict[str, Curve]:
    """Return the curves that a run has logged; a verifier of scores has no accuracy."""
    return {
        name: curve
        for name, curve in comparison.curves.items()
        if any(_mean(values, name) for values in (curve.a, curve.b))
    }


def _costs(comparison: Comparison) -> Table:
    table = _table(
        f"Cost of steps {comparison.steps[0]} to {comparison.steps[-1]}", "", "a", "b", "b / a - 1"
    )
    for name, (a, b) in comparison.costs.items():
        style = ",.1f" if name == "seconds" else ",.0f"
        change = f"{b / a - 1:+.1%}" if a else ""
        table.add_row(name.replace("_", " "), f"{a:{style}}", f"{b:{style}}", change)
    return table


def _by_step(comparison: Comparison) -> Table:
    curves = _logged_curves(comparison)
    units = [UNITS[name] for name in curves]
    table = _table("b - a by step, with half of the 95 % interval", "step", *units)
    for i, step in enumerate(comparison.steps):
        cells = [_plus_minus(curve.differences[i], name) for name, curve in curves.items()]
        table.add_row(str(step), *cells)
    return table


def _overview(comparisons: Sequence[Comparison]) -> Table:
    """Make a line per run; differences are to the first."""
    path = printable(comparisons[0].a.path)
    evaluations = [comparison.held_out.get("final") for comparison in comparisons]
    final = next((evaluation for evaluation in evaluations if evaluation is not None), None)
    unit = "accuracy"
    label = "accuracy, %"
    accuracy = ""
    if final is not None:
        if not final.is_binary:
            unit = "score"
            label = "mean score"
        accuracy = _number(final.accuracy_a, unit)
    title = f"Last evaluation, compared with a = {path}"
    table = _table(title, "b", "equal up to", label, *DIFFERENCE, RATIO)
    table.add_row(path, "", accuracy, "", "", "")
    for comparison, evaluation in zip(comparisons, evaluations, strict=True):
        cells = ["", "", "", ""]
        if evaluation is not None:
            cells = [
                _number(evaluation.accuracy_b, unit),
                *_interval(evaluation.difference, unit),
                _ratio(evaluation.difference),
            ]
        table.add_row(printable(comparison.b.path), f"step {comparison.equal_up_to}", *cells)
    return table


def _interval(estimate: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a difference and its 95 % interval."""
    difference = _number(estimate["difference"], name, sign="+")
    if estimate["low"] is None:
        return difference, ""
    low = _number(estimate["low"], name, sign="+")
    high = _number(estimate["high"], name, sign="+")
    return difference, f"{low} to {high}"


def _plus_minus(estimate: Mapping[str, Any], name: str) -> str:
    difference = _number(estimate["difference"], name, sign="+")
    if estimate["low"] is None:
        return difference
    half = (estimate["high"] - estimate["low"]) / 2
    return f"{difference} ± {_number(half, name)}"


def _number(value: float | None, name: str, *, sign: str = "") -> str:
    """Return a value of a curve, in its unit; empty for None."""
    if value is not None and name == "accuracy":
        value = 100 * value
    digits = 1 if name in ("accuracy", "length") else 3
    return number(value, f"{sign}.{digits}f")


def _ratio(estimate: Mapping[str, Any]) -> str:
    ratio = estimate["variance_ratio"]
    if ratio is None:
        return ""
    if ratio < 100:
        return f"{ratio:.1f}"
    return f"{ratio:,.0f}"


def _mean(values: Sequence[float | None], name: str) -> str:
    numbers = [value for value in values if value is not None]
    return _number(sum(numbers) / len(numbers), name) if numbers else ""
