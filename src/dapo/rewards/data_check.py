"""Finds the rows of a data set that a reward cannot judge whatever the response, before anything is sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.core.errors import RewardError
from dapo.rewards.combine import RewardSpec
from dapo.rewards.verifier import problem_check
from dapo.types import Problem

_SHOWN_ROWS = 5


@dataclass(frozen=True)
class UnusableRows:
    """The rows that one verifier cannot judge: their numbers from 1 on, each with the reason."""

    verifier: str
    reasons: Mapping[int, str]
    num_rows: int  # of the whole data set

    def __str__(self) -> str:
        """One line: how many rows, the first of them, and what is wrong with the very first."""
        rows = list(self.reasons)
        named = ", ".join(f"{row:,}" for row in rows[:_SHOWN_ROWS]) + ", ..." * (len(rows) > _SHOWN_ROWS)
        return (
            f"{self.verifier} can judge no response to {len(rows):,} of {self.num_rows:,} rows "
            f"({'rows' if len(rows) > 1 else 'row'} {named}); row {rows[0]:,}: {self.reasons[rows[0]]}"
        )


def unusable_rows(
    problems: Sequence[Problem], verifier: str | Mapping[str, float], options: Mapping[str, Any]
) -> list[UnusableRows]:
    """The rows that each verifier of a `reward` section cannot judge, as far as it can find out without a response.

    Args:
        problems: the rows of a data set, in order.
        verifier: `reward.verifier`.
        options: `reward.options`.

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
        checked: dict[int, str | None] = {}  # by object: equal rows of a file share one
        for problem in problems:
            if id(problem) not in checked:
                reason = check(problem)
                checked[id(problem)] = None if reason is None else reason.removeprefix(f"{name}: ")
        reasons = {row: why for row, p in enumerate(problems, 1) if (why := checked[id(p)]) is not None}
        if reasons:
            found.append(UnusableRows(name, reasons, len(problems)))
    return found


def warnings_about_rows(
    problems: Sequence[Problem], verifier: str | Mapping[str, float], options: Mapping[str, Any], *, where: str
) -> list[str]:
    """What to say about rows that cannot be judged, one line per verifier; `where` names the data, as `data.train`.

    Raises RewardError where a verifier can judge none of the rows.
    """
    lines = []
    for unusable in unusable_rows(problems, verifier, options):
        line = f"{where}: {unusable}"
        if len(unusable.reasons) == unusable.num_rows:
            raise RewardError(line)
        lines.append(line)
    return lines
