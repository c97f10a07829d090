"""`dapo compare`: prints the comparison of runs as tables, or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from dapo.analysis.compare import (
    Comparison,
    RunFacts,
    best_of,
    compare_runs,
    interval_texts,
    logged_curves,
    mean_text,
    value_text,
    verdict,
)
from dapo.cli.formatting import TITLE, print_ruled, right, ruled_table, say
from dapo.config.option_fields import option_text, options_of
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

MEASURED = "rollout.native.kernels."
"""What a start measures for the shapes of the model's matrices, which nobody writes."""


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
        say(console, best_of(comparisons), style="bold")
        print_ruled(console, _overview(comparisons))
        for comparison in comparisons:
            if "final" not in comparison.held_out:
                for note in comparison.notes:
                    say(console, f"{comparison.b.path}: {note}")


def _print_pair(console: SafeConsole, comparison: Comparison, *, by_step: bool) -> None:
    """Print which run is better, then accuracies, curves and costs, and the options last."""
    say(console, verdict(comparison), style="bold")
    say(console, _describe_run(comparison.a), label="a", indent=3)
    say(console, _describe_run(comparison.b), label="b", indent=3)
    is_equal = bool(not comparison.steps and comparison.equal_up_to)
    if not is_equal:
        say(console, _aligned(comparison))
    if comparison.held_out and not is_equal:
        print_ruled(console, _held_out(comparison))
    if comparison.steps:
        print_ruled(console, _curves(comparison))
        print_ruled(console, _costs(comparison))
        if by_step:
            print_ruled(console, _by_step(comparison))
    estimates = [evaluation.difference for evaluation in comparison.held_out.values()]
    estimates += [curve.mean for curve in comparison.curves.values()]
    if not is_equal and any(map(_ratio, estimates)):
        console.print()
        say(console, LEGEND)
    for note in comparison.notes:
        say(console, note)
    if comparison.options:
        _print_options(console, comparison)


def _describe_run(run: RunFacts) -> str:
    text = f"{run.path}: {run.steps} steps, seed {run.seed}"
    if run.fork is None:
        return text
    text += f", forked from {_from_here(run.fork['parent'])} at step {run.fork['step']}"
    if run.fork["branch"] is not None:
        text += f", branch {run.fork['branch']}"
    return text


def _from_here(path: str) -> Path:
    """Return a path as it is typed in this folder."""
    here = Path.cwd()
    return Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)


def _aligned(comparison: Comparison) -> str:
    """Say from which step on the runs differ."""
    if not comparison.steps:
        return "no common step"
    if comparison.equal_up_to:
        shared = f"equal up to step {comparison.equal_up_to}"
    else:
        shared = "different from the first step on"
    return f"{shared}; compared below: steps {comparison.steps[0]} to {comparison.steps[-1]}"


def _table(title: str, *names: str) -> Table:
    # only the first column, with names, wraps
    return ruled_table(
        Column(names[0], overflow="fold"), *names[1:], title=f"\n{title}", show_edge=False, **TITLE
    )


def _print_options(console: SafeConsole, comparison: Comparison) -> None:
    """Print the options that differ; those that only one of the runs has in a line."""
    everywhere = {name for name, _ in options_of()}
    only: dict[str, list[str]] = {"a": [], "b": []}
    table = Table(
        Column("", no_wrap=True),
        *right("a", "b", overflow="fold"),
        title="\nOptions that differ",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        **TITLE,
    )
    for name, values in comparison.options.items():
        if name.startswith(MEASURED) and None in values:
            continue
        a, b = (printable(option_text(value)) for value in values)
        if name in everywhere or None not in values:
            table.add_row(printable(name), a, b)
        elif values[0] is None:
            only["b"].append(f"{name}={b}")
        else:
            only["a"].append(f"{name}={a}")
    if table.row_count:
        console.print(table)
    for run, entries in only.items():
        if entries:
            say(console, ", ".join(entries), label=f"only {run}", indent=8)


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
            value_text(evaluation.accuracy_a, unit),
            value_text(evaluation.accuracy_b, unit),
            *interval_texts(evaluation.difference, unit),
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
    for name, curve in logged_curves(comparison).items():
        mean_a = mean_text(curve.a, name)
        mean_b = mean_text(curve.b, name)
        if not mean_a and not mean_b:
            continue
        table.add_row(
            UNITS[name],
            mean_a,
            mean_b,
            *interval_texts(curve.mean, name),
            str(curve.mean["pairs"]),
            _ratio(curve.mean),
        )
    return table


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
    curves = logged_curves(comparison)
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
        accuracy = value_text(final.accuracy_a, unit)
    title = f"Last evaluation, compared with a = {path}"
    table = _table(title, "b", "equal up to", label, *DIFFERENCE, RATIO)
    table.add_row(path, "", accuracy, "", "", "")
    for comparison, evaluation in zip(comparisons, evaluations, strict=True):
        cells = ["", "", "", ""]
        if evaluation is not None:
            cells = [
                value_text(evaluation.accuracy_b, unit),
                *interval_texts(evaluation.difference, unit),
                _ratio(evaluation.difference),
            ]
        table.add_row(printable(comparison.b.path), f"step {comparison.equal_up_to}", *cells)
    return table


def _plus_minus(estimate: Mapping[str, Any], name: str) -> str:
    difference = value_text(estimate["difference"], name, sign="+")
    if estimate["low"] is None:
        return difference
    half = (estimate["high"] - estimate["low"]) / 2
    return f"{difference} ± {value_text(half, name)}"


def _ratio(estimate: Mapping[str, Any]) -> str:
    ratio = estimate["variance_ratio"]
    if ratio is None:
        return ""
    if ratio < 100:
        return f"{ratio:.1f}"
    return f"{ratio:,.0f}"
