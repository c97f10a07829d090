"""`dapo compare`: prints the comparison of runs as tables, or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from dapo.analysis.compare import Comparison, HeldOut, compare_runs
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
    compared = [compare_runs(paths[0], other) for other in paths[1:]]
    if as_json:
        print_json({"comparisons": [asdict(comparison) for comparison in compared]})
        return
    console = SafeConsole()
    if len(compared) == 1:
        _print_pair(console, compared[0], by_step=by_step)
    else:
        console.print(_overview(compared))


def _print_pair(console: SafeConsole, found: Comparison, *, by_step: bool) -> None:
    for name, run in (("a", found.a), ("b", found.b)):
        origin = ""
        if run.fork is not None:
            branch = "" if run.fork["branch"] is None else f", branch {run.fork['branch']}"
            origin = f", forked from {run.fork['parent']} at step {run.fork['step']}{branch}"
        console.print(
            printable(f"{name}  {run.path}: {run.steps} steps, seed {run.seed}{origin}"),
            soft_wrap=True,
        )
    console.print(_aligned(found), soft_wrap=True)
    if found.options:
        console.print(_options(found))
    if not found.steps and found.equal_up_to:
        return
    if found.held_out:
        console.print(_held_out(found))
    if found.steps:
        console.print(_curves(found))
        console.print(_costs(found))
        if by_step:
            console.print(_by_step(found))
    console.print(LEGEND, soft_wrap=True)
    for note in found.notes:
        console.print(note, soft_wrap=True)


def _aligned(found: Comparison) -> str:
    last = min(found.a.steps, found.b.steps)
    if not found.steps:
        return f"equal in all {last} common steps" if last else "no common step"
    shared = (
        f"equal up to step {found.equal_up_to}"
        if found.equal_up_to
        else "different from the first step on"
    )
    return f"{shared}; compared below: steps {found.steps[0]} to {found.steps[-1]}"


def _table(title: str, *names: str) -> Table:
    # only the first column, with names, wraps
    return ruled_table(Column(names[0], overflow="fold"), *names[1:], title=title, **TITLE)


def _options(found: Comparison) -> Table:
    table = _table("Options that differ", "", "a", "b")
    for name, values in found.options.items():
        table.add_row(*(printable(each) for each in (name, *map(option_text, values))))
    return table


def _held_out(found: Comparison) -> Table:
    any_of = next(iter(found.held_out.values()))
    draws = f"{'same' if any_of.shares_draws else 'different'} random numbers"
    unit = "accuracy" if any_of.is_binary else "score"
    quantity = "Accuracy in %" if any_of.is_binary else "Mean score"
    title = f"{quantity} on {any_of.difference['pairs']} held-out problems, {draws}"
    table = _table(title, "evaluation (steps)", "a", "b", *DIFFERENCE, "better/worse", RATIO)
    for kind, each in found.held_out.items():
        accuracies = [_number(accuracy, unit) for accuracy in (each.accuracy_a, each.accuracy_b)]
        cells = (
            *accuracies,
            *_interval(each.difference, unit),
            f"{each.better}/{each.worse}",
            _ratio(each.difference),
        )
        table.add_row(f"{kind} ({each.step_a}, {each.step_b})", *cells)
    return table


def _curves(found: Comparison) -> Table:
    title = (
        f"Training, mean of steps {found.steps[0]} to {found.steps[-1]} (differences: of problems"
        " sampled in both)"
    )
    table = _table(title, "", "a", "b", *DIFFERENCE, "pairs", RATIO)
    for name, curve in found.curves.items():
        means = [_mean(values, name) for values in (curve.a, curve.b)]
        if means != ["", ""]:
            interval = _interval(curve.mean, name)
            table.add_row(
                UNITS[name], *means, *interval, str(curve.mean["pairs"]), _ratio(curve.mean)
            )
    return table


def _costs(found: Comparison) -> Table:
    table = _table(
        f"Cost of steps {found.steps[0]} to {found.steps[-1]}", "", "a", "b", "b / a - 1"
    )
    for name, (a, b) in found.costs.items():
        shown = [f"{value:,.1f}" if name == "seconds" else f"{value:,.0f}" for value in (a, b)]
        table.add_row(name.replace("_", " "), *shown, f"{b / a - 1:+.1%}" if a else "")
    return table


def _by_step(found: Comparison) -> Table:
    table = _table("b - a by step, with half of the 95 % interval", "step", *UNITS.values())
    for i, step in enumerate(found.steps):
        cells = [_plus_minus(curve.differences[i], name) for name, curve in found.curves.items()]
        table.add_row(str(step), *cells)
    return table


def _overview(compared: Sequence[Comparison]) -> Table:
    """One line per run; differences are to the first."""
    a = compared[0].a
    final = next((each.held_out["final"] for each in compared if "final" in each.held_out), None)
    unit = "accuracy" if final is None or final.is_binary else "score"
    label = "accuracy, %" if unit == "accuracy" else "mean score"
    title = f"Last evaluation, compared with a = {printable(a.path)}"
    table = _table(title, "b", "equal up to", label, *DIFFERENCE, RATIO)
    table.add_row(
        printable(a.path), "", "" if final is None else _number(final.accuracy_a, unit), "", "", ""
    )
    for each in compared:
        held_out: HeldOut | None = each.held_out.get("final")
        cells = [""] * 4
        if held_out is not None:
            difference = held_out.difference
            cells = [
                _number(held_out.accuracy_b, unit),
                *_interval(difference, unit),
                _ratio(difference),
            ]
        table.add_row(printable(each.b.path), f"step {each.equal_up_to}", *cells)
    return table


def _interval(found: Mapping[str, Any], name: str) -> tuple[str, str]:
    difference, low, high = (
        _number(found[key], name, sign="+") for key in ("difference", "low", "high")
    )
    return difference, f"{low} to {high}" if low else ""


def _plus_minus(found: Mapping[str, Any], name: str) -> str:
    difference = _number(found["difference"], name, sign="+")
    if found["low"] is None:
        return difference
    return f"{difference} ± {_number((found['high'] - found['low']) / 2, name)}"


def _number(value: float | None, name: str, *, sign: str = "") -> str:
    """A value of a curve, in its unit; empty for None."""
    scale, digits = {"accuracy": (100, 1), "length": (1, 1)}.get(name, (1, 3))
    return number(None if value is None else scale * value, f"{sign}.{digits}f")


def _ratio(found: Mapping[str, Any]) -> str:
    ratio = found["variance_ratio"]
    if ratio is None:
        return ""
    if ratio < 100:
        return f"{ratio:.1f}"
    return f"{ratio:,.0f}"


def _mean(values: Sequence[float | None], name: str) -> str:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known), name) if known else ""
