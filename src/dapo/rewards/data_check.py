"""Finds the rows of a data set that a reward cannot judge whatever the response, before anything is sampled."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.core.errors import RewardError
from dapo.rewards.combine import RewardSpec
from dapo.rewards.verifier import problem_check
from dapo.types import Problem

_SHOWN_ROWS = 5
TIME_S = 3.0
"""Processor time for one verifier: the start of a run on many rows with long tests does not wait for all of them."""


@dataclass(frozen=True)
class UnusableRows:
    """The rows that one verifier cannot judge: their numbers from 1 on, each with the reason."""

    verifier: str
    reasons: Mapping[int, str]
    num_checked: int  # the first so many rows
    num_rows: int  # of the whole data set

    @property
    def is_all(self) -> bool:
        """Whether it is every row that was checked."""
        return len(self.reasons) == self.num_checked

    def __str__(self) -> str:
        """One line: how many rows, the first of them, and what is wrong with the very first."""
        rows = list(self.reasons)
        named = ", ".join(f"{row:,}" for row in rows[:_SHOWN_ROWS]) + ", ..." * (len(rows) > _SHOWN_ROWS)
        first = f"the first {self.num_checked:,} of " if self.num_checked < self.num_rows else ""
        return (
            f"{self.verifier} can judge no response to {len(rows):,} of {first}{self.num_rows:,} rows "
            f"({'rows' if len(rows) > 1 else 'row'} {named}); row {rows[0]:,}: {self.reasons[rows[0]]}"
        )


def unusable_rows(
    problems: Sequence[Problem],
    verifier: str | Mapping[str, float],
    options: Mapping[str, Any],
    *,
    time_s: float = TIME_S,
) -> list[UnusableRows]:
    """The rows that each verifier of a `reward` section cannot judge, as far as it can find out without a response.

    Args:
        problems: the rows of a data set, in order.
        verifier: `reward.verifier`.
        options: `reward.options`.
        time_s: processor time for each verifier, after which no more rows are checked once one can be judged.

    Returns:
        One entry per verifier with such rows.

    Raises:
        RewardError: the section makes no sense, or names a verifier that does not exist.
    """
    spec = RewardSpec.of(verifier, options=options)
    found = []
    for name in spec.weights:
        check = problem_check(name, spec.options[name])
        if check is None:
            continue
        reasons, num_checked = _reasons(name, check, problems, time_s)
        if reasons:
            found.append(UnusableRows(name, reasons, num_checked, len(problems)))
    return found


def _reasons(
    name: str, check: Callable[[Problem], str | None], problems: Sequence[Problem], time_s: float
) -> tuple[dict[int, str], int]:
    """Why rows cannot be judged, by their numbers, and how many were checked: one that can be is among them."""
    checked: dict[int, str | None] = {}  # by object: equal rows of a file share one
    reasons: dict[int, str] = {}
    end = time.process_time() + time_s
    for row, problem in enumerate(problems, 1):
        if id(problem) not in checked:
            if time.process_time() > end and len(reasons) < row - 1:
                return reasons, row - 1
            reason = check(problem)
            checked[id(problem)] = None if reason is None else reason.removeprefix(f"{name}: ")
        if (why := checked[id(problem)]) is not None:
            reasons[row] = why
    return reasons, len(problems)


def warnings_about_rows(
    problems: Sequence[Problem], verifier: str | Mapping[str, float], options: Mapping[str, Any], *, where: str
) -> list[str]:
    """What to say about rows that cannot be judged, one line per verifier; `where` names the data, as `data.train`.

    Raises RewardError where a verifier can judge none of the rows.
    """
    lines = []
    for unusable in unusable_rows(problems, verifier, options):
        line = f"{where}: {unusable}"
        if unusable.is_all:
            raise RewardError(line)
        lines.append(line)
    return lines
