"""A rule, and its finding: the problem, the numbers that show it, the cause, and the option to change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dapo.config import Config
from dapo.training.rules.history import MetricHistory

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: what the run learns is in doubt; warning: it learns less than it could; note: an option has no effect."""


@dataclass(frozen=True)
class Finding:
    """One problem of a run at one of its steps."""

    name: str
    severity: Severity
    cause: str
    """The problem and its reason in plain words, with the numbers that matter most."""
    evidence: Mapping[str, float]
    """The metrics that show it, as means over the steps unless the rule's page says otherwise."""
    change: tuple[str, ...]
    """Options with values that would fix it, `reward.workers=8`, the likeliest first."""
    steps: tuple[int, int]
    """The first and the last step of the window."""
    advice: str = ""
    """The remedy where an option alone is not enough."""

    def one_line(self) -> str:
        """The cause and the remedy on one line."""
        remedy = f"try {' or '.join(self.change)}" if self.change else self.advice
        return f"{self.cause}; {remedy}"


@dataclass(frozen=True)
class Rule:
    """A condition on the last steps of a run."""

    name: str
    check: Callable[[MetricHistory, Config], Finding | None]
    response: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether a row of the rollout table is an example of it; None where single responses show nothing."""


def finding(
    history: MetricHistory,
    name: str,
    severity: Severity,
    cause: str,
    *,
    evidence: Mapping[str, float | None],
    change: tuple[str, ...],
    advice: str = "",
) -> Finding:
    """A finding about the history's window; evidence without a value is left out."""
    found = {key: value for key, value in evidence.items() if value is not None}
    return Finding(name, severity, cause, found, change, history.span(), advice)
