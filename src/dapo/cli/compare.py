"""`dapo compare`: prints the comparison of runs as tables, or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from dapo.analysis.compare import Comparison, Curve, HeldOut, compare_runs
from dapo.cli.formatting import TITLE, number, option_text, ruled_table
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
    compared = [compare_runs(paths[0], path) for path in paths[1:]]
    if as_json:
        print_json({"comparisons": [asdict(comparison) for comparison in compared]})
        return
    console = SafeConsole()
    if len(compared) == 1:
        _print_pair(console, compared[0], by_step=by_step)
    else:
        console.print(_overview(compared))


def _print_pair(console: SafeConsole, comparison: Comparison, *, by_step: bool) -> None:
    for name, run in (("a", comparison.a), ("b", comparison.b)):
        origin = ""
        if run.fork is not None:
            branch = "" if run.fork["branch"] is None else f", branch {run.fork['branch']}"
            origin = f", forked from {run.fork['parent']} at step {run.fork['step']}{branch}"
        console.print(
            printable(f"{name}  {run.path}: {run.steps} steps, seed {run.seed}{origin}"),
            soft_wrap=True,
        )
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


def _aligned(comparison: Comparison) -> str:
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
    draws = f"{'same' if example.shares_draws else 'different'} random numbers"
    unit = "accuracy" if example.is_binary else "score"
    quantity = "Accuracy in %" if example.is_binary else "Mean score"
    title = f"{quantity} on {example.difference['pairs']} held-out problems, {draws}"
    table = _table(title, "evaluation (steps)", "a", "b", *DIFFERENCE, "better/worse", RATIO)
    for kind, evaluation in comparison.held_out.items():
        accuracies = [
            _number(accuracy, unit) for accuracy in (evaluation.accuracy_a, evaluation.accuracy_b)
        ]
        cells = (
            *accuracies,
            *_interval(evaluation.difference, unit),
            f"{evaluation.better}/{evaluation.worse}",
            _ratio(evaluation.difference),
        )
        table.add_row(f"{kind} ({evaluation.step_a}, {evaluation.step_b})", *cells)
    return table


def _curves(comparison: Comparison) -> Table:
    title = (
        f"Training, mean of steps {comparison.steps[0]} to {comparison.steps[-1]} (differences:"
        " of problems sampled in both)"
    )
    table = _table(title, "", "a", "b", *DIFFERENCE, "pairs", RATIO)
    for name, curve in _logged_curves(comparison).items():
        means = [_mean(values, name) for values in (curve.a, curve.b)]
        interval = _interval(curve.mean, name)
        table.add_row(UNITS[name], *means, *interval, str(curve.mean["pairs"]), _ratio(curve.mean))
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
        numbers = [f"{value:,.1f}" if name == "seconds" else f"{value:,.0f}" for value in (a, b)]
        table.add_row(name.replace("_", " "), *numbers, f"{b / a - 1:+.1%}" if a else "")
    return table


def _by_step(comparison: Comparison) -> Table:
    curves = _logged_curves(comparison)
    units = [UNITS[name] for name in curves]
    table = _table("b - a by step, with half of the 95 % interval", "step", *units)
    for i, step in enumerate(comparison.steps):
        cells = [_plus_minus(curve.differences[i], name) for name, curve in curves.items()]
        table.add_row(str(step), *cells)
    return table


def _overview(compared: Sequence[Comparison]) -> Table:
    """One line per run; differences are to the first."""
    a = compared[0].a
    final = next(
        (comparison.held_out["final"] for comparison in compared if "final" in comparison.held_out),
        None,
    )
    unit = "accuracy" if final is None or final.is_binary else "score"
    label = "accuracy, %" if unit == "accuracy" else "mean score"
    title = f"Last evaluation, compared with a = {printable(a.path)}"
    table = _table(title, "b", "equal up to", label, *DIFFERENCE, RATIO)
    table.add_row(
        printable(a.path), "", "" if final is None else _number(final.accuracy_a, unit), "", "", ""
    )
    for comparison in compared:
        held_out: HeldOut | None = comparison.held_out.get("final")
        cells = [""] * 4
        if held_out is not None:
            difference = held_out.difference
            cells = [
                _number(held_out.accuracy_b, unit),
                *_interval(difference, unit),
                _ratio(difference),
            ]
        table.add_row(printable(comparison.b.path), f"step {comparison.equal_up_to}", *cells)
    return table


def _interval(estimate: Mapping[str, Any], name: str) -> tuple[str, str]:
    difference, low, high = (
        _number(estimate[key], name, sign="+") for key in ("difference", "low", "high")
    )
    return difference, f"{low} to {high}" if low else ""


def _plus_minus(estimate: Mapping[str, Any], name: str) -> str:
    difference = _number(estimate["difference"], name, sign="+")
    if estimate["low"] is None:
        return difference
    return f"{difference} ± {_number((estimate['high'] - estimate['low']) / 2, name)}"


def _number(value: float | None, name: str, *, sign: str = "") -> str:
    """Return a value of a curve, in its unit; empty for None."""
    scale, digits = {"accuracy": (100, 1), "length": (1, 1)}.get(name, (1, 3))
    return number(None if value is None else scale * value, f"{sign}.{digits}f")


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
