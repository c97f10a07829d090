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
HEAD_ROOM = 0.05
"""What an axis shows above and below its values, as a part of their span: lines at the ends stay
whole.
"""
LEAST_SPAN = 0.2
"""The least span of an axis, as a part of its largest value: a smaller change is drawn as small."""


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
    top: float | None = None  # the largest possible value; None: by the values
    least_top: float = 0.0  # the axis shows at least this value
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
            "Mean probability of the demonstrations' tokens", imitated, logged, top=1.0
        )
        return [_accuracy(logged, has_scores), loss, entropy, probability]
    truncated = _panel(
        "",
        {"rollout/truncated_fraction": ""},
        logged,
        unit="truncated (%)",
        colours=(ORANGE,),
        least_top=10.0,
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
        "Outcomes of the groups", outcomes, logged, unit=unit, colours=(BLUE, GREEN, RED), top=100
    )
    return [_accuracy(logged, has_scores), length, entropy, groups]


def axis_limits(panel: Panel, low: float, high: float) -> tuple[float, float]:
    """Return the ends of a panel's vertical axis for values from `low` to `high`."""
    if panel.begins_at_zero:
        low = min(0.0, low)
    high = max(high, panel.least_top)
    if panel.top is not None and panel.has_room_above:
        high = panel.top
    missing = LEAST_SPAN * max(abs(low), abs(high)) - (high - low)
    if missing > 0:
        low -= missing / 2
        high += missing / 2
    span = (high - low) or 1.0
    return low - HEAD_ROOM * span, high + HEAD_ROOM * span


def has_mean_scores(record: Mapping[str, Any]) -> bool:
    """Return True if an evaluation among the metrics of a step is a mean score."""
    return any(is_mean_score(record, name) for name in _evaluations(record))


def training_series(logged: Iterable[str], has_scores: bool) -> Series:
    """Return the accuracy of training, or the mean score where the verifier gives scores."""
    names = set(logged)
    # before the first step neither is logged
    has_only_scores = "reward/score_mean" in names and "reward/accuracy" not in names
    metric = "reward/score_mean" if has_scores or has_only_scores else "reward/accuracy"
    return Series(metric, "training: all judged responses", BLUE, metric_of(metric).scale)


def held_out_unit(*, is_binary: bool) -> tuple[str, float]:
    """Return the unit of an evaluation's accuracy or mean score, and the factor of its values."""
    if is_binary:
        return "correct (%)", _PERCENT
    return "mean score of the verifier", 1.0


def metric_unit(metric: str) -> tuple[str, float]:
    """Return the unit of a training metric and its factor; fractions are in per cent."""
    row = metric_of(metric)
    unit = "%" if row.scale == _PERCENT else row.unit
    return unit, row.scale


def _accuracy(logged: Mapping[str, Any], has_scores: bool) -> Panel:
    """Return the panel of training and evaluations, as accuracies or as mean scores."""
    training = training_series(logged, has_scores)
    is_binary = training.metric == "reward/accuracy"
    unit, scale = held_out_unit(is_binary=is_binary)
    series = []
    if training.metric in logged:
        series.append(training)
    # the first colour is that of training
    colours = COLOURS[1 : 1 + MAX_EVALUATIONS]
    for name, colour in zip(_evaluations(logged), colours, strict=False):
        series.append(Series(f"eval/{name}/accuracy", f"held out: {name}", colour, scale))
    if is_binary:
        return Panel("Accuracy", unit, tuple(series), top=100.0, has_room_above=False)
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
    """Return a panel of the metrics that were logged.

    Args:
        title: what the panel shows.
        labels: the label of each metric.
        logged: the names of the logged metrics.
        unit: the unit of the axis; None: that of the first metric.
        colours: a colour for each metric, logged or not.
        axis: other fields of `Panel`.
    """
    series = []
    for (metric, label), colour in zip(labels.items(), colours, strict=False):
        if metric in logged:
            series.append(Series(metric, label, colour, metric_of(metric).scale))
    if unit is None:
        unit = metric_of(next(iter(labels))).unit
    return Panel(title, unit, tuple(series), **axis)


def _evaluations(logged: Mapping[str, Any]) -> list[str]:
    """List the evaluations in order of appearance; only those with an interval if any has one."""
    metrics = [name.removeprefix("eval/") for name in logged if name.startswith("eval/")]
    names = [name.removesuffix("/accuracy") for name in metrics if name.endswith("/accuracy")]
    # the sources of an evaluation have an accuracy, but no interval
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
    # a curve begins and ends with a value
    while points and isnan(points[0][1]):
        points.pop(0)
    while points and isnan(points[-1][1]):
        points.pop()
    return [step for step, _ in points], [value for _, value in points]


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
        if isnan(value):
            means.append(nan)  # the gap stays
            continue
        window = values[max(0, i - half) : i + half + 1]
        numbers = [number for number in window if not isnan(number)]
        means.append(sum(numbers) / len(numbers))
    return means
