"""The table of an experiment: accuracies with intervals, paired differences, and costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dapo.analysis.ablate.results import ENDED, Results
from dapo.libs.sample_intervals import mean_over_seeds, two_way_difference, two_way_mean

FIGURES = ("tokens", "seconds", "steps", "length", "truncated", "entropy", "skipped")
"""The numbers of a run that the table shows as means over seeds."""


def make_table(results: Results) -> list[dict[str, Any]]:
    """Return an object per condition: rows, the accuracy before training, and notes."""
    return [_condition(results, name) for name in results.conditions]


def _condition(results: Results, condition: str) -> dict[str, Any]:
    """Return the table of one condition, over the problems that all its runs have judged."""
    runs = {
        variant["name"]: results.finished(condition, variant["name"])
        for variant in results.variants
    }
    judged = judged_everywhere(runs)
    all_runs = [run for row in runs.values() for run in row.values()]
    accuracies = {run["seed"]: run["accuracy_before"] for run in all_runs}
    numbers = [value for value in accuracies.values() if value is not None]
    baseline = results.facts["experiment"]["baseline"]
    rows = []
    for variant in results.variants:
        name = variant["name"]
        previous = variant["previous"]
        seeds = runs[name].values()
        row = {
            "variant": name,
            "seeds": sorted(runs[name]),
            "accuracy": _accuracy(runs[name], judged),
            "previous": previous,
            "to_previous": None,
            "to_baseline": None,
        }
        if previous is not None:
            row["to_previous"] = _difference(runs[previous], runs[name], judged)
        if name != baseline:
            row["to_baseline"] = _difference(runs[baseline], runs[name], judged)
        for figure in FIGURES:
            values = [run[figure] for run in seeds if run[figure] is not None]
            row[figure] = mean_over_seeds(values)
        rows.append(row)
    problems = len(results.facts["problems"].get(condition, []))
    return {
        "condition": condition,
        "accuracy_before": mean_over_seeds(numbers) if numbers else None,
        "binary": all(map(_is_binary, runs.values())),
        "problems": len(judged),
        "samples_per_problem": all_runs[0]["samples_per_problem"] if all_runs else None,
        "rows": rows,
        "notes": list(_notes(results, condition, runs, undecided=problems - len(judged))),
    }


def judged_everywhere(runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[int]:
    """Return the problems, by index, with an accuracy in every finished run of a condition."""
    tables = [run["accuracies"] for row in runs.values() for run in row.values()]
    return [i for i, values in enumerate(zip(*tables, strict=True)) if None not in values]


def _values(
    row: Mapping[int, Mapping[str, Any]], seeds: Sequence[int], judged: Sequence[int]
) -> list[list[float]]:
    """Return the accuracies of a row by seed, then by judged problem."""
    values = []
    for seed in seeds:
        accuracies = row[seed]["accuracies"]
        values.append([accuracies[index] for index in judged])
    return values


def _is_binary(row: Mapping[int, Mapping[str, Any]]) -> bool:
    return all(run.get("is_binary", True) for run in row.values())


def _accuracy(row: Mapping[int, Mapping[str, Any]], judged: Sequence[int]) -> dict[str, Any] | None:
    """Return a row's mean accuracy with its interval; None without a finished run."""
    if not row or not judged:
        return None
    values = _values(row, sorted(row), judged)
    return asdict(two_way_mean(values, proportions=_is_binary(row)))


def _difference(
    first: Mapping[int, Mapping[str, Any]],
    second: Mapping[int, Mapping[str, Any]],
    judged: Sequence[int],
) -> dict[str, Any] | None:
    """Subtract the first row from the second, over the seeds that both have."""
    both = sorted(first.keys() & second.keys())
    if not both or not judged:
        return None
    first_values = _values(first, both, judged)
    second_values = _values(second, both, judged)
    difference = two_way_difference(first_values, second_values, proportions=_is_binary(first))
    return asdict(difference)


def _notes(
    results: Results,
    condition: str,
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]],
    *,
    undecided: int,
) -> Iterator[str]:
    """Yield notes about missing runs, unequal base evaluations and problems left out."""
    left_out: dict[tuple[str, str], list[str]] = {}
    for run in results.facts["runs"]:
        if run["condition"] == condition and run["state"] not in ENDED:
            # the other lines of an error are advice, and are in the run's log
            why = f": {run['reason'].splitlines()[0]}" if run["reason"] else ""
            key = (run["variant"], f"{run['state']}{why}")
            left_out.setdefault(key, []).append(str(run["seed"]))
    for (variant, reason), seeds in left_out.items():
        yield f"left out: {variant}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)} ({reason})"
    if undecided:
        yield f"left out: {undecided} problems that have no verdict in one of the runs"
    for seed in results.facts["experiment"]["seeds"]:
        accuracies = {
            name: row[seed]["accuracy_before"] for name, row in runs.items() if seed in row
        }
        values = [value for value in accuracies.values() if value is not None]
        if values and not np.allclose(values, values[0]):
            quantity = "accuracy" if results.is_binary(condition) else "mean score"
            yield (
                f"the {quantity} before training differs between the rows of seed {seed}, though they"
                " begin with the same model: they were evaluated with different options, or on"
                " machines that round differently"
            )
