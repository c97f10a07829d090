"""Finds, before sampling, the rows of a data set for which a reward cannot judge any response."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.core.errors import RewardError
from dapo.core.verifier_limits import TEST_COLUMNS
from dapo.rewards.combine import RewardSpec
from dapo.rewards.verifier import problem_check
from dapo.types import Problem

_SHOWN_ROWS = 5
TIME_S = 3.0
"""CPU time per verifier, so that many rows with long tests do not delay the start of a run."""


@dataclass(frozen=True)
class UnusableRows:
    """The rows that one verifier cannot judge: their numbers from 1, each with the reason."""

    verifier: str
    reasons: Mapping[int, str]
    num_checked: int  # rows checked, from the first on
    num_rows: int  # of the whole data set

    def __str__(self) -> str:
        """One line: the number of rows, the first of them, and the reason of the first."""
        rows = list(self.reasons)
        row_numbers = ", ".join(f"{row:,}" for row in rows[:_SHOWN_ROWS]) + ", ..." * (
            len(rows) > _SHOWN_ROWS
        )
        first = f"the first {self.num_checked:,} of " if self.num_checked < self.num_rows else ""
        return (
            f"{self.verifier} can judge no response to {len(rows):,} of {first}{self.num_rows:,}"
            f" rows ({'rows' if len(rows) > 1 else 'row'} {row_numbers}); row {rows[0]:,}:"
            f" {self.reasons[rows[0]]}"
        )


def has_tests(problem: Problem) -> bool:
    """Return whether a row has a column with the tests of a program.

    A column `test` may hold anything; one with assertions is HumanEval's.
    """
    first, second, third = TEST_COLUMNS
    fields = problem.fields
    return first in fields or second in fields or "assert" in str(fields.get(third, ""))


def unusable_rows(
    problems: Sequence[Problem],
    verifier: str | Mapping[str, float],
    options: Mapping[str, Any],
    *,
    time_s: float = TIME_S,
) -> list[UnusableRows]:
    """Find the rows that each verifier of a `reward` section cannot judge, by verifier.

    Args:
        problems: the rows of a data set, in order.
        verifier: `reward.verifier`.
        options: `reward.options`.
        time_s: CPU time per verifier; afterwards the check ends as soon as one row can be judged.

    Raises:
        RewardError: the section is invalid, or names an unknown verifier.
    """
    spec = RewardSpec.of(verifier, options=options)
    findings = []
    for name in spec.weights:
        if (check := problem_check(name, spec.options[name])) is not None:
            reasons, num_checked = _reasons(name, check, problems, time_s)
            findings += [UnusableRows(name, reasons, num_checked, len(problems))] if reasons else []
    return findings


def _reasons(
    name: str, check: Callable[[Problem], str | None], problems: Sequence[Problem], time_s: float
) -> tuple[dict[int, str], int]:
    """Return the reasons by row number, and the number of checked rows, one of them usable."""
    checked: dict[int, str | None] = {}  # by object: equal rows of a file share one
    reasons: dict[int, str] = {}
    end = time.process_time() + time_s
    for row, problem in enumerate(problems, 1):
        if id(problem) not in checked:
            if time.process_time() >= end and len(reasons) < row - 1:
                return reasons, row - 1
            reason = check(problem)
            checked[id(problem)] = None if reason is None else reason.removeprefix(f"{name}: ")
        stored_reason = checked[id(problem)]
        if stored_reason is not None:
            reasons[row] = stored_reason
    return reasons, len(problems)


def warnings_about_rows(
    problems: Sequence[Problem],
    verifier: str | Mapping[str, float],
    options: Mapping[str, Any],
    *,
    where: str,
) -> list[str]:
    """Warn about rows that cannot be judged, one line per verifier, of the data named `where`.

    Raises RewardError if a verifier can judge none of the rows.
    """
    lines = []
    for unusable in unusable_rows(problems, verifier, options):
        line = f"{where}: {unusable}"
        if len(unusable.reasons) == unusable.num_checked:
            raise RewardError(line)
        lines.append(line)
    return lines
