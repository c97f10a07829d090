"""A rule, and its finding: the problem, the numbers that show it, the cause, and the option to
change.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeAlias

from dapo.config import Config
from dapo.training.rules.history import MetricHistory

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: the result of the run is in doubt; warning: it learns less than it could; note: an option
has no effect.
"""


@dataclass(frozen=True)
class Finding:
    """One problem of a run at one of its steps."""

    name: str
    severity: Severity
    cause: str  # the problem and its reason in plain words, with the numbers that matter most
    # metrics that show it: means over the steps, unless the rule's page says otherwise
    evidence: Mapping[str, float]
    # fixes, the likeliest first, as typed after `dapo resume RUN`: `reward.workers=8`
    change: tuple[str, ...]
    steps: tuple[int, int]  # the first and the last step of the window
    advice: str = ""  # the remedy where an option alone is not enough

    def one_line(self) -> str:
        """Return the cause and the remedy on one line."""
        remedy = f"try {' or '.join(self.change)}" if self.change else self.advice
        return f"{self.cause}; {remedy}"


@dataclass(frozen=True)
class Symptom:
    """A finding without its steps and the name of its rule; its fields are those of `Finding`."""

    cause: str
    evidence: Mapping[str, float | None]  # values that are None are left out of the finding
    change: tuple[str, ...] = ()
    advice: str = ""
    severity: Severity | None = None  # the severity where it differs from the rule's


def _missing_verdict(row: Mapping[str, Any]) -> str | None:
    """Return why a response has no verdict, of the reward or of the audit."""
    reason: str | None = row["error"] or row.get("audit_error")
    return reason


@dataclass(frozen=True)
class Rule:
    """A condition on the last steps of a run."""

    name: str
    severity: Severity
    symptom: Callable[[MetricHistory, Config], Symptom | None]
    response: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether a row of the rollout table is an example of it; None where single responses show
    nothing.
    """
    reason: Callable[[Mapping[str, Any]], str | None] = _missing_verdict
    """Why a row of the table is an example, in words: the error of its verdict, if it has one."""
    needs_rewards: bool = False
    """Whether it is a rule of runs that learn from rewards: others have a teacher alone or worked
    examples.
    """

    def check(self, history: MetricHistory, config: Config) -> Finding | None:
        """Return the finding at the history's last step, if the condition holds."""
        is_asked = config.learns_from_rewards or not self.needs_rewards
        symptom = self.symptom(history, config) if is_asked else None
        if symptom is None:
            return None
        evidence = {name: value for name, value in symptom.evidence.items() if value is not None}
        change = tuple(option for option in symptom.change if not _is_set(option, config))
        severity = symptom.severity or self.severity
        return Finding(
            self.name, severity, symptom.cause, evidence, change, history.span(), symptom.advice
        )


def _is_set(change: str, config: Config) -> bool:
    """Return True if each option of `section.name=value` has that value already."""
    # as a shell reads it: a name of a module may stand in quotes
    settings = [setting.partition("=") for setting in shlex.split(change)]
    return all(
        str(reduce(getattr, name.split("."), config)).lower() == value.lower()
        for name, _, value in settings
    )
