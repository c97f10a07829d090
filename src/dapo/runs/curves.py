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
    """Plot the panels of `panels_of`.

    With `dynamic_sampling.predict` two more show the skipped problems and the calibration of
    predictions. Raises DataError if the file holds no steps.
    """
    records = list(metrics_by_step(metrics_jsonl).values())
    if not records:
        raise DataError(f"{metrics_jsonl} holds no steps yet: there is nothing to plot")
    has_predictions = any(SKIPPED in record for record in records)
    figure = new_figure(15 if has_predictions else 11, 7, title)
    parts: Any = figure.subfigures(1, 2, width_ratios=(3, 1)) if has_predictions else (figure,)
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
        axes.set_ylim(top=panel.top if panel.has_room_above else min(panel.top, axes.get_ylim()[1]))
    if any(series.label for series in panel.series):
        axes.legend(frameon=False, fontsize=9, loc="best")
    if panel.right is not None:
        right = axes.twinx()
        _draw(right, panel.right, records, width=1.2)
        right.set_ylim(0, max(10.0, right.get_ylim()[1]))
        right.grid(False)
        right.yaxis.set_label_coords(1 + LABEL_DISTANCE, 0.5)
        for side, drawn in ((axes, panel), (right, panel.right)):
            for series in drawn.series:
                side.yaxis.label.set_color(series.colour)


def _evaluation(axes: "Axes", records: Sequence[Record], series: Series) -> None:
    steps, accuracy = points_of(records, series.metric, series.scale)
    low, high = (
        dict(zip(*points_of(records, f"eval/{series.data}/{end}", series.scale), strict=True))
        for end in ("low", "high")
    )
    label = plain_text(series.label)
    if low:
        # an interval may just miss its mean by rounding; matplotlib refuses negative bars, and NaN
        # stays NaN
        below = [
            max(mean - low.get(step, nan), 0.0) for step, mean in zip(steps, accuracy, strict=True)
        ]
        above = [
            max(high.get(step, nan) - mean, 0.0) for step, mean in zip(steps, accuracy, strict=True)
        ]
        bars = [below, above]
        axes.errorbar(
            steps, accuracy, yerr=bars, color=series.colour, capsize=3, linewidth=1.2, zorder=4
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
            if match := re.fullmatch(r"rollout/calibration_(groups|chance|signals)_(\w+)", name):
                bin_sums = sums.setdefault(
                    match[2], dict.fromkeys(("groups", "chance", "signals"), 0)
                )
                bin_sums[match[1]] += value
    ordered = sorted(
        sums.values(), key=lambda sums_of_bin: sums_of_bin["chance"] / sums_of_bin["groups"]
    )
    return [
        (
            sums_of_bin["chance"] / sums_of_bin["groups"],
            sums_of_bin["signals"] / sums_of_bin["groups"],
            int(sums_of_bin["groups"]),
        )
        for sums_of_bin in ordered
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


def _curve(axes: "Axes", records: Sequence[Record], series: Series, width: float) -> None:
    steps, values = points_of(records, series.metric, series.scale)
    # a point between two gaps has no line
    alone = [
        i
        for i in range(len(steps))
        if all(isnan(neighbour) for neighbour in (*values[i - 1 : i], *values[i + 1 : i + 2]))
    ]
    if len(steps) >= SMOOTHED_FROM_STEPS:
        axes.plot(steps, values, color=series.colour, linewidth=0.8, alpha=0.3)
    line: Any = {"color": series.colour, "linewidth": width, "marker": "o", "markevery": alone}
    axes.plot(steps, smoothed(values), label=series.label, **line)


def _caption(figure: "Figure", steps: Sequence[int]) -> None:
    margin = max(0.5, 0.02 * (max(steps) - min(steps)))
    figure.axes[0].set_xlim(min(steps) - margin, max(steps) + margin)
    figure.axes[0].locator_params(axis="x", integer=True)
    if len(steps) >= SMOOTHED_FROM_STEPS:
        note = f"thick lines: running mean over {smoothing_window(len(steps))} steps"
        figure.supxlabel(note, color=INK, fontsize=8, x=0.99, ha="right")


def plain_text(text: str) -> str:
    """Escape text for a figure: `$`, which begins a formula, and characters without a glyph."""
    characters = []
    for character in printable(text):
        if not character.isascii() and not _has_glyph(character):
            character = character.encode("ascii", "backslashreplace").decode()
        characters.append(r"\$" if character == "$" else character)
    return "".join(characters)


def _has_glyph(character: str) -> bool:
    """Return True if a font of matplotlib's configuration has the character, also in bold."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    for weight in ("normal", "bold"):
        families = FontProperties().get_family()
        fonts = [
            get_font(findfont(FontProperties(family=family, weight=weight))) for family in families
        ]
        if not any(font.get_char_index(ord(character)) for font in fonts):
            return False
    return True
