"""Pictures of an experiment: the mean of each row over seeds, with a band."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dapo.analysis.ablate.experiment import ACCURACY, Panel, file_name
from dapo.analysis.ablate.results import Results
from dapo.analysis.ablate.table import make_table
from dapo.core.errors import DataError
from dapo.core.text import plural
from dapo.libs.sample_intervals import student_quantile
from dapo.runs.curves import frame, new_figure, plain_text, save_figure
from dapo.runs.metric_table import metric_of
from dapo.runs.panels import COLOURS, INK, held_out_unit, metric_unit, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns: TypeAlias = Mapping[str, Sequence[Any]]  # the curve of a run as results.json holds it
Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The positions on the horizontal axis, and the values."""

# the line styles; each one is used for all colours before the next
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)))
AXIS_NAMES = {
    "steps": "training step",
    "tokens": "generated tokens",
    "seconds": "seconds without evaluations",
}
_COLUMNS = {"steps": "step", "tokens": "tokens", "seconds": "seconds"}
_PER_ROW = 3
_GRID_POINTS = 100
_SIZE = (5.0, 3.6)  # width and height of a panel in inches
_DIFFERENCE_INCHES = 0.3  # per row
_LEGEND_INCHES = 0.24
_LEGEND_COLUMNS = 3
_SIGNED = (
    "reward",
    "score",
    "loss",
    "the function's",
    "critic/explained_variance",
    "loss/entropy_coef",
)
"""The units and metrics whose values may be negative."""


def plot_results(results: Results, folder: Path) -> list[Path]:
    """Write curves per condition and `differences.png`; return their paths."""
    paths = []
    for condition in results.conditions:
        name = "curves.png"
        if condition:
            name = f"curves-{file_name(condition)}.png"
        try:
            figure = results_figure(results, condition)
        except DataError:
            # no run of this condition has made a step yet
            continue
        paths.append(save_figure(figure, folder / name))
    differences = differences_figure(results)
    if differences is not None:
        paths.append(save_figure(differences, folder / "differences.png"))
    return paths


def results_figure(results: Results, condition: str) -> "Figure":
    """Return the panels of one condition, without those that have no value yet.

    Raises DataError if no panel has one.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    experiment = results.facts["experiment"]
    rows = _curves_by_row(results, condition)
    panels = _panels_with_values(results, condition, rows)
    num_rows = ceil(len(panels) / _PER_ROW)
    num_columns = ceil(len(panels) / num_rows)
    num_legend_lines = ceil(len(rows) / _LEGEND_COLUMNS)
    panel_width_inches, panel_height_inches = _SIZE
    legend_inches = _LEGEND_INCHES * num_legend_lines + 0.35
    width_inches = max(panel_width_inches * num_columns, 8.0)
    height_inches = panel_height_inches * num_rows + legend_inches
    # the legend takes this fraction of the picture, at its bottom
    share = legend_inches / height_inches
    layout = ConstrainedLayoutEngine(rect=(0, share, 1, 1 - share), h_pad=0.12, w_pad=0.08)
    title = experiment["name"]
    if condition:
        title = f"{title}: {condition}"
    figure = new_figure(width_inches, height_inches, title, layout=layout)
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    is_binary = results.is_binary(condition)
    for axes, panel in zip(grid, panels, strict=False):
        _panel(axes, panel, rows, is_binary=is_binary)
    # the last row may have fewer panels than places
    for axes in islice(grid, len(panels), None):
        axes.set_visible(False)
    _legend(figure, grid[0], share, counts=[len(curves) for curves in rows.values() if curves])
    return figure


def _curves_by_row(results: Results, condition: str) -> dict[str, list[Columns]]:
    """Return the curves of each row's runs. Raises DataError if no run has one."""
    rows = {}
    for variant in results.variants:
        runs = results.runs(condition, variant["name"])
        rows[variant["name"]] = [run["curve"] for run in runs if run["curve"]]
    if not any(rows.values()):
        raise DataError(
            f"no run of {condition or 'the experiment'} has made a step yet: there is nothing to"
            " plot"
        )
    return rows


def _panels_with_values(
    results: Results, condition: str, rows: Mapping[str, Sequence[Columns]]
) -> list[Panel]:
    """Return the panels for which a run has a value. Raises DataError if there is none."""
    panels = []
    for panel in results.panels:
        curves = [_curve(columns, panel) for row in rows.values() for columns in row]
        if any(len(positions) for positions, _ in curves):
            panels.append(panel)
    if not panels:
        raise DataError(
            f"no metric of the plots has a value yet in {condition or 'the experiment'}"
        )
    return panels


def differences_figure(results: Results) -> "Figure | None":
    """Draw each row's accuracy minus the baseline's with 95 % intervals, if any.

    A filled point has an interval without 0.
    """
    tables = make_table(results)
    lines = _difference_lines(tables)
    if not lines:
        return None
    is_binary = all(table["binary"] for table in tables)
    quantity = "accuracy" if is_binary else "mean score"
    unit = "points" if is_binary else "difference"
    _, scale = held_out_unit(is_binary=is_binary)
    experiment = results.facts["experiment"]
    height_inches = _DIFFERENCE_INCHES * len(lines) + 1.4
    figure = new_figure(8.0, height_inches, "", layout="constrained")
    axes = figure.subplots()
    title = f"{experiment['name']}: held-out {quantity} against {experiment['baseline']}"
    frame(axes, title=plain_text(title), unit="")
    axes.axvline(0, color=INK, linewidth=1)
    for y, line in enumerate(lines):
        if line.difference is not None:
            _difference(axes, y, line.difference, scale, line.colour)
    axes.set_yticks(range(len(lines)), [plain_text(line.name) for line in lines])
    for label, line in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if line.difference is None else "normal")
    # the first line at the top
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(False, axis="y")
    counts = [line.difference["seeds"] for line in lines if line.difference is not None]
    sample = "seeds and problems" if max(counts) > 1 else "problems"
    note = f"with 95 % intervals over {sample}; {_count_of_seeds(counts)}; filled: without 0"
    axes.set_xlabel(f"{unit}, {note}", color=INK, fontsize=9)
    return figure


@dataclass(frozen=True)
class _Line:
    """A line of `differences.png`: a heading, or a row with its difference."""

    name: str
    difference: Mapping[str, Any] | None = None  # `mean`, `low` and `high`; None for a heading
    colour: str = INK


def _difference_lines(tables: Sequence[Mapping[str, Any]]) -> list[_Line]:
    """Return a heading per condition, if it has a name, and a line per row that has an interval."""
    lines: list[_Line] = []
    for table in tables:
        rows = []
        for index, row in enumerate(table["rows"]):
            difference = row["to_baseline"]
            if difference is not None and difference["low"] is not None:
                rows.append(_Line(row["variant"], difference, _colour(index)))
        if table["condition"] and rows:
            lines.append(_Line(table["condition"]))
        lines += rows
    return lines


def _colour(index: int) -> str:
    """Return the colour of the row of this index in a table, the same in all pictures."""
    return COLOURS[index % len(COLOURS)]


def _difference(
    axes: "Axes", y: int, difference: Mapping[str, Any], scale: float, colour: str
) -> None:
    """Draw the interval of a difference as a line, and its mean as a point on the line."""
    low = scale * difference["low"]
    high = scale * difference["high"]
    mean = scale * difference["mean"]
    has_zero = difference["low"] <= 0 <= difference["high"]
    fill = "white" if has_zero else colour
    axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
    axes.plot([mean], [y], "o", color=colour, markerfacecolor=fill, markersize=6.5)


def _count_of_seeds(counts: Sequence[int]) -> str:
    """Return the number of seeds of a row: `3 seeds`, or `1 to 3 seeds`."""
    most = plural(max(counts), "seed")
    return most if min(counts) == max(counts) else f"{min(counts)} to {most}"


def _panel(
    axes: "Axes", panel: Panel, rows: Mapping[str, Sequence[Columns]], *, is_binary: bool
) -> None:
    """Draw one metric: a curve with a band for each row."""
    is_by_step = panel.against == "steps"
    if panel.metric == ACCURACY:
        title = "Held-out accuracy" if is_binary else "Held-out score"
        unit, scale = held_out_unit(is_binary=is_binary)
    else:
        title = panel.metric
        unit, scale = metric_unit(panel.metric)
    frame(axes, title=plain_text(panel.title) or title, unit=unit)
    for first, last in panel.windows:
        axes.axvspan(first - 0.5, last + 0.5, color=INK, alpha=0.08, linewidth=0)
    axes.yaxis.set_label_coords(-0.13, 0.5)
    axes.set_xlabel(AXIS_NAMES[panel.against], color=INK)
    value_range = _range(panel.metric, is_binary=is_binary)
    for index, (name, runs) in enumerate(rows.items()):
        curves = []
        for columns in runs:
            positions, values = _curve(columns, panel)
            if len(positions):
                curves.append((positions, values))
        if curves:
            _row(axes, curves, index, name, scale, value_range, panel)
    if is_by_step:
        axes.locator_params(axis="x", integer=True)
    elif panel.against == "tokens":
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)


def _row(
    axes: "Axes",
    curves: Sequence[Curve],
    index: int,
    name: str,
    scale: float,
    value_range: tuple[float, float],
    panel: Panel,
) -> None:
    """Draw the mean of a row's runs as a line, with a band.

    Args:
        axes: where to draw.
        curves: one per run.
        index: the place of the row in the table, which chooses colour and style.
        name: its name in the legend.
        scale: what values are multiplied by.
        value_range: the least and the largest value of the metric, before scaling.
        panel: the metric, and what it is drawn against.
    """
    is_by_step = panel.against == "steps"
    floor, ceiling = value_range
    grid, mean, low, high = mean_curve(curves, is_by_step=is_by_step)
    # a band does not leave the range of the metric, unless the mean does
    lowest = mean.min(where=~np.isnan(mean), initial=floor)
    low = np.clip(low, lowest, ceiling)
    high = np.clip(high, floor, ceiling)
    colour = _colour(index)
    axes.fill_between(grid, scale * low, scale * high, color=colour, alpha=0.12, linewidth=0)
    # a line of one point would not be seen, and evaluations have steps between them
    has_points = len(grid) == 1 or (panel.metric == ACCURACY and is_by_step)
    axes.plot(
        grid,
        scale * mean,
        color=colour,
        linestyle=STYLES[index // len(COLOURS) % len(STYLES)],
        linewidth=1.8,
        marker="o" if has_points else None,
        markersize=3,
        label=name,
    )


def _curve(columns: Columns, panel: Panel) -> Curve:
    """Return one metric of a run, smoothed for training; NaN for steps without a value."""
    values = np.array(columns.get(panel.metric, ()), np.float64)
    positions = np.array(columns[_COLUMNS[panel.against]], np.float64)[: len(values)]
    if panel.metric == ACCURACY:
        # there are few evaluations, with steps between them
        is_evaluated = ~np.isnan(values)
        return positions[is_evaluated], values[is_evaluated]
    return positions, np.array(smoothed(values.tolist()), np.float64)


def mean_curve(
    curves: Sequence[Curve], *, is_by_step: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return positions, means and 95 % interval ends over seeds, up to the shortest curve.

    All four are `[n]`, one value per position.

    With `is_by_step` the positions are the steps that all curves have; others are interpolated
    linearly.
    """
    if is_by_step:
        steps = [set(positions.tolist()) for positions, _ in curves]
        grid = np.array(sorted(set.intersection(*steps)), np.float64)
    else:
        first = max(positions[0] for positions, _ in curves)
        last = min(positions[-1] for positions, _ in curves)
        grid = np.array([last])
        if last > first:
            grid = np.linspace(first, last, _GRID_POINTS)
    values = np.stack([np.interp(grid, positions, heights) for positions, heights in curves])
    mean = values.mean(axis=0)
    count = len(curves)
    if count < 2:
        return grid, mean, mean, mean
    deviation = values.std(axis=0, ddof=1)
    half_width = student_quantile(count - 1) * deviation / np.sqrt(count)
    return grid, mean, mean - half_width, mean + half_width


def _range(metric: str, *, is_binary: bool = True) -> tuple[float, float]:
    """Return the range of a metric's values before scaling; bands over few seeds are cut there."""
    if metric == ACCURACY and not is_binary:
        return -np.inf, np.inf
    unit = "fraction" if metric == ACCURACY else metric_of(metric).unit
    is_signed = unit in _SIGNED or metric in _SIGNED or metric.startswith("audit/")
    floor = -np.inf if is_signed else 0.0
    ceiling = 1.0 if unit in ("fraction", "probability") else np.inf
    return floor, ceiling


def _legend(figure: "Figure", axes: "Axes", height: float, *, counts: Sequence[int]) -> None:
    """Draw the names of the rows below the panels, and a note on the seeds."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        [plain_text(label) for label in labels],
        loc="lower left",
        bbox_to_anchor=(0.01, 0.0, 0.98, height),
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=9,
    )
    note = f"mean of {_count_of_seeds(counts)}"
    if max(counts) > 1:
        note += "; band: 95 % interval over seeds"
    figure.text(0.99, 0.005, note, color=INK, fontsize=8, ha="right", va="bottom")
