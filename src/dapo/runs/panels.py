"""Decides what the curves of a run show: panels, series, names, units, colours, gaps and smoothing.

The console, the notebook, `curves.png` and the pictures of `dapo ablate` draw what this module
returns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

from dapo.runs.metric_table import is_mean_score, metric_of

Record = Mapping[str, Any]
"""The metrics of a step, with `step`."""

BLUE = "#2563eb"
ORANGE = "#ea580c"
GREEN = "#16a34a"
RED = "#dc2626"
INK = "#334155"
GRID = "#e2e8f0"
COLOURS = (
    BLUE,
    ORANGE,
    GREEN,
    RED,
    "#7c3aed",
    "#0891b2",
    "#a16207",
    "#db2777",
    "#65a30d",
    "#475569",
)
TRAINING = ("reward/accuracy", "reward/score_mean")
"""The metrics of which training has one: of verdicts, and of scores."""
MAX_EVALUATIONS = 4  # of several data sets, in one panel
SMOOTHED_FROM_STEPS = 15  # fewer steps are not smoothed
_PERCENT = 100.0


@dataclass(frozen=True)
class Series:
    """A metric as a curve of a panel."""

    metric: str
    label: str  # empty where the title of the panel says what it is
    colour: str
    scale: float

    @property
    def is_percent(self) -> bool:
        return self.scale == _PERCENT

    @property
    def data(self) -> str | None:
        """The data set of an evaluation, drawn as points with intervals; None for training."""
        name = self.metric.removeprefix("eval/").removesuffix("/accuracy")
        return name if self.metric.startswith("eval/") else None


@dataclass(frozen=True)
class Panel:
    """Series with one vertical axis."""

    title: str
    unit: str
    series: tuple[Series, ...]
    begins_at_zero: bool = True
    top: float | None = None  # the upper end of the axis; None: by the values
    has_room_above: bool = True  # whether the axis goes up to `top` where the values are far below
    right: "Panel | None" = None  # the series of a second axis, on the right


def panels_of(records: Sequence[Record]) -> list[Panel]:
    """Return the four panels of the paper's Fig. 7; of a supervised run also loss and probability.

    A panel leaves out the metrics that were not logged.
    """
    logged = dict.fromkeys(name for record in records for name in record)
    has_scores = any(has_mean_scores(record) for record in records)
    entropy = _panel("Entropy of the policy at the sampled positions", {"loss/entropy": ""}, logged)
    if "loss/nll" in logged:
        loss = _panel(
            "Loss: negative log-probability of the demonstrations", {"loss/nll": ""}, logged
        )
        imitated = {"loss/token_prob_mean": ""}
        probability = _panel(
            "Mean probability of the demonstrations' tokens", imitated, logged, top=1.02
        )
        return [_accuracy(logged, has_scores), loss, entropy, probability]
    truncated = _panel(
        "", {"rollout/truncated_fraction": ""}, logged, unit="truncated (%)", colours=(ORANGE,)
    )
    mean_length = {"rollout/response_tokens_mean": ""}
    length = _panel(
        "Response length", mean_length, logged, unit="mean length (tokens)", right=truncated
    )
    outcomes = {
        "rollout/keep_rate": "train",
        "rollout/all_correct_fraction": "all correct",
        "rollout/all_wrong_fraction": "all wrong",
    }
    unit = "of judged groups (%)"
    groups = _panel(
        "Outcomes of the groups", outcomes, logged, unit=unit, colours=(BLUE, GREEN, RED), top=102
    )
    return [_accuracy(logged, has_scores), length, entropy, groups]


def has_mean_scores(record: Mapping[str, Any]) -> bool:
    """Return True if an evaluation among the metrics of a step is a mean score."""
    return any(is_mean_score(record, name) for name in _evaluations(record))


def training_series(logged: Iterable[str], has_scores: bool) -> Series:
    """Return the accuracy of training, or the mean score where the verifier gives scores."""
    names = set(logged)
    is_binary = not has_scores and ("reward/accuracy" in names or "reward/score_mean" not in names)
    metric = "reward/accuracy" if is_binary else "reward/score_mean"
    return Series(metric, "training: all judged responses", BLUE, metric_of(metric).scale)


def held_out_unit(*, is_binary: bool) -> tuple[str, float]:
    """Return the unit of an evaluation's accuracy or mean score, and the factor of its values."""
    return ("correct (%)", _PERCENT) if is_binary else ("mean score of the verifier", 1.0)


def metric_unit(metric: str) -> tuple[str, float]:
    """Return the unit of a training metric and its factor; fractions are in per cent."""
    row = metric_of(metric)
    return ("%" if row.scale == _PERCENT else row.unit), row.scale


def _accuracy(logged: Mapping[str, Any], has_scores: bool) -> Panel:
    training = training_series(logged, has_scores)
    is_binary = training.metric == "reward/accuracy"
    unit, scale = held_out_unit(is_binary=is_binary)
    names = _evaluations(logged)
    held_out = [
        Series(f"eval/{name}/accuracy", f"held out: {name}", colour, scale)
        for name, colour in zip(names, COLOURS[1 : 1 + MAX_EVALUATIONS], strict=False)
    ]
    series = ([training] if training.metric in logged else []) + held_out
    if is_binary:
        return Panel("Accuracy", unit, tuple(series), top=102.0, has_room_above=False)
    return Panel("Score", unit, tuple(series), begins_at_zero=False)


def _panel(
    title: str,
    labels: Mapping[str, str],
    logged: Mapping[str, Any],
    *,
    unit: str | None = None,
    colours: Sequence[str] = COLOURS,
    **axis: Any,
) -> Panel:
    """Return a panel of metrics, each with its label; the default `unit` is the first one's."""
    series = tuple(
        Series(metric, label, colour, metric_of(metric).scale)
        for (metric, label), colour in zip(labels.items(), colours, strict=False)
        if metric in logged
    )
    return Panel(title, unit or metric_of(next(iter(labels))).unit, series, **axis)


def _evaluations(logged: Mapping[str, Any]) -> list[str]:
    """List the evaluations in order of appearance; only those with an interval if any has one."""
    names = [
        name.removeprefix("eval/").removesuffix("/accuracy")
        for name in logged
        if name.startswith("eval/")
    ]
    names = [name for name in names if f"eval/{name}/accuracy" in logged]
    return [name for name in names if f"eval/{name}/low" in logged] or names


def points_of(
    records: Sequence[Record], metric: str, scale: float
) -> tuple[list[int], list[float]]:
    """Return the steps of a metric's curve and its scaled values, NaN for a gap in its line.

    A step without a value is a gap in a metric of training; an evaluation without a verdict is one
    in its accuracy.
    """
    is_evaluation = metric.startswith("eval/")
    data_set = metric.rpartition("/")[0]
    points: list[tuple[int, float]] = []
    for record in records:
        step = record["step"]
        value = record.get(metric)
        if points and not is_evaluation and step > points[-1][0] + 1:
            points.append((step - 1, nan))
        if value is not None or not is_evaluation or f"{data_set}/truncated_fraction" in record:
            points.append((step, nan if value is None else value * scale))
    value_indices = [i for i, (_, value) in enumerate(points) if not isnan(value)]
    inside = points[value_indices[0] : value_indices[-1] + 1] if value_indices else []
    return [step for step, _ in inside], [value for _, value in inside]


def smoothing_window(steps: int) -> int:
    """Return the odd number of steps over which a curve of `steps` steps is averaged."""
    return max(3, steps // 10) | 1


def smoothed(values: Sequence[float]) -> Sequence[float]:
    """Return the running mean of a long curve without its gaps, of fewer values at its ends."""
    if len(values) < SMOOTHED_FROM_STEPS:
        return values
    half = smoothing_window(len(values)) // 2
    means = []
    for i, value in enumerate(values):
        near = [
            neighbour
            for neighbour in values[max(0, i - half) : i + half + 1]
            if not isnan(neighbour)
        ]
        means.append(nan if isnan(value) else sum(near) / len(near))
    return means
