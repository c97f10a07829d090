"""Plots the curves of a run: accuracy, response length, entropy and the outcomes of groups."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.files import atomic_file
from dapo.core.terminal import printable
from dapo.core.text import shorten
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import FREE_OPTIONS
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.outcomes import OUTCOMES
from dapo.runs.panels import (
    BLUE,
    GRID,
    INK,
    SMOOTHED_FROM_STEPS,
    Panel,
    Record,
    Series,
    axis_limits,
    panels_of,
    points_of,
    smoothed,
    smoothing_window,
)
from dapo.runs.stored_config import changed_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MARGINS = {
    "left": 0.07,
    "right": 0.935,
    "top": 0.885,
    "bottom": 0.085,
    "wspace": 0.24,
    "hspace": 0.27,
}
"""Margins of the figure and its panels; matplotlib would measure every text to compute them, which
is slow.
"""
TITLE_PAD = 6
"""Points between a panel, or its legend, and its title."""
LEGEND_SIZE = 8.5
LINE_HEIGHT = 1.35
SHORT_LABEL = 14
"""The size of a legend's text in points, the height of its lines as a multiple of it, and the
characters of labels of which three stand beside each other.
"""
SIDE_MARGINS = MARGINS | {"left": 0.2, "right": 0.95, "hspace": 0.35}
"""Margins of the panels about predictions."""
MAX_LABELS = 3
MAX_VALUE_CHARS = 24
"""Bounds of the label of a mark: its options, and the characters of a value."""
SKIPPED = "rollout/problems_skipped"
DECIDED_COUNTS = tuple(
    f"groups_{outcome}" for outcome in OUTCOMES if outcome not in ("excess", "aborted", "stale")
)


@dataclass(frozen=True)
class Mark:
    """A change of options by a resume, which a vertical line shows.

    Example: Mark(35, "reward changed", is_of_reward=True)
    """

    after_step: int
    label: str
    is_of_reward: bool  # evaluations before and after it are not comparable


def marks_of(run: RunDirectory) -> list[Mark]:
    """Return the changes of options that change a step, in the order of steps."""
    marks = []
    for step, options in changed_values(run).items():
        names = [name for name in options if not name.startswith(FREE_OPTIONS)]
        rewards = [name for name in names if name.startswith("reward.")]
        others = [name for name in names if name not in rewards]
        labels = ["reward changed"] if rewards else []
        labels += [f"{name}={_short(options[name])}" for name in others]
        if len(labels) > MAX_LABELS:
            labels = [*labels[: MAX_LABELS - 1], f"{len(labels) - MAX_LABELS + 1} more options"]
        if labels:
            marks.append(Mark(step, ", ".join(labels), bool(rewards)))
    return marks


def _short(value: Any) -> str:
    return shorten(str(value), MAX_VALUE_CHARS, keep="ends")


def plot_curves(
    metrics_jsonl: str | Path,
    out_png: str | Path,
    *,
    title: str = "",
    marks: Sequence[Mark] = (),
) -> None:
    """Plot the curves of a run into a PNG file (see `curves_figure`).

    Raises:
        DataError: the metrics hold no steps.
    """
    save_figure(curves_figure(metrics_jsonl, title=title, marks=marks), Path(out_png))


def new_figure(width: float, height: float, title: str, **layout: Any) -> "Figure":
    """Make an empty figure with a title.

    Args:
        width: the width in inches.
        height: the height in inches.
        title: its text; empty: none.
        layout: other arguments of matplotlib's `Figure`.
    """
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
        # the name of the temporary file does not end in .png
        figure.savefig(temporary, format="png")
    return path


def curves_figure(
    metrics_jsonl: str | Path, *, title: str = "", marks: Sequence[Mark] = ()
) -> "Figure":
    """Plot the panels of `panels_of`, with a vertical line at each of the `marks`.

    With `dynamic_sampling.predict` two more show the skipped problems and the calibration of
    predictions.

    Raises:
        DataError: the file holds no steps.
    """
    records = list(metrics_by_step(metrics_jsonl).values())
    if not records:
        raise DataError(f"{metrics_jsonl} holds no steps yet: there is nothing to plot")
    has_predictions = any(SKIPPED in record for record in records)
    figure = new_figure(15 if has_predictions else 11, 7, title)
    parts: Any = [figure]
    if has_predictions:
        parts = figure.subfigures(1, 2, width_ratios=(3, 1))
    grid = parts[0].subplots(2, 2, sharex=True, gridspec_kw=MARGINS)
    ends = [mark.after_step for mark in marks if mark.is_of_reward]
    for axes, panel in zip(grid.flatten(), panels_of(records), strict=True):
        _draw(axes, panel, records, ends=ends)
        _draw_marks(axes, marks, has_labels=axes is grid[0, 0])
    for axes in grid[1]:
        axes.set_xlabel("training step", color=INK)
    if has_predictions:
        upper, lower = parts[1].subplots(2, 1, gridspec_kw=SIDE_MARGINS)
        _skipped(upper, records)
        _calibration(lower, records)
    _caption(figure, [record["step"] for record in records])
    return figure


def _draw_marks(axes: "Axes", marks: Sequence[Mark], *, has_labels: bool) -> None:
    """Draw vertical lines between the last step of the old options and the next one."""
    for mark in marks:
        x = mark.after_step + 0.5
        axes.axvline(x, color=INK, linewidth=0.8, linestyle=":", zorder=3)
        if not has_labels:
            continue
        axes.annotate(
            plain_text(mark.label),
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-2, -3),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color=INK,
            fontsize=7,
        )


def _draw(
    axes: "Axes",
    panel: Panel,
    records: Sequence[Record],
    *,
    width: float = 2.0,
    ends: Sequence[int] = (),
) -> None:
    """Draw the series of a panel; no line joins the evaluations on two sides of a step of `ends`."""
    frame(axes, title=panel.title, unit=panel.unit)
    for series in panel.series:
        if series.data is None:
            _curve(axes, records, series, width)
        else:
            _evaluation(axes, records, series, ends)
    low, high = axes.dataLim.intervaly
    if high >= low:  # something is drawn
        axes.set_ylim(*axis_limits(panel, low, high))
    labels = [series.label for series in panel.series if series.label]
    if labels:
        _legend(axes, 2 if max(map(len, labels)) > SHORT_LABEL else 3)
    if panel.right is not None:
        right = axes.twinx()
        _draw(right, panel.right, records, width=1.2)
        right.grid(False)
        _colour_label(axes, panel)
        _colour_label(right, panel.right)


def _legend(axes: "Axes", columns: int) -> None:
    """Name the curves between the title and the panel, where the legend covers no data."""
    legend = axes.legend(
        frameon=False,
        fontsize=LEGEND_SIZE,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        borderaxespad=0.1,
        borderpad=0.1,
        columnspacing=1.2,
        labelspacing=0.2,
        numpoints=1,
    )
    rows = -(-len(legend.get_texts()) // columns)
    _title(axes, axes.get_title(loc="left"), pad=TITLE_PAD + rows * LINE_HEIGHT * LEGEND_SIZE)


def _title(axes: "Axes", title: str, *, pad: float) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", y=1.0, pad=pad)


def _colour_label(axes: "Axes", panel: Panel) -> None:
    """Give a vertical axis the colour of its curve, because a panel has two."""
    for series in panel.series:
        axes.yaxis.label.set_color(series.colour)


def _evaluation(
    axes: "Axes", records: Sequence[Record], series: Series, ends: Sequence[int]
) -> None:
    """Draw the accuracy of a data set with its 95 % intervals, where the metrics have them."""
    steps, accuracy = _with_gaps(*points_of(records, series.metric, series.scale), ends)
    low = _values_by_step(records, f"eval/{series.data}/low", series.scale)
    high = _values_by_step(records, f"eval/{series.data}/high", series.scale)
    label = plain_text(series.label)
    if low:
        below = []
        above = []
        for step, mean in zip(steps, accuracy, strict=True):
            # an interval may just miss its mean by rounding; matplotlib refuses negative bars, and
            # NaN stays NaN
            below.append(max(mean - low.get(step, nan), 0.0))
            above.append(max(high.get(step, nan) - mean, 0.0))
        bars = [below, above]
        axes.errorbar(
            steps,
            accuracy,
            yerr=bars,
            color=series.colour,
            capsize=3,
            linewidth=1.2,
            zorder=4,
        )
        label += " (95 % interval)"
    axes.plot(
        steps,
        accuracy,
        color=series.colour,
        marker="o",
        markersize=4.5,
        linewidth=1.2,
        label=label,
        zorder=4,
    )


def _with_gaps(
    steps: Sequence[float], values: Sequence[float], ends: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return the points of a line with a gap behind each step of `ends`."""
    points = [*zip(steps, values, strict=True), *((end + 0.5, nan) for end in ends)]
    points.sort(key=lambda point: point[0])
    return [step for step, _ in points], [value for _, value in points]


def _values_by_step(records: Sequence[Record], metric: str, scale: float) -> dict[float, float]:
    steps, values = points_of(records, metric, scale)
    return dict(zip(steps, values, strict=True))


def _skipped(axes: "Axes", records: Sequence[Record]) -> None:
    """Plot the skipped problems of the stream (`dynamic_sampling.predict`)."""
    frame(axes, title="Problems skipped", unit="of the stream (%)")
    steps = []
    percentages = []
    for record in records:
        skipped = record.get(SKIPPED, 0)
        total = skipped + sum(record.get(f"rollout/{count}", 0) for count in DECIDED_COUNTS)
        if total:
            steps.append(record["step"])
            percentages.append(100 * skipped / total)
    # a line through one point is invisible
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, percentages, color=BLUE, linewidth=2.0, marker=marker)
    axes.set_ylim(-5, 105)


def _calibration(axes: "Axes", records: Sequence[Record]) -> None:
    """Plot how often groups had a signal by predicted chance; the diagonal is correct."""
    frame(axes, title="Calibration, 2 % of the problems", unit="groups with a signal (%)")
    axes.set_xlabel("predicted chance of a signal (%)", color=INK)
    axes.plot((0, 100), (0, 100), color=INK, linewidth=0.8, linestyle="--")
    for predicted, observed, count in reliability(records):
        axes.plot(100 * predicted, 100 * observed, color=BLUE, marker="o", markersize=4.5)
        axes.annotate(f" {count}", (100 * predicted, 100 * observed), color=INK, fontsize=8)
    axes.set_xlim(-2, 102)
    axes.set_ylim(-2, 108)


def reliability(records: Sequence[Record]) -> list[tuple[float, float, int]]:
    """Return mean chance, frequency of a signal and number of groups by bin of predicted chance."""
    sums: dict[str, dict[str, float]] = {}
    for record in records:
        for name, value in record.items():
            match = re.fullmatch(r"rollout/calibration_(groups|chance|signals)_(\w+)", name)
            if match:
                bin_sums = sums.setdefault(match[2], {"groups": 0, "chance": 0, "signals": 0})
                bin_sums[match[1]] += value
    points = []
    for bin_sums in sums.values():
        groups = bin_sums["groups"]
        points.append((bin_sums["chance"] / groups, bin_sums["signals"] / groups, int(groups)))
    points.sort(key=lambda point: point[0])
    return points


def frame(axes: "Axes", *, title: str, unit: str) -> None:
    """Set a panel's title, the unit of its vertical axis, and the shared grid and tick marks."""
    _title(axes, title, pad=TITLE_PAD)
    axes.set_ylabel(unit, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)


def _curve(axes: "Axes", records: Sequence[Record], series: Series, width: float) -> None:
    """Draw a metric: smoothed over many steps, with the metric itself behind it."""
    steps, values = points_of(records, series.metric, series.scale)
    # a point between two gaps has no line
    alone = []
    for i in range(len(steps)):
        neighbours = [*values[i - 1 : i], *values[i + 1 : i + 2]]
        if all(isnan(neighbour) for neighbour in neighbours):
            alone.append(i)
    if len(steps) >= SMOOTHED_FROM_STEPS:
        axes.plot(steps, values, color=series.colour, linewidth=0.8, alpha=0.3)
    axes.plot(
        steps,
        smoothed(values),
        label=series.label,
        color=series.colour,
        linewidth=width,
        marker="o",
        markevery=alone,
    )


def _caption(figure: "Figure", steps: Sequence[int]) -> None:
    """Set the range of steps, and say over how many the curves are smoothed."""
    margin = max(0.5, 0.02 * (max(steps) - min(steps)))
    # the panels of steps share their horizontal axis: the first sets it for all
    figure.axes[0].set_xlim(min(steps) - margin, max(steps) + margin)
    figure.axes[0].locator_params(axis="x", integer=True)
    if len(steps) >= SMOOTHED_FROM_STEPS:
        note = f"thick lines: running mean over {smoothing_window(len(steps))} steps"
        figure.supxlabel(note, color=INK, fontsize=8, x=0.99, ha="right")


def plain_text(text: str) -> str:
    """Escape text for a figure: `$`, which begins a formula, and characters without a glyph."""
    characters = []
    for character in printable(text):
        # matplotlib would draw a box and warn
        if not character.isascii() and not _has_glyph(character):
            character = character.encode("ascii", "backslashreplace").decode()
        characters.append(r"\$" if character == "$" else character)
    return "".join(characters)


def _has_glyph(character: str) -> bool:
    """Return True if a font of matplotlib's configuration has the character, also in bold."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    families = FontProperties().get_family()
    for weight in ("normal", "bold"):
        fonts = []
        for family in families:
            properties = FontProperties(family=family, weight=weight)
            fonts.append(get_font(findfont(properties)))
        if not any(font.get_char_index(ord(character)) for font in fonts):
            return False
    return True
