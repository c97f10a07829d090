"""Select the problems of a data set whose pass rate is neither too low nor too high to learn
from.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from dapo.core.errors import DataError
from dapo.data.prepare.stats import PassRate
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem

Reason: TypeAlias = Literal[
    "pass rate too low", "pass rate too high", "too few responses", "not measured"
]


@dataclass(frozen=True)
class Selection:
    """The rows that were kept, and why the others were not."""

    kept: Sequence[Problem]
    """The kept rows in the order of the data, copies included, each with its measured `pass_rate`
    as a field.
    """
    removed: Sequence[Mapping[str, Any]]
    """One JSON object per removed row: its number from 1 on, id, reason, responses, pass rate and
    question.
    """
    # mean of the measured pass rates of the kept rows; None without any
    mean_pass_rate: float | None

    @property
    def by_reason(self) -> Counter[str]:
        return Counter(row["reason"] for row in self.removed)


def select_by_pass_rate(
    problems: Sequence[Problem],
    rates: Mapping[str, PassRate],
    *,
    low: float,
    high: float,
    min_responses: int = 1,
) -> Selection:
    """Keep the rows whose measured pass rate, by problem id, is between two inclusive bounds.

    Args:
        problems: The rows of a data set.
        rates: The measured pass rates by problem id.
        low: The lowest pass rate, from 0 to 1, of a row that stays.
        high: The highest one.
        min_responses: Problems with fewer responses that were judged right or wrong are removed.
    """
    selected = []
    removed = []
    for number, problem in enumerate(problems, start=1):
        rate = rates.get(problem.id)
        reason = _reason(rate, low, high, min_responses)
        if reason is None:
            assert rate is not None
            selected.append(replace(problem, fields={**problem.fields, "pass_rate": rate.rate}))
            continue
        row = {
            "row": number,
            "id": problem.id,
            "reason": reason,
            "responses": 0,
            "pass_rate": None,
            "question": prompt_text(problem.prompt),
        }
        if rate:
            row["responses"] = rate.responses
            row["pass_rate"] = rate.rate
        removed.append(row)
    mean = fmean(rates[problem.id].rate for problem in selected) if selected else None
    return Selection(selected, removed, mean)


def read_pass_rates(path: Path) -> dict[str, PassRate]:
    """Read pass rates by problem id from a file of `dapo eval`, a run or `dapo data stats`.

    Responses without a verdict count neither as right nor as wrong; problems without any verdict
    are left out.

    Raises:
        DataError: it is another file, or a verifier gave scores alone.
    """
    try:
        evaluation = json.loads(path.read_text(encoding="utf-8"))
        rates = [_rate_in(row) for row in evaluation["table"]]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as pass rates: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise DataError(
            f"{path} holds no pass rates; expected a run directory, or a file of dapo eval --output"
            " or of dapo data stats --model MODEL --output"
        ) from None
    measured = [rate for rate in rates if rate is not None]
    if not measured:
        raise DataError(
            f"{path}: no response was judged right or wrong, so no problem has a pass rate"
        )
    return {rate.id: rate for rate in measured}


def _rate_in(row: Mapping[str, Any]) -> PassRate | None:
    """Return the pass rate in a row of an evaluation or statistics; None without a verdict."""
    if "responses" not in row:
        measured = row["model"] if "model" in row else row["run"]
        if measured is None:
            return None
        return PassRate(row["id"], measured["responses"], measured["correct"])
    judged = [response for response in row["responses"] if response["error"] is None]
    verdicts = [response["correct"] for response in judged if response["correct"] is not None]
    if not verdicts:
        return None
    return PassRate(row["id"], len(verdicts), sum(verdicts))


def _reason(rate: PassRate | None, low: float, high: float, min_responses: int) -> Reason | None:
    """Return why a row is removed; None if it is kept."""
    if rate is None:
        return "not measured"
    if rate.responses < min_responses:
        return "too few responses"
    if rate.rate < low:
        return "pass rate too low"
    return "pass rate too high" if rate.rate > high else None
