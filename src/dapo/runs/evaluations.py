"""Writes and reads the evaluations of a run; damaged ones are left out with a warning.

Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from dapo.config.load import load_config, resolve_auto_verifier
from dapo.core.errors import DapoError, DataError
from dapo.core.files import atomic_write_json, damage_of, read_json
from dapo.core.text import quoted
from dapo.evaluation.scores import require_summary
from dapo.runs.directory import RunDirectory


def write_evaluation(
    run: RunDirectory, step: int, summary: Mapping[str, Any], table: Sequence[Mapping[str, Any]]
) -> None:
    """Write the evaluation after a step.

    Args:
        run: the run directory.
        step: the step; 0: before training.
        summary: `Evaluation.summary`.
        table: a row per problem.
    """
    atomic_write_json(run.eval(step), {"step": step, **summary, "table": table})


def first_and_last_evaluation(
    run: RunDirectory,
    warn: Callable[[str], None] | None = None,
    *,
    up_to_step: int | None = None,
) -> list[dict[str, Any]]:
    """Read the first and the last readable evaluation of a run, with their tables, if it has two.

    No other evaluation is read.

    Args:
        run: the run.
        warn: called with a message about each damaged evaluation, if given.
        up_to_step: the last step whose evaluation counts; None: that of every step.
    """
    paths = []
    for step, path in run.evaluations().items():
        if up_to_step is None or step <= up_to_step:
            paths.append(path)
    evaluations: list[dict[str, Any]] = []
    while paths and len(evaluations) < 2:
        # from the front until one is readable, then from the back
        index = -1 if evaluations else 0
        evaluation = read_evaluation(paths.pop(index), warn)
        if evaluation is not None:
            evaluations.append(evaluation)
    return evaluations


def read_evaluation(path: Path, warn: Callable[[str], None] | None = None) -> dict[str, Any] | None:
    """Read the evaluation in a file; None, with a warning, if it is damaged."""
    try:
        return load_evaluation(path)
    except DataError as error:
        if warn is not None:
            warn(f"{error}; it is left out")
    return None


def load_evaluation(path: Path) -> dict[str, Any]:
    """Read the evaluation in a file. Raises DataError for a file that no run has written."""
    with damage_of(path):
        evaluation = require_summary(read_json(path, follow=False), str(path))
        _require_types(evaluation, _SUMMARY)
        for source in evaluation["by_source"].values():
            _require_types(source, _SOURCE)
        for row in evaluation["table"]:
            _require_types(row, _ROW)
            for response in row["responses"]:
                _require_types(response, _RESPONSE)
            if not row["responses"]:
                raise ValueError(f"no response to {quoted(row['id'])}")
    return with_verifier(evaluation, path)


def with_verifier(evaluation: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add the verifier in force in its step to a run's evaluation that does not store it."""
    if "verifier" in evaluation:
        return evaluation
    run = RunDirectory(path.parent.parent)
    # a file that was copied out of its run has no configuration beside it: it stays as it is
    with suppress(DapoError, KeyError, TypeError, ValueError):
        step = evaluation["step"]
        if run.eval(step) == path:
            config = resolve_auto_verifier(load_config(run.config_of(step)))
            return evaluation | config.reward.judging
    return evaluation


Kinds: TypeAlias = tuple[type, ...]
_NUMBER: Kinds = (float,)
_NUMBER_OR_NONE: Kinds = (float, type(None))
_TEXT_OR_NONE: Kinds = (str, type(None))
_SOURCE: Mapping[str, Kinds] = {"accuracy": _NUMBER, "problems": _NUMBER}
_SUMMARY: Mapping[str, Kinds] = {
    "problems": _NUMBER,
    "complete_problems": _NUMBER,
    "samples_per_problem": _NUMBER,
    "response_tokens_mean": _NUMBER,
    "truncated_fraction": _NUMBER,
    "verifier_errors": _NUMBER,
    "accuracy": _NUMBER_OR_NONE,
    "low": _NUMBER_OR_NONE,
    "high": _NUMBER_OR_NONE,
    "no_answer_fraction": _NUMBER_OR_NONE,
    "interval_note": _TEXT_OR_NONE,
    "warning": _TEXT_OR_NONE,
    "most_frequent_error": _TEXT_OR_NONE,
    "name": (str,),
    "binary": (bool,),
    "by_source": (dict,),
    "table": (list,),
}
_ROW: Mapping[str, Kinds] = {
    "id": (str,),
    "source": (str,),
    "question": (str,),
    "answer": (str,),
    "accuracy": _NUMBER_OR_NONE,
    "responses": (list,),
}
_RESPONSE: Mapping[str, Kinds] = {
    "text": (str,),
    "correct": (bool, type(None)),
    "score": _NUMBER_OR_NONE,
    "tokens": _NUMBER,
    "error": _TEXT_OR_NONE,
    "answer": _TEXT_OR_NONE,
    "finish": _TEXT_OR_NONE,
}


def _require_types(record: Any, kinds: Mapping[str, Kinds]) -> None:
    """Raise ValueError if a value is missing or of another type; float stands for any number."""
    if not isinstance(record, dict):
        raise ValueError(f"{quoted(record)} where an object is expected")
    for name, allowed in kinds.items():
        if name not in record:
            raise ValueError(f"{name} is missing")
        value = record[name]
        # float64 holds integers below 2**53 exactly; JSON may hold any
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            value = float(value)
        # Python's JSON reader accepts NaN and Infinity
        if not isinstance(value, allowed) or (isinstance(value, float) and not isfinite(value)):
            raise ValueError(f"{name} is {quoted(value)}")
