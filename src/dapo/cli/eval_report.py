"""Prints results of `dapo eval`: side by side, with paired differences, or by problem."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from dapo.cli.formatting import number, right, say, titled_table
from dapo.core.terminal import printable
from dapo.core.text import one_line, plural, weighted, with_interval
from dapo.evaluation.pairing import who_is_better
from dapo.evaluation.scores import CORRECT, count_votes
from dapo.runs.console import SafeConsole

ROUNDING = 1e-9
"""Accuracies that differ by less are equal."""


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
    results = [evaluation]
    if is_pair:
        results = [evaluation["first"], evaluation["second"]]
        say(console, _verdict(evaluation), style="bold")
    console.print(_result_table(results))
    for result in results:
        for note in _notes(result):
            say(console, f"{result['model']}: {note}" if is_pair else note)
    if is_pair:
        _print_counts(console, evaluation)
    if by_problem and is_pair:
        first, second = results
        console.print(_paired_problem_table(first["table"], second["table"]))
    elif by_problem:
        console.print(_problem_table(evaluation["table"]))
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def _verdict(evaluation: Mapping[str, Any]) -> str:
    """Say which of two results is better, with their paired difference and its interval.

    The difference is in percentage points if both results are accuracies.
    """
    comparison = evaluation["comparison"]
    first, second = _names_of_pair(evaluation)
    difference = comparison["difference"]
    if difference is None:
        return f"undecided: no problem has a verdict in both {first} and {second}"
    is_accuracy = evaluation["first"]["binary"] and evaluation["second"]["binary"]
    scale, digits, unit = (100, 1, " points") if is_accuracy else (1, 4, "")
    interval = "no interval: fewer than two problems, or the same difference on all"
    if comparison["low"] is not None:
        low = scale * comparison["low"]
        high = scale * comparison["high"]
        interval = f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}"
    better = who_is_better(comparison, first=first, second=second)
    return (
        f"{better}: {second} - {first} {scale * difference:+.{digits}f}{unit} ({interval}),"
        f" paired over {plural(comparison['problems'], 'problem')}"
    )


def _print_counts(console: SafeConsole, evaluation: Mapping[str, Any]) -> None:
    """Print on how many problems the second result is better, and what was not alike."""
    comparison = evaluation["comparison"]
    if comparison["difference"] is not None:
        _, second = _names_of_pair(evaluation)
        say(
            console,
            f"{second}: better on {plural(comparison['better'], 'problem')}, worse on"
            f" {comparison['worse']:,}, equal on {comparison['equal']:,}",
        )
    if comparison["note"] is not None:
        say(console, comparison["note"])


def _names_of_pair(evaluation: Mapping[str, Any]) -> list[str]:
    """Return names that tell two results apart in a sentence."""
    names = _names([evaluation["first"], evaluation["second"]])
    if names[0] == names[1]:
        return ["the first", "the second"]
    return names


def _names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what distinguishes the models of the results, with their steps."""
    short = short_names([str(result["model"]) for result in results])
    return [_at_step(name, result) for name, result in zip(short, results, strict=True)]


def _result_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with a column for each result, and a row for each number that they have."""
    names = ["result"]
    if len(results) > 1:
        names = _names(results)
    columns = [Column(name, justify="right", overflow="fold") for name in names]
    table = titled_table(_title(results), "", *columns)
    for label, cells in _accuracy_rows(results):
        table.add_row(label, *cells)
    for label, cells in _source_rows(results):
        table.add_row(label, *cells)
    for label, cells in _fact_rows(results):
        table.add_row(label, *cells)
    return table


def _title(results: Sequence[Mapping[str, Any]]) -> Text:
    """Name the data, a single model, and the warnings of the results in red."""
    heading = f"on {results[0]['name']}"
    if len(results) == 1:
        heading = f"{_at_step(results[0]['model'], results[0])} {heading}"
    title = Text(printable(heading))
    for result in results:
        warning = result.get("warning")
        if not warning:
            continue
        if len(results) > 1:
            warning = f"{result['model']}: {warning}"
        title.append(printable(f"\nWARNING: {warning}"), style="red")
    return title


def _accuracy_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield avg@k, pass@j and cons@j with their intervals."""
    first = results[0]
    means = []
    for result in results:
        style = ".1%" if result["binary"] else ".4f"
        means.append(
            with_interval(
                result["accuracy"], (result["low"], result["high"]), style, " (no interval)"
            )
        )
    counts = dict.fromkeys(result["samples_per_problem"] for result in results)
    average = " and ".join(f"avg@{count}" for count in counts)
    yield (average if first["binary"] else f"mean score, {average}"), means
    # one result may lack an estimate or a source: it has no verdict for it
    names = dict.fromkeys(name for result in results for name in result)
    for name in names:
        if not name.startswith(("pass@", "cons@")):
            continue
        # pass@1 is avg@k but for rounding, unless some problems lack a verdict
        if name == "pass@1" and all(
            isclose(result[name], result["accuracy"], abs_tol=ROUNDING)
            for result in results
            if name in result
        ):
            continue
        cells = []
        for result in results:
            cell = ""
            if name in result:
                cell = with_interval(result[name], result["intervals"][name], none=" (no interval)")
            cells.append(cell)
        yield name, cells
    complete = [result.get("complete_problems", result["problems"]) for result in results]
    totals = [result["problems"] for result in results]
    if complete != totals:
        yield "  pass@j over problems", [f"{count:,}" for count in complete]


def _source_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the accuracies on each source of the problems, if there are several sources."""
    sources = sorted({source for result in results for source in result["by_source"]})
    if len(sources) < 2:
        return
    for source in sources:
        facts = [result["by_source"].get(source, {}) for result in results]
        cells = [number(each.get("accuracy"), ".3f") for each in facts]
        counts = list(dict.fromkeys(each.get("problems", 0) for each in facts))
        text = plural(counts[0], "problem")
        if len(counts) > 1:
            text = " and ".join(f"{count:,}" for count in counts) + " problems"
        yield f"  {source} ({text})", cells


def _fact_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the counts, the verifiers and the facts about responses."""
    counts = []
    for result in results:
        count = f"{result['problems']:,}"
        if "until_width" in result:
            count += f" of {result['all_problems']:,}"
        counts.append(count)
    yield "problems", counts
    if any("verifier" in result for result in results):
        yield "judged by", [weighted(result.get("verifier", "")) for result in results]
    yield (
        "mean response, tokens",
        [f"{result['response_tokens_mean']:.1f}" for result in results],
    )
    yield "truncated", [f"{result['truncated_fraction']:.1%}" for result in results]
    fractions = [result["no_answer_fraction"] for result in results]
    if any(fraction is not None for fraction in fractions):
        yield "without an answer", [number(fraction, ".1%") for fraction in fractions]


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


def _at_step(name: str, result: Mapping[str, Any]) -> str:
    """Add the step of the checkpoint, if the evaluated model is that of a run."""
    if "step" not in result or "step" in name.split():
        return name
    return f"{name} step {result['step']}"


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on scores without verdicts, on intervals, and on errors of the verifier."""
    if not result["binary"]:
        yield "the verifier gives scores, not correct or wrong (reward.threshold decides)"
    if "until_width" in result:
        yield (
            f"ended when the interval was at most {result['until_width']:g} points wide; the"
            " problems were drawn at random"
        )
    if result.get("interval_note"):
        yield result["interval_note"]
    errors = result["verifier_errors"]
    if errors:
        total = result["problems"] * result["samples_per_problem"]
        yield f"{errors} of {total} responses have no verdict: {result['most_frequent_error']}"


def _problem_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a row per problem, the hardest first, problems without a verdict last."""
    table = _table_by_problem("score", "correct", "tokens", "most frequent answer")
    for row in sorted(rows, key=lambda row: (row["accuracy"] is None, row["accuracy"])):
        responses = row["responses"]
        judged = [response for response in responses if response["error"] is None]
        verdicts = [response["correct"] for response in judged]
        correct = "-"
        if None not in verdicts:
            correct = f"{sum(verdicts)}/{len(verdicts)}"
        # one that could not be sampled has no length
        lengths = [response["tokens"] for response in responses if response["finish"] is not None]
        table.add_row(
            _question(row["question"]),
            one_line(str(row["answer"])),
            number(row["accuracy"], ".3f"),
            correct,
            f"{fmean(lengths):.0f}" if lengths else "",
            one_line(_most_frequent_answer(judged)),
        )
    return table


def _table_by_problem(*numbers: str) -> Table:
    """Return an empty table, whose first column alone gives way on a narrow terminal."""
    problem = Column("problem", max_width=60)
    answer = Column("answer", no_wrap=True, max_width=12)
    return titled_table("by problem", problem, answer, *right(*numbers, no_wrap=True))


def _question(text: str) -> Text:
    """Return a question on one line, which is cut on a narrow terminal."""
    return Text(printable(one_line(text)), no_wrap=True, overflow="ellipsis")


def _most_frequent_answer(judged: Sequence[Mapping[str, Any]]) -> str:
    """Return the winning answer, as its first response writes it; empty without one."""
    votes = count_votes((response["correct"], response["answer"]) for response in judged)
    if not votes:
        return ""
    winner = votes.most_common(1)[0][0]
    if winner is not CORRECT:
        return winner or ""
    # correct answers are one vote, however they are written
    for response in judged:
        if response["correct"] and response["answer"]:
            return str(response["answer"])
    return ""


def _paired_problem_table(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Table:
    """Make a row per problem, most worsened first, unpaired problems last."""
    table = _table_by_problem("first", "second", "difference")
    second_accuracies = {row["id"]: row["accuracy"] for row in second}
    changes = []
    for row in first:
        if row["id"] not in second_accuracies:  # the second evaluation ended before it
            continue
        before = row["accuracy"]
        after = second_accuracies[row["id"]]
        difference = None
        if before is not None and after is not None:
            difference = after - before
        changes.append((row, after, difference))
    changes.sort(key=lambda change: (change[2] is None, change[2]))
    for row, after, difference in changes:
        table.add_row(
            _question(str(row.get("question", row["id"]))),
            one_line(str(row.get("answer", ""))),
            number(row["accuracy"], ".3f"),
            number(after, ".3f"),
            number(difference, "+.3f"),
        )
    return table
