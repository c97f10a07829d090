"""Prints the results of `dapo eval`: one or two side by side, the paired difference, and one line per problem."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dapo.telemetry.console import printable


def print_evaluation(
    summary: Mapping[str, Any], output: Path | None, table: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Print a result; with `table`, also one line per problem."""
    console = Console()
    console.print(_result_table([summary]))
    _print_errors(console, summary)
    if table is not None:
        console.print(_problem_table(table))
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def print_comparison(results: Sequence[Mapping[str, Any]], difference: Mapping[str, Any], output: Path | None) -> None:
    """Print both results side by side, and the paired difference."""
    console = Console()
    console.print(_result_table(results))
    for result in results:
        _print_errors(console, result)
    low, high = difference["low"], difference["high"]
    verdict = "no significant difference" if low <= 0 <= high else "higher" if low > 0 else "lower"
    console.print(
        f"second - first, paired over {difference['problems']} problems: {difference['difference']:+.4f} "
        f"(95 % interval {low:+.4f} to {high:+.4f}): {verdict}\n"
        f"better on {difference['better']} problems, worse on {difference['worse']}, equal on {difference['equal']}",
        soft_wrap=True,
    )
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def _result_table(results: Sequence[Mapping[str, Any]]) -> Table:
    first = results[0]
    title = escape(f"{first['model']} on {first['name']}" if len(results) == 1 else f"on {first['name']}")
    for result in results:
        if warning := result.get("warning"):
            of = "" if len(results) == 1 else f"{result['model']}: "
            title += f"\n[red]WARNING: {escape(f'{of}{warning}')}[/red]"
    names = ["result"] if len(results) == 1 else [str(result["model"]) for result in results]
    columns = [Column(name, justify="right") for name in names]
    table = Table("", *columns, title=title, title_style="bold", title_justify="left")
    k = first["samples_per_problem"]
    row = table.add_row
    row(f"avg@{k}", *(_format_fraction(r["accuracy"], (r["low"], r["high"]), binary=r["binary"]) for r in results))
    for name in (name for name in first if name.startswith(("pass@", "cons@"))):
        row(name, *(_format_fraction(r[name], r["intervals"][name]) if name in r else "" for r in results))
    for source in first["by_source"] if len(first["by_source"]) > 1 else ():
        count = first["by_source"][source]["problems"]
        row(
            f"  {source} ({count} problems)",
            *(_format_optional(r["by_source"].get(source, {}).get("accuracy"), ".3f") for r in results),
        )
    row("problems", *(f"{r['problems']:,}" for r in results))
    row("mean response, tokens", *(f"{r['response_tokens_mean']:.1f}" for r in results))
    row("truncated", *(f"{r['truncated_fraction']:.1%}" for r in results))
    if any(r["no_answer_fraction"] is not None for r in results):
        row("without an answer", *(_format_optional(r["no_answer_fraction"], ".1%") for r in results))
    return table


def _print_errors(console: Console, summary: Mapping[str, Any]) -> None:
    if summary["verifier_errors"]:
        errors, total = summary["verifier_errors"], summary["problems"] * summary["samples_per_problem"]
        line = f"{errors} of {total} responses have no verdict: {summary['most_frequent_error']}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _problem_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="by problem", title_style="bold", title_justify="left")
    for name in ("problem", "answer"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=60 if name == "problem" else 12)
    for name in ("score", "correct", "tokens", "most frequent answer"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: (row["accuracy"] is None, row["accuracy"])):
        responses = row["responses"]
        judged = [response for response in responses if response["error"] is None]
        votes = Counter(response["answer"] for response in judged if response["answer"])
        table.add_row(
            _one_line(row["question"]),
            _one_line(str(row["answer"])),
            _format_optional(row["accuracy"], ".3f"),
            f"{sum(bool(response['correct']) for response in judged)}/{len(judged)}",
            f"{fmean(response['tokens'] for response in responses):.0f}",
            _one_line(votes.most_common(1)[0][0]) if votes else "",
        )
    return table


def _one_line(text: str) -> str:
    return escape(printable(" ".join(text.split())))


def _format_fraction(value: float, interval: Sequence[float], *, binary: bool = True) -> str:
    style = ".1%" if binary else ".4f"
    return f"{value:{style}} ({interval[0]:{style}} to {interval[1]:{style}})"


def _format_optional(value: float | None, style: str) -> str:
    return "" if value is None else f"{value:{style}}"
