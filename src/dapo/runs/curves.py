"""Plots the curves of a run: accuracy, response length, entropy and the outcomes of groups."""

import re
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.files import atomic_file
from dapo.core.terminal import printable
from dapo.runs.metric_table import is_mean_score, metric_of
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.outcomes import OUTCOMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

BLUE = "#2563eb"
ORANGE = "#ea580c"
GREEN = "#16a34a"
RED = "#dc2626"
INK = "#334155"
GRID = "#e2e8f0"
EVALUATION_COLOURS = (ORANGE, GREEN, RED, "#7c3aed")
MARGINS = {
    "left": 0.07,
    "right": 0.935,
    "top": 0.885,
    "bottom": 0.085,
    "wspace": 0.24,
    "hspace": 0.21,
}
"""Margins of the figure and its panels; matplotlib would measure every text to compute them, which
is slow.
"""
LABEL_DISTANCE = 0.12
"""Distance of a vertical axis label from its panel in panel widths, with space for five digits."""
SIDE_MARGINS = MARGINS | {"left": 0.2, "right": 0.95, "hspace": 0.35}
"""Margins of the panels about predictions."""
SKIPPED = "rollout/problems_skipped"
DECIDED_COUNTS = tuple(
    f"groups_{outcome}" for outcome in OUTCOMES if outcome not in ("excess", "aborted", "stale")
)
SMOOTHED_FROM_STEPS = 15  # fewer steps are not smoothed


def plot_curves(metrics_jsonl: str | Path, out_png: str | Path, *, title: str = "") -> None:
    """Plot the curves of a run into a PNG file (see `curves_figure`).

    Raises DataError if the metrics hold no steps.
    """
    save_figure(curves_figure(metrics_jsonl, title=title), Path(out_png))


def new_figure(width: float, height: float, title: str, **layout: Any) -> "Figure":
    """Make an empty figure of a size in inches with a title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, **layout)
    FigureCanvasAgg(figure)  # pyplot would select a backend for the whole process
    if title:
        figure.suptitle(plain_text(title), color=INK, fontsize=13, x=0.01, ha="left")
    return figure


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure as a PNG file, and return its path."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def curves_figure(metrics_jsonl: str | Path, *, title: str = "") -> "Figure":
    """Plot the four curves that the paper monitors (Fig. 7).

    Of a supervised run these are accuracy, loss, entropy and the probability of the demonstrations'
    tokens. With `dynamic_sampling.predict` two more show the skipped problems and the calibration
    of predictions. Metrics that were not logged are left out. Raises DataError if the file holds no
    steps.
    """
    records = list(metrics_by_step(metrics_jsonl).values())
    if not records:
        raise DataError(f"{metrics_jsonl} holds no steps yet: there is nothing to plot")
    has_predictions = any(SKIPPED in record for record in records)
    figure = new_figure(15 if has_predictions else 11, 7, title)
    parts: Any = figure.subfigures(1, 2, width_ratios=(3, 1)) if has_predictions else (figure,)
    panels = parts[0].subplots(2, 2, sharex=True, gridspec_kw=MARGINS)
    _accuracy(panels[0, 0], records)
    _entropy(panels[1, 0], records)
    if any("loss/nll" in record for record in records):
        _likelihood(panels[0, 1], panels[1, 1], records)
    else:
        _length(panels[0, 1], records)
        _groups(panels[1, 1], records)
    if has_predictions:
        upper, lower = parts[1].subplots(2, 1, gridspec_kw=SIDE_MARGINS)
        _skipped(upper, records)
        _calibration(lower, records)
    _caption(figure, [record["step"] for record in records])
    return figure


def _accuracy(axes: "Axes", records: Sequence[Record]) -> None:
    names = _evaluation_names(records)
    has_scores = any(is_mean_score(record, name) for record in records for name in names)
    has_accuracy = any("reward/accuracy" in record for record in records)
    is_binary = not has_scores and (
        has_accuracy or not any("reward/score_mean" in record for record in records)
    )
    if is_binary:
        frame(axes, title="Accuracy", unit="correct (%)")
        _curve(
            axes, records, "reward/accuracy", colour=BLUE, label="training: all judged responses"
        )
    else:
        frame(axes, title="Score", unit="mean score of the verifier")
        _curve(
            axes, records, "reward/score_mean", colour=BLUE, label="training: all judged responses"
        )
    for name, colour in zip(names, EVALUATION_COLOURS, strict=False):
        _evaluation(axes, records, name, colour, scale=1.0 if is_binary else 0.01)
    if is_binary:
        axes.set_ylim(0, min(102.0, axes.get_ylim()[1]))
    _legend(axes)


def _evaluation(
    axes: "Axes", records: Sequence[Record], name: str, colour: str, *, scale: float
) -> None:
    steps, accuracy = _series(records, f"eval/{name}/accuracy", scale)
    low, high = (
        dict(zip(*_series(records, f"eval/{name}/{end}", scale), strict=True))
        for end in ("low", "high")
    )
    label = f"held out: {plain_text(name)}"
    if low:
        # an interval may just miss its mean by rounding; matplotlib refuses negative bars, and NaN
        # stays NaN
        below = [
            max(mean - low.get(step, nan), 0.0) for step, mean in zip(steps, accuracy, strict=True)
        ]
        above = [
            max(high.get(step, nan) - mean, 0.0) for step, mean in zip(steps, accuracy, strict=True)
        ]
        axes.errorbar(
            steps, accuracy, yerr=[below, above], color=colour, capsize=3, linewidth=1.2, zorder=4
        )
        label += " (95 % interval)"
    axes.plot(
        steps,
        accuracy,
        color=colour,
        marker="o",
        markersize=4.5,
        linewidth=1.2,
        label=label,
        zorder=4,
    )


def _length(axes: "Axes", records: Sequence[Record]) -> None:
    frame(axes, title="Response length", unit="mean length (tokens)")
    _curve(axes, records, "rollout/response_tokens_mean", colour=BLUE)
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(BLUE)
    truncated = axes.twinx()
    frame(truncated, title="", unit="truncated (%)")
    truncated.yaxis.set_label_coords(1 + LABEL_DISTANCE, 0.5)
    _curve(truncated, records, "rollout/truncated_fraction", colour=ORANGE, width=1.2)
    truncated.set_ylim(0, max(10.0, truncated.get_ylim()[1]))
    truncated.yaxis.label.set_color(ORANGE)
    truncated.grid(False)


def _entropy(axes: "Axes", records: Sequence[Record]) -> None:
    frame(
        axes,
        title="Entropy of the policy at the sampled positions",
        unit=metric_of("loss/entropy").unit,
    )
    _curve(axes, records, "loss/entropy", colour=BLUE)
    axes.set_xlabel("training step", color=INK)
    axes.set_ylim(bottom=0)


def _likelihood(loss: "Axes", probability: "Axes", records: Sequence[Record]) -> None:
    """Plot what supervised steps have instead of responses: the loss, and the probability of the
    imitated tokens.
    """
    frame(loss, title="Loss: negative log-probability of the demonstrations", unit="nats per token")
    _curve(loss, records, "loss/nll", colour=BLUE)
    loss.set_ylim(bottom=0)
    frame(probability, title="Mean probability of the demonstrations' tokens", unit="probability")
    _curve(probability, records, "loss/token_prob_mean", colour=BLUE)
    probability.set_xlabel("training step", color=INK)
    probability.set_ylim(0, 1.02)


def _groups(axes: "Axes", records: Sequence[Record]) -> None:
    frame(axes, title="Outcomes of the groups", unit="of judged groups (%)")
    _curve(axes, records, "rollout/keep_rate", colour=BLUE, label="train")
    _curve(axes, records, "rollout/all_correct_fraction", colour=GREEN, label="all correct")
    _curve(axes, records, "rollout/all_wrong_fraction", colour=RED, label="all wrong")
    axes.set_xlabel("training step", color=INK)
    axes.set_ylim(0, 102)
    _legend(axes)


def _skipped(axes: "Axes", records: Sequence[Record]) -> None:
    """Plot the skipped problems of the stream (`dynamic_sampling.predict`)."""
    frame(axes, title="Problems skipped", unit="of the stream (%)")
    points = []
    for record in records:
        sampled = sum(record.get(f"rollout/{groups}", 0) for groups in DECIDED_COUNTS)
        if total := record.get(SKIPPED, 0) + sampled:
            points.append((record["step"], 100 * record.get(SKIPPED, 0) / total))
    axes.plot(
        *zip(*points, strict=True),
        color=BLUE,
        linewidth=2.0,
        marker="o" if len(points) == 1 else None,
    )
    axes.set_ylim(0, 102)


def _calibration(axes: "Axes", records: Sequence[Record]) -> None:
    """Plot the frequency of groups with a signal by predicted chance; correct predictions are on
    the diagonal.
    """
    frame(axes, title="Calibration, 2 % of the problems", unit="groups with a signal (%)")
    axes.set_xlabel("predicted chance of a signal (%)", color=INK)
    axes.plot((0, 100), (0, 100), color=INK, linewidth=0.8, linestyle="--")
    for predicted, observed, count in reliability(records):
        axes.plot(100 * predicted, 100 * observed, color=BLUE, marker="o", markersize=4.5)
        axes.annotate(f" {count}", (100 * predicted, 100 * observed), color=INK, fontsize=8)
    axes.set_xlim(-2, 102)
    axes.set_ylim(-2, 108)


def reliability(records: Sequence[Record]) -> list[tuple[float, float, int]]:
    """Return mean chance, frequency of a signal and number of groups for each bin of predicted
    chances.
    """
    sums: dict[str, dict[str, float]] = {}
    for record in records:
        for name, value in record.items():
            if match := re.fullmatch(r"rollout/calibration_(groups|chance|signals)_(\w+)", name):
                of_bin = sums.setdefault(
                    match[2], dict.fromkeys(("groups", "chance", "signals"), 0)
                )
                of_bin[match[1]] += value
    ordered = sorted(sums.values(), key=lambda each: each["chance"] / each["groups"])
    return [
        (each["chance"] / each["groups"], each["signals"] / each["groups"], int(each["groups"]))
        for each in ordered
    ]


def frame(axes: "Axes", *, title: str, unit: str) -> None:
    """Set a panel's title, the unit of its vertical axis, and the shared grid and tick marks."""
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", y=1.0, pad=10)
    axes.set_ylabel(unit, color=INK)
    axes.yaxis.set_label_coords(-LABEL_DISTANCE, 0.5)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)


def _curve(
    axes: "Axes",
    records: Sequence[Record],
    metric: str,
    *,
    colour: str,
    label: str | None = None,
    width: float = 2.0,
) -> None:
    steps, values = _series(records, metric)
    if not steps:
        return
    # a point between two gaps has no line
    alone = [
        i
        for i in range(len(steps))
        if all(isnan(each) for each in (*values[i - 1 : i], *values[i + 1 : i + 2]))
    ]
    if len(steps) >= SMOOTHED_FROM_STEPS:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(
        steps,
        smoothed(values),
        color=colour,
        linewidth=width,
        marker="o",
        markevery=alone,
        label=label,
    )


def _caption(figure: "Figure", steps: Sequence[int]) -> None:
    margin = max(0.5, 0.02 * (max(steps) - min(steps)))
    figure.axes[0].set_xlim(min(steps) - margin, max(steps) + margin)
    figure.axes[0].locator_params(axis="x", integer=True)
    if len(steps) >= SMOOTHED_FROM_STEPS:
        note = f"thick lines: running mean over {smoothing_window(len(steps))} steps"
        figure.supxlabel(note, color=INK, fontsize=8, x=0.99, ha="right")


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="best")


def _series(
    records: Sequence[Record], metric: str, scale: float = 1.0
) -> tuple[list[int], list[float]]:
    """Return the steps of a metric's curve and its values, NaN for a gap in its line; fractions are
    in per cent.

    A step without a value is a gap in a metric of training; an evaluation without a verdict is one
    in its accuracy.
    """
    scale *= metric_of(metric).scale
    is_evaluation = metric.startswith("eval/")
    of_data = metric.rpartition("/")[0]
    points: list[tuple[int, float]] = []
    for record in records:
        step = record["step"]
        value = record.get(metric)
        if points and not is_evaluation and step > points[-1][0] + 1:
            points.append((step - 1, nan))
        if value is not None or not is_evaluation or f"{of_data}/truncated_fraction" in record:
            points.append((step, nan if value is None else value * scale))
    known = [i for i, (_, value) in enumerate(points) if not isnan(value)]
    inside = points[known[0] : known[-1] + 1] if known else []
    return [step for step, _ in inside], [value for _, value in inside]


def _evaluation_names(records: Sequence[Record]) -> list[str]:
    """List the evaluations in order of appearance; only the ones with an interval, if there are
    any.
    """
    metrics = dict.fromkeys(metric for record in records for metric in record)
    names = [
        m.removeprefix("eval/").removesuffix("/accuracy") for m in metrics if m.startswith("eval/")
    ]
    names = [name for name in names if f"eval/{name}/accuracy" in metrics]
    return [name for name in names if f"eval/{name}/low" in metrics] or names


def smoothing_window(steps: int) -> int:
    """Return the odd number of steps over which a curve of `steps` steps is averaged."""
    return max(3, steps // 10) | 1


def smoothed(values: Sequence[float]) -> Sequence[float]:
    """Compute the running mean of a curve without its gaps, over fewer values at its ends, from
    some steps on.
    """
    if len(values) < SMOOTHED_FROM_STEPS:
        return values
    half = smoothing_window(len(values)) // 2
    around = [
        [v for v in values[max(0, i - half) : i + half + 1] if not isnan(v)]
        for i in range(len(values))
    ]
    return [
        nan if isnan(value) else sum(near) / len(near)
        for value, near in zip(values, around, strict=True)
    ]


def plain_text(text: str) -> str:
    """Escape text for a figure, where `$` begins a formula, and characters without a glyph in its
    fonts, too.
    """
    shown = []
    for character in printable(text):
        if not character.isascii() and not _has_glyph(character):
            character = character.encode("ascii", "backslashreplace").decode()
        shown.append(r"\$" if character == "$" else character)
    return "".join(shown)


def _has_glyph(character: str) -> bool:
    """Whether a font of matplotlib's configuration has the character, in normal and in bold
    weight.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    for weight in ("normal", "bold"):
        families = FontProperties().get_family()
        fonts = [
            get_font(findfont(FontProperties(family=family, weight=weight))) for family in families
        ]
        if not any(font.get_char_index(ord(character)) for font in fonts):
            return False
    return True
