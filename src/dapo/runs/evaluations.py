"""Writes and reads the evaluations of a run; damaged ones are left out with a warning. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError
from dapo.core.files import atomic_write_json, read_json
from dapo.evaluation.scores import require_summary
from dapo.runs.directory import RunDirectory


def write_evaluation(
    run: RunDirectory, step: int, summary: Mapping[str, Any], table: Sequence[Mapping[str, Any]]
) -> None:
    """Write the evaluation after a step: its summary, and a row per problem."""
    atomic_write_json(run.eval(step), {"step": step, **summary, "table": table})


def first_and_last_evaluation(run: RunDirectory, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Read the first and the last readable evaluation of a run, with their tables; fewer if it has fewer.

    No other evaluation is read. `warn` is called with a message about each damaged one.
    """
    paths = list(run.evaluations().values())
    found: list[dict[str, Any]] = []
    while paths and not found:
        found += read_evaluation(paths.pop(0), warn)
    while paths and len(found) < 2:
        found += read_evaluation(paths.pop(), warn)
    return found


def read_evaluation(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Read the evaluation in a file, as a list of one; empty, with a warning, if it is damaged."""
    try:
        return [_require_evaluation(read_json(path), where=str(path))]
    except OSError as error:
        warn(f"{path} cannot be read and is left out: {error.strerror}")
    except ValueError:
        warn(f"{path} is damaged (no JSON) and is left out")
    except DataError as error:
        warn(f"{error}; it is left out")
    return []


def _require_evaluation(found: Any, *, where: str) -> dict[str, Any]:
    """Check that a value is an evaluation that a run wrote. Raises DataError for anything else."""
    summary = require_summary(found, where)
    numbers = [summary[name] for name in ("accuracy", "problems", "response_tokens_mean", "truncated_fraction")]
    numbers += [summary[name] for name in ("low", "high") if summary[name] is not None]
    if not all(isinstance(number, float | int) for number in numbers) or not all(map(_is_row, summary["table"])):
        raise DataError(f"{where} was not written by a run")
    return summary


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of an evaluation's table."""
    responses = row.get("responses")
    return (
        {"source", "question", "answer"} <= row.keys()
        and isinstance(responses, list)
        and bool(responses)
        and all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in responses)
    )
