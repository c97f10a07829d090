"""Plots the curves of a run: accuracy, response length, entropy and the outcomes of groups."""

import re
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.files import atomic_file
from dapo.core.terminal import printable
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
    panels_of,
    points_of,
    smoothed,
    smoothing_window,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def plot_curves(metrics_jsonl: str | Path, out_png: str | Path, *, title: str = "") -> None:
    """Plot the curves of a run into a PNG file (see `curves_figure`).

    Raises:
        DataError: the metrics hold no steps.
    """
    save_figure(curves_figure(metrics_jsonl, title=title), Path(out_png))


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


def curves_figure(metrics_jsonl: str | Path, *, title: str = "") -> "Figure":
    """Plot the panels of `panels_of`.

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
    for axes, panel in zip(grid.flatten(), panels_of(records), strict=True):
        _draw(axes, panel, records)
    for axes in grid[1]:
        axes.set_xlabel("training step", color=INK)
    if has_predictions:
        upper, lower = parts[1].subplots(2, 1, gridspec_kw=SIDE_MARGINS)
        _skipped(upper, records)
        _calibration(lower, records)
    _caption(figure, [record["step"] for record in records])
    return figure


def _draw(axes: "Axes", panel: Panel, records: Sequence[Record], *, width: float = 2.0) -> None:
    """Draw the series of a panel."""
    frame(axes, title=panel.title, unit=panel.unit)
    for series in panel.series:
        if series.data is None:
            _curve(axes, records, series, width)
        else:
            _evaluation(axes, records, series)
    if panel.begins_at_zero:
        axes.set_ylim(bottom=0)
    if panel.top is not None:
        top = panel.top
        if not panel.has_room_above:
            top = min(top, axes.get_ylim()[1])
        axes.set_ylim(top=top)
    if any(series.label for series in panel.series):
        axes.legend(frameon=False, fontsize=9, loc="best")
    if panel.right is not None:
        right = axes.twinx()
        _draw(right, panel.right, records, width=1.2)
        right.set_ylim(0, max(10.0, right.get_ylim()[1]))
        right.grid(False)
        right.yaxis.set_label_coords(1 + LABEL_DISTANCE, 0.5)
        _colour_label(axes, panel)
        _colour_label(right, panel.right)


def _colour_label(axes: "Axes", panel: Panel) -> None:
    """Give a vertical axis the colour of its curve, because a panel has two."""
    for series in panel.series:
        axes.yaxis.label.set_color(series.colour)


def _evaluation(axes: "Axes", records: Sequence[Record], series: Series) -> None:
    """Draw the accuracy of a data set with its 95 % intervals, where the metrics have them."""
    steps, accuracy = points_of(records, series.metric, series.scale)
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


def _values_by_step(records: Sequence[Record], metric: str, scale: float) -> dict[int, float]:
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
    axes.set_ylim(0, 102)


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
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", y=1.0, pad=10)
    axes.set_ylabel(unit, color=INK)
    axes.yaxis.set_label_coords(-LABEL_DISTANCE, 0.5)
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
