"""The metrics that the rules read: a run's first steps, its last ones, and its evaluations, of
bounded size.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dapo.libs.sample_intervals import difference_variance
from dapo.runs.metric_table import is_mean_score
from dapo.training.rules.mean_test import MeanTest

WINDOW = 5  # the number of last steps that a rule reads
FIRST = 3  # the number of first steps that these are compared with
LONG = 64  # the number of last steps that define what is usual for the run
MIN_STEPS = 3  # steps that a rule over means or rates needs: fewer are too few responses
# the fraction of groups with a signal below which most of the sampling is wasted
MIN_KEEP_RATE = 0.25
GAIN = 0.05  # the gain in accuracy, or in the mean score, from which a run has learned
AUDIT_GAP = 0.1
"""The gap between the reward's verifier and the audit's, in accuracy or score, that two honest ones
may have.
"""
MAY_DIVERGE = (
    "loss/",
    "optim/grad_norm",
    "rollout/engine_logprob_gap_mean",
    "rollout/engine_logprob_gap_max",
)
_OF_EVERY_STEP = ("rollout/groups_generated", "rollout/tokens_in_minibatches")
"""Metrics of which a line of a training step has one; a supervised step generates no group."""
_OF_EVALUATION = ("accuracy", "low", "high", "truncated_fraction")


@dataclass(frozen=True)
class EvaluationPoint:
    """The accuracy of one evaluation with its 95 % interval, and its fraction of cut responses."""

    step: int
    accuracy: float
    low: float
    high: float
    truncated: float
    is_score: bool = False  # the accuracy is a mean score


@dataclass
class MetricHistory:
    """The metrics of a run, added one line of `metrics.jsonl` after the other.

    Values of `MAY_DIVERGE` that are not finite are NaN, a symptom, and others are left out.
    metrics.jsonl holds null for both, so a history that is read from it equals the one that was
    kept while the run trained.
    """

    step: int = 0  # the newest step
    steps: int = 0  # the number of training steps added
    first: list[dict[str, float]] = field(default_factory=list)
    last: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=LONG))
    first_evaluation: EvaluationPoint | None = None
    best_evaluation: EvaluationPoint | None = None
    last_evaluation: EvaluationPoint | None = None
    evaluations: int = 0
    evaluated: str | None = None
    """`eval/` and the name of the newest evaluation's data; the points before are of the same."""
    audit: MeanTest = field(default_factory=lambda: MeanTest(AUDIT_GAP))
    """Whether the gap to the audit's verifier is above AUDIT_GAP."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line: `{"step": 12, "reward/mean": 0.5, ...}`.

        A further line of the same step is merged into it.
        """
        step = int(record["step"])
        numbers = {name: _number(value) for name, value in record.items() if name != "step"}
        values = {
            name: n
            for name, n in numbers.items()
            if math.isfinite(n) or name.startswith(MAY_DIVERGE)
        }
        if step == self.step and self.last:
            self.last[-1].update(values)
        elif any(name in values for name in _OF_EVERY_STEP):
            self.steps += 1
            self.last.append(values)
            self.first = [*self.first, values][:FIRST]
        self.step = step
        self._add_audit(values)
        self._add_evaluation(step, values)

    def window(self, steps: int = WINDOW) -> list[dict[str, float]]:
        """Return the metrics of at most `steps` last steps."""
        return list(self.last)[-steps:]

    def span(self) -> tuple[int, int]:
        return max(0, self.step - max(1, len(self.window())) + 1), self.step

    def mean(self, name: str) -> float | None:
        """Return the mean over the window's steps that have the metric; None where none has."""
        return _mean(name, self.window())

    def means(self, *names: str) -> dict[str, float | None]:
        """Return the means by name, as evidence of a finding."""
        return {name: self.mean(name) for name in names}

    def median(self, name: str) -> float | None:
        """Return the median of the window's finite values, which one step does not decide."""
        values = [value for value in self.values(name) if not math.isnan(value)]
        return median(values) if values else None

    def first_mean(self, name: str) -> float | None:
        """Return the mean over the first steps; None without values or if the window overlaps."""
        return _mean(name, self.first) if self.steps >= FIRST + WINDOW else None

    def total(self, *names: str) -> float:
        """Return the sum of metrics over the window; one that a step lacks is 0 there."""
        return math.fsum(record.get(name, 0.0) for record in self.window() for name in names)

    def rate(self, name: str) -> float:
        """Return the mean over the window with missing values as 0; 0 before MIN_STEPS."""
        return self.total(name) / len(self.window()) if self.steps >= MIN_STEPS else 0.0

    def values(self, name: str, steps: int = WINDOW) -> list[float]:
        """Return the metric in the last steps that have it, oldest first."""
        return [record[name] for record in self.window(steps) if name in record]

    @property
    def performance(self) -> str:
        """The metric to improve: accuracy, or the mean score if the verifier gives only scores."""
        return (
            "reward/accuracy" if self.mean("reward/accuracy") is not None else "reward/score_mean"
        )

    @property
    def gain(self) -> float | None:
        """The gain in performance or, if larger, in held-out accuracy; None if unknown."""
        now = self.mean(self.performance)
        first = self.first_mean(self.performance)
        gains = [] if now is None or first is None else [now - first]
        first_point = self.first_evaluation
        last_point = self.last_evaluation
        if first_point is not None and last_point is not None and first_point is not last_point:
            gains.append(last_point.accuracy - first_point.accuracy)
        return max((gain for gain in gains if not math.isnan(gain)), default=None)

    def _add_audit(self, values: Mapping[str, float]) -> None:
        gap = values.get("audit/gap", math.nan)
        problems = int(values.get("audit/problems", 1))
        half = (values.get("audit/gap_high", math.nan) - values.get("audit/gap_low", math.nan)) / 2
        if math.isfinite(gap) and math.isfinite(half):
            self.audit.add(gap, num_problems=problems, variance=difference_variance(half, problems))
        # the mean of problems whose variance is unknown counts as one problem's value
        elif math.isfinite(gap):
            self.audit.add(gap)

    def _add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        name = _evaluated_data(values)
        if name is None:
            return
        accuracy, low, high, truncated = (
            values.get(f"{name}/{field}", math.nan) for field in _OF_EVALUATION
        )
        is_score = is_mean_score(values, name.removeprefix("eval/"))
        point = EvaluationPoint(step, accuracy, low, high, truncated, is_score)
        self.evaluations += 1
        if name != self.evaluated:
            # a fork or a resume has changed data.eval: accuracies on other data tell no gain
            self.evaluated = name
            self.first_evaluation = None
            self.best_evaluation = None
        self.first_evaluation = self.first_evaluation or point
        self.last_evaluation = point
        if self.best_evaluation is None or point.accuracy > self.best_evaluation.accuracy:
            self.best_evaluation = point


def _evaluated_data(values: Mapping[str, float]) -> str | None:
    """Return `eval/` and the name of the data set that a step evaluated; None: it evaluated none.

    Sources of the data have an accuracy alone. Scores that do not vary have no interval, and an
    evaluation without any verdict has no accuracy.
    """
    for name in values:
        data, _, figure = name.rpartition("/")
        is_of_data_set = data.startswith("eval/") and figure in ("high", "truncated_fraction")
        if is_of_data_set and f"{data}/accuracy" in values:
            return data
    return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _mean(name: str, records: Sequence[Mapping[str, float]]) -> float | None:
    values = [record[name] for record in records if name in record]
    return math.fsum(values) / len(values) if values else None
