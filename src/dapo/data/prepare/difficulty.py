"""How hard problems are for a policy: pass rates, and what dynamic sampling would keep of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class PassRate:
    """How often one problem was answered correctly."""

    problem_id: str
    responses: int
    """Judged right or wrong; others do not count."""
    correct: int
    visits: int = 1
    """How many groups were sampled."""
    last_seen: int | None = None
    """The training step of the newest group."""

    @property
    def rate(self) -> float:
        """Of the judged responses."""
        return self.correct / self.responses

    def as_json(self) -> dict[str, Any]:
        """Of a report."""
        return {
            "id": self.problem_id,
            "pass_rate": self.rate,
            "responses": self.responses,
            "correct": self.correct,
            "visits": self.visits,
            "last_seen": self.last_seen,
        }


def pass_rates(rows: Iterable[Mapping[str, Any]]) -> dict[str, PassRate]:
    """From the judged responses of a run (`step`, `group_id`, `problem_id`, `correct`), by problem id.

    Responses without a right or wrong are left out, and so are problems that have no others.
    """
    found: dict[str, PassRate] = {}
    groups: dict[str, set[tuple[int, int]]] = {}
    for row in rows:
        if row["correct"] is None:
            continue
        key = row["problem_id"]
        before = found.get(key, PassRate(key, 0, 0))
        groups.setdefault(key, set()).add((row["step"], row["group_id"]))
        found[key] = replace(
            before,
            responses=before.responses + 1,
            correct=before.correct + bool(row["correct"]),
            visits=len(groups[key]),
            last_seen=max(row["step"], before.last_seen if before.last_seen is not None else row["step"]),
        )
    return found


def keep_probability(pass_rate: float, group_size: int) -> float:
    """1 - p^G - (1 - p)^G: the chance that a group of G has right and wrong responses (Eq. 11)."""
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


def describe_difficulty(rates: Sequence[PassRate], group_size: int) -> dict[str, Any]:
    """Pass rates in tenths, those that are never or always right, and the keep rate to expect; JSON values.

    The keep rate puts measured rates into a concave function, so with few responses a problem it comes out too low.
    """
    histogram = [0] * 10
    for rate in rates:
        # in whole numbers: 0.3 belongs to the fourth tenth whatever 3 / 10 rounds to
        histogram[min(9, 10 * rate.correct // rate.responses)] += 1
    return {
        "problems": len(rates),
        "responses": sum(rate.responses for rate in rates),
        "mean_pass_rate": fmean(rate.rate for rate in rates) if rates else None,
        "never_correct": sum(rate.correct == 0 for rate in rates),
        "always_correct": sum(rate.correct == rate.responses for rate in rates),
        "histogram": histogram,
        "group_size": group_size,
        "expected_keep_rate": fmean(keep_probability(rate.rate, group_size) for rate in rates) if rates else None,
    }
