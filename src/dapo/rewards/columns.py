"""The data columns that reward functions receive by name, and the check that a data set has them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dapo.core.errors import DataError
from dapo.types import Problem


def columns_of(problem: Problem) -> dict[str, Any]:
    """A problem's columns by name: its fields, `prompt`, `source`, and `answer` if it has one.

    `data_source` and `ground_truth`, verl's names of the last two, are added unless a column has that name.
    """
    answer = {"answer": problem.answer} if problem.answer else {}
    columns = {"prompt": problem.prompt, "source": problem.source, **problem.fields, **answer}
    columns.setdefault("data_source", problem.source)
    of_verl = problem.fields.get("reward_model")
    if isinstance(of_verl, Mapping) and "ground_truth" in of_verl:
        columns.setdefault("ground_truth", of_verl["ground_truth"])
    elif "answer" in columns:
        columns.setdefault("ground_truth", columns["answer"])
    return columns


def missing_columns(needed: Collection[str], problem: Problem) -> str:
    """The needed columns that a problem lacks, separated by commas."""
    return ", ".join(sorted(set(needed).difference(columns_of(problem)))) if needed else ""


def missing_columns_error(missing: str, problem: Problem) -> str:
    """The error message for missing columns."""
    return f"needs {missing}, which the problem does not have; it has {_own(problem)}"


def require_columns(problems: Sequence[Problem], needed: Mapping[str, Collection[str]], *, where: str) -> None:
    """Raise DataError where rows lack a column without which a reward function cannot be called.

    Args:
        problems: all rows of a data source, in order.
        needed: the columns that each function needs, by the function's name.
        where: name of the rows in the message: `data.train`.
    """
    for name, columns in needed.items():
        lacking = [i for i, problem in enumerate(problems) if missing_columns(columns, problem)]
        if not lacking:
            continue
        first = problems[lacking[0]]
        rows = f"row {lacking[0] + 1}" if len(lacking) == 1 else f"{len(lacking):,} rows (the first: {lacking[0] + 1})"
        raise DataError(
            f"{name} needs {missing_columns(columns, first)}, which {rows} of the {len(problems):,} of {where} do not "
            f"have; columns there: {_own(first)}. Rename a column, give the parameter a default value, or set it in "
            "reward.options"
        )


def _own(problem: Problem) -> str:
    """The names of a problem's columns, for a message."""
    return ", ".join(sorted({"prompt", "source", *problem.fields, *(["answer"] if problem.answer else [])}))
