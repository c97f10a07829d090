"""The table of an experiment: accuracies with intervals, paired differences, and costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from dapo.analysis.ablate.results import Results
from dapo.libs.sample_intervals import mean_over_seeds, two_way_difference, two_way_mean
from dapo.runs.directory import ENDED

FIGURES = ("tokens", "seconds", "steps", "length", "truncated", "entropy", "skipped")
"""The numbers of a run that the table shows as means over seeds."""


Row: TypeAlias = Mapping[int, Mapping[str, Any]]
"""The finished runs of a variant, by seed."""


def make_table(results: Results) -> list[dict[str, Any]]:
    """Return an object per condition: rows, the accuracy before training, and notes."""
    return [_condition(results, name) for name in results.conditions]


def _condition(results: Results, condition: str) -> dict[str, Any]:
    """Return the table of one condition, over the problems that all its runs have judged."""
    rows = {}
    for variant in results.variants:
        rows[variant["name"]] = results.finished(condition, variant["name"])
    problems = judged_everywhere(rows)
    runs = [run for row in rows.values() for run in row.values()]
    num_problems = len(results.facts["problems"].get(condition, []))
    return {
        "condition": condition,
        "accuracy_before": _accuracy_before(runs),
        "binary": all(_is_binary(row) for row in rows.values()),
        "problems": len(problems),
        "samples_per_problem": runs[0]["samples_per_problem"] if runs else None,
        "rows": [_table_row(results, variant, rows, problems) for variant in results.variants],
        "notes": [
            *_missing_runs(results, condition),
            *_undecided_problems(num_problems - len(problems)),
            *_unequal_starts(results, condition, rows),
        ],
    }


def _accuracy_before(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the mean accuracy before training over seeds; all runs of a seed start alike."""
    by_seed = {run["seed"]: run["accuracy_before"] for run in runs}
    accuracies = [accuracy for accuracy in by_seed.values() if accuracy is not None]
    return mean_over_seeds(accuracies) if accuracies else None


def _table_row(
    results: Results, variant: Mapping[str, Any], rows: Mapping[str, Row], problems: Sequence[int]
) -> dict[str, Any]:
    """Return the accuracy, the paired differences and the costs of one variant.

    Args:
        results: the results of the experiment.
        variant: the variant, with its name and the one before it.
        rows: the finished runs of each variant.
        problems: the problems that count, by index.
    """
    name = variant["name"]
    runs = rows[name]
    previous = variant["previous"]
    baseline = results.facts["experiment"]["baseline"]
    table_row = {
        "variant": name,
        "seeds": sorted(runs),
        "accuracy": _accuracy(runs, problems),
        "previous": previous,
        "to_previous": None,
        "to_baseline": None,
    }
    if previous is not None:
        table_row["to_previous"] = _difference(rows[previous], runs, problems)
    if name != baseline:
        table_row["to_baseline"] = _difference(rows[baseline], runs, problems)
    for figure in FIGURES:
        values = [run[figure] for run in runs.values() if run[figure] is not None]
        table_row[figure] = mean_over_seeds(values)
    return table_row


def judged_everywhere(rows: Mapping[str, Row]) -> list[int]:
    """Return the problems, by index, with an accuracy in every finished run of a condition."""
    accuracies_by_run = [run["accuracies"] for row in rows.values() for run in row.values()]
    accuracies_by_problem = zip(*accuracies_by_run, strict=True)
    problems = enumerate(accuracies_by_problem)
    return [index for index, accuracies in problems if None not in accuracies]


def _values(row: Row, seeds: Sequence[int], problems: Sequence[int]) -> list[list[float]]:
    """Return the accuracies of a row by seed, then by problem."""
    values = []
    for seed in seeds:
        accuracies = row[seed]["accuracies"]
        values.append([accuracies[index] for index in problems])
    return values


def _is_binary(row: Row) -> bool:
    """Return True if the runs have accuracies, False for mean scores."""
    return all(run.get("is_binary", True) for run in row.values())


def _accuracy(row: Row, problems: Sequence[int]) -> dict[str, Any] | None:
    """Return a row's mean accuracy with its interval; None without a finished run."""
    if not row or not problems:
        return None
    values = _values(row, sorted(row), problems)
    return asdict(two_way_mean(values, proportions=_is_binary(row)))


def _difference(first: Row, second: Row, problems: Sequence[int]) -> dict[str, Any] | None:
    """Subtract the first row from the second, over the seeds that both have."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds or not problems:
        return None
    first_values = _values(first, seeds, problems)
    second_values = _values(second, seeds, problems)
    difference = two_way_difference(first_values, second_values, proportions=_is_binary(first))
    return asdict(difference)


def _missing_runs(results: Results, condition: str) -> Iterator[str]:
    """Yield a note per variant and reason for runs that are not in the table."""
    seeds_by_reason: dict[tuple[str, str], list[str]] = {}
    for run in results.facts["runs"]:
        if run["condition"] != condition or run["accuracies"] is not None:
            continue
        reason = run["state"]
        if reason in ENDED:
            reason += ", without a readable evaluation after its last step"
        elif run["reason"]:
            # the other lines of an error are advice, and are in the run's log
            reason = f"{reason}: {run['reason'].splitlines()[0]}"
        seeds = seeds_by_reason.setdefault((run["variant"], reason), [])
        seeds.append(str(run["seed"]))
    for (variant, reason), seeds in seeds_by_reason.items():
        noun = "seed" if len(seeds) == 1 else "seeds"
        yield f"left out: {variant}, {noun} {', '.join(seeds)} ({reason})"


def _undecided_problems(count: int) -> Iterator[str]:
    """Yield a note if problems are left out."""
    if count:
        yield f"left out: {count} problems that have no verdict in one of the runs"


def _unequal_starts(results: Results, condition: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield a note for each seed whose runs had different accuracies before training."""
    for seed in results.facts["experiment"]["seeds"]:
        starts = [row[seed]["accuracy_before"] for row in rows.values() if seed in row]
        values = [accuracy for accuracy in starts if accuracy is not None]
        if values and not np.allclose(values, values[0]):
            quantity = "accuracy" if results.is_binary(condition) else "mean score"
            yield (
                f"the {quantity} before training differs between the rows of seed {seed}, though"
                " they start from the same model: they were evaluated with different options, or on"
                " machines that round differently"
            )
