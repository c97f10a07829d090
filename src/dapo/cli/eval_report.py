"""Prints results of `dapo eval`: side by side, with paired differences, or by problem."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from dapo.cli.formatting import number, right, titled_table, weighted
from dapo.core.terminal import printable
from dapo.core.text import one_line, with_interval
from dapo.evaluation.scores import CORRECT, count_votes
from dapo.runs.console import SafeConsole


def evaluation_json(result: Mapping[str, Any], *, by_problem: bool) -> dict[str, Any]:
    """Return what `--json` prints; tables are included only if `by_problem`."""
    if "comparison" in result:
        both = {
            name: evaluation_json(result[name], by_problem=by_problem)
            for name in ("first", "second")
        }
        return {**both, "comparison": result["comparison"]}
    return {name: value for name, value in result.items() if by_problem or name != "table"}


def print_evaluation(
    evaluation: Mapping[str, Any], output: Path | None, *, by_problem: bool = False
) -> None:
    """Print one result, or two with their paired difference, and rows if `by_problem`."""
    console = SafeConsole()
    is_pair = "comparison" in evaluation
    results = [evaluation["first"], evaluation["second"]] if is_pair else [evaluation]
    console.print(_result_table(results))
    for result in results:
        _print_notes(console, result)
    if is_pair:
        console.print(_describe_difference(evaluation["comparison"]), soft_wrap=True)
    if by_problem:
        tables = [result["table"] for result in results]
        console.print(_paired_problem_table(*tables) if is_pair else _problem_table(*tables))
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def _describe_difference(difference: Mapping[str, Any]) -> str:
    """Describe the paired difference of two results in two lines."""
    if difference["difference"] is None:
        return "second - first: no problem has a verdict in both"
    low = difference["low"]
    high = difference["high"]
    conclusion = "(no interval: fewer than two problems, or the same difference on all)"
    if low is not None:
        if low <= 0 <= high:
            verdict = "no significant difference"
        elif low > 0:
            verdict = "higher"
        else:
            verdict = "lower"
        conclusion = f"(95 % interval {low:+.4f} to {high:+.4f}): {verdict}"
    return (
        f"second - first, paired over {difference['problems']} problems:"
        f" {difference['difference']:+.4f} {conclusion}\nbetter on {difference['better']} problems,"
        f" worse on {difference['worse']}, equal on {difference['equal']}"
    )


def _result_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with a column for each result, and a row for each number that they have."""
    first = results[0]
    is_single = len(results) == 1
    heading = f"on {first['name']}"
    if is_single:
        heading = f"{first['model']} {heading}"
    title = Text(printable(heading))
    for result in results:
        if warning := result.get("warning"):
            prefix = "" if is_single else f"{result['model']}: "
            title.append(printable(f"\nWARNING: {prefix}{warning}"), style="red")
    names = ["result"]
    if not is_single:
        names = short_names([str(result["model"]) for result in results])
    columns = [Column(name, justify="right", overflow="fold") for name in names]
    table = titled_table(title, "", *columns)
    k = first["samples_per_problem"]
    row = table.add_row
    accuracy = partial(with_interval, none=" (no interval)")
    means = []
    for result in results:
        style = ".1%" if result["binary"] else ".4f"
        means.append(accuracy(result["accuracy"], (result["low"], result["high"]), style))
    row(f"avg@{k}" if first["binary"] else f"mean score, avg@{k}", *means)
    for name in (name for name in first if name.startswith(("pass@", "cons@"))):
        # pass@1 is avg@k, unless some problems lack a verdict
        if name == "pass@1" and all(r.get(name) == r["accuracy"] for r in results):
            continue
        row(name, *(accuracy(r[name], r["intervals"][name]) if name in r else "" for r in results))
    complete = [result.get("complete_problems", result["problems"]) for result in results]
    if any(count < r["problems"] for count, r in zip(complete, results, strict=True)):
        row("  pass@j over problems", *(f"{count:,}" for count in complete))
    for label, cells in _source_rows(results):
        row(label, *cells)
    row("problems", *(f"{r['problems']:,}" for r in results))
    if any("verifier" in r for r in results):
        row("judged by", *(weighted(r.get("verifier", "")) for r in results))
    row("mean response, tokens", *(f"{r['response_tokens_mean']:.1f}" for r in results))
    row("truncated", *(f"{r['truncated_fraction']:.1%}" for r in results))
    if any(r["no_answer_fraction"] is not None for r in results):
        row("without an answer", *(number(r["no_answer_fraction"], ".1%") for r in results))
    return table


def _source_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the accuracies on each source of the problems, if there are several sources."""
    sources = results[0]["by_source"]
    if len(sources) < 2:
        return
    for source, facts in sources.items():
        scores = [result["by_source"].get(source, {}).get("accuracy") for result in results]
        cells = [number(score, ".3f") for score in scores]
        yield f"  {source} ({facts['problems']} problems)", cells


def short_names(models: Sequence[str]) -> list[str]:
    """Remove the folders that all names share; name an evaluation's file by its step.

    >>> short_names(["runs/a/eval/step_000000.json", "runs/a/eval/step_000018.json"])
    ['step 0', 'step 18']
    """
    parts = [Path(model).parts for model in models]
    columns = enumerate(zip(*parts, strict=False))
    shared = next((index for index, column in columns if len(set(column)) > 1), 0)
    names = [str(Path(*path_parts[shared:])) for path_parts in parts]
    return [re.sub(r"\bstep_0*(\d+)\.json$", r"step \1", name) for name in names]


def _print_notes(console: SafeConsole, summary: Mapping[str, Any]) -> None:
    """Print notes on scores without verdicts, on intervals, and on errors of the verifier."""
    if not summary["binary"]:
        console.print(
            "the verifier gives scores, not correct or wrong (reward.threshold decides)",
            soft_wrap=True,
        )
    if note := summary.get("interval_note"):
        console.print(note, soft_wrap=True)
    if summary["verifier_errors"]:
        errors = summary["verifier_errors"]
        total = summary["problems"] * summary["samples_per_problem"]
        line = f"{errors} of {total} responses have no verdict: {summary['most_frequent_error']}"
        console.print(line, soft_wrap=True)


def _problem_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a row per problem, the hardest first, problems without a verdict last."""
    table = _table_by_problem("score", "correct", "tokens", "most frequent answer")
    for row in sorted(rows, key=lambda row: (row["accuracy"] is None, row["accuracy"])):
        responses = row["responses"]
        judged = [response for response in responses if response["error"] is None]
        binary = all(response["correct"] is not None for response in judged)
        question = Text(printable(one_line(row["question"])), no_wrap=True, overflow="ellipsis")
        correct = "-"
        if binary:
            correct = f"{sum(bool(response['correct']) for response in judged)}/{len(judged)}"
        tokens = f"{fmean(response['tokens'] for response in responses):.0f}"
        cells = (
            number(row["accuracy"], ".3f"),
            correct,
            tokens,
            one_line(_most_frequent_answer(judged)),
        )
        table.add_row(question, one_line(str(row["answer"])), *cells)
    return table


def _table_by_problem(*numbers: str) -> Table:
    # only the first column gives way on a narrow terminal
    columns = Column("problem", max_width=60), Column("answer", no_wrap=True, max_width=12)
    return titled_table("by problem", *columns, *right(*numbers, no_wrap=True))


def _most_frequent_answer(judged: Sequence[Mapping[str, Any]]) -> str:
    """Return the winning answer, as its first response writes it; empty without one."""
    votes = count_votes((response["correct"], response["answer"]) for response in judged)
    if not votes:
        return ""
    winner = votes.most_common(1)[0][0]
    if winner is not CORRECT:
        return winner or ""
    return next((r["answer"] for r in judged if r["correct"] and r["answer"]), "")


def _paired_problem_table(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Table:
    """Make a row per problem, most worsened first, unpaired problems last."""
    table = _table_by_problem("first", "second", "difference")
    accuracies = {row["id"]: row["accuracy"] for row in second}
    lines = []
    for row in first:
        a = row["accuracy"]
        b = accuracies[row["id"]]
        lines.append((row, a, b, None if a is None or b is None else b - a))
    for row, a, b, difference in sorted(lines, key=lambda line: (line[3] is None, line[3])):
        question = Text(
            printable(one_line(str(row.get("question", row["id"])))),
            no_wrap=True,
            overflow="ellipsis",
        )
        scores = (number(a, ".3f"), number(b, ".3f"), number(difference, "+.3f"))
        table.add_row(question, one_line(str(row.get("answer", ""))), *scores)
    return table
