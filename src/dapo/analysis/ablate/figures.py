"""Pictures of an experiment: the mean of each row over seeds, with a band."""

from collections.abc import Mapping, Sequence
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
_SIZE = (5.0, 3.6)  # inches per panel
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
        path = folder / f"curves{f'-{file_name(condition)}' if condition else ''}.png"
        try:
            figure = results_figure(results, condition)
        except DataError:
            continue
        paths.append(save_figure(figure, path))
    if (differences := differences_figure(results)) is not None:
        paths.append(save_figure(differences, folder / "differences.png"))
    return paths


def results_figure(results: Results, condition: str) -> "Figure":
    """Return the panels of one condition, without those that have no value yet.

    Raises DataError if no panel has one.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = [variant["name"] for variant in results.variants]
    rows = {
        name: [run["curve"] for run in results.runs(condition, name) if run["curve"]]
        for name in names
    }
    if not any(rows.values()):
        raise DataError(
            f"no run of {condition or 'the experiment'} has made a step yet: there is nothing to"
            " plot"
        )
    curves = [curve for row in rows.values() for curve in row]
    panels = []
    for panel in results.panels:
        lengths = [len(_curve(columns, panel)[0]) for columns in curves]
        if any(lengths):
            panels.append(panel)
    if not panels:
        raise DataError(
            f"no metric of the plots has a value yet in {condition or 'the experiment'}"
        )
    height = ceil(len(panels) / _PER_ROW)
    width = ceil(len(panels) / height)
    legend = _LEGEND_INCHES * ceil(len(names) / _LEGEND_COLUMNS) + 0.35
    inches = (max(_SIZE[0] * width, 8.0), _SIZE[1] * height + legend)
    # the legend takes this fraction of the picture, at its bottom
    share = legend / inches[1]
    layout = ConstrainedLayoutEngine(rect=(0, share, 1, 1 - share), h_pad=0.12, w_pad=0.08)
    title = results.facts["experiment"]["name"]
    if condition:
        title = f"{title}: {condition}"
    figure = new_figure(*inches, title, layout=layout)
    grid = figure.subplots(height, width, squeeze=False).flatten()
    is_binary = results.is_binary(condition)
    for axes, panel in zip(grid, panels, strict=False):
        _panel(axes, panel, rows, is_binary=is_binary)
    for axes in islice(grid, len(panels), None):
        axes.set_visible(False)
    _legend(figure, grid[0], share, seeds=results.facts["experiment"]["seeds"])
    return figure


def differences_figure(results: Results) -> "Figure | None":
    """Draw each row's accuracy minus the baseline's with 95 % intervals, if any.

    A filled point has an interval without 0.
    """
    lines: list[tuple[str, Mapping[str, Any] | None, int]] = []
    is_binary = True
    for table in make_table(results):
        rows = []
        for index, row in enumerate(table["rows"]):
            difference = row["to_baseline"]
            if difference is not None and difference["low"] is not None:
                rows.append((row["variant"], difference, index))
        if table["condition"] and rows:
            lines.append((table["condition"], None, 0))
        lines += rows
        is_binary = is_binary and table["binary"]
    if not lines:
        return None
    figure = new_figure(8.0, _DIFFERENCE_INCHES * len(lines) + 1.4, "", layout="constrained")
    axes = figure.subplots()
    facts = results.facts["experiment"]
    quantity = "accuracy" if is_binary else "mean score"
    _, scale = held_out_unit(is_binary=is_binary)
    frame(
        axes,
        title=plain_text(f"{facts['name']}: held-out {quantity} against {facts['baseline']}"),
        unit="",
    )
    axes.axvline(0, color=INK, linewidth=1)
    for y, (_, difference, index) in enumerate(lines):
        if difference is not None:
            _difference(axes, y, difference, scale, COLOURS[index % len(COLOURS)])
    axes.set_yticks(range(len(lines)), [plain_text(name) for name, *_ in lines])
    for label, (_, difference, _) in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if difference is None else "normal")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(False, axis="y")
    unit = "points" if is_binary else "difference"
    intervals = (
        f"with 95 % intervals over seeds and problems; {_count_of_seeds(facts['seeds'])}; filled:"
        " without 0"
    )
    axes.set_xlabel(f"{unit}, {intervals}", color=INK, fontsize=9)
    return figure


def _difference(
    axes: "Axes", y: int, difference: Mapping[str, Any], scale: float, colour: str
) -> None:
    """Draw the interval of a difference as a line, and its mean as a point on the line."""
    low = scale * difference["low"]
    high = scale * difference["high"]
    mean = scale * difference["mean"]
    fill = "white" if difference["low"] <= 0 <= difference["high"] else colour
    axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
    axes.plot([mean], [y], "o", color=colour, markerfacecolor=fill, markersize=6.5)


def _count_of_seeds(seeds: Sequence[int]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _panel(
    axes: "Axes", panel: Panel, rows: Mapping[str, Sequence[Columns]], *, is_binary: bool
) -> None:
    """Draw one metric: a curve with a band for each row."""
    is_accuracy = panel.metric == ACCURACY
    if is_accuracy:
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
    is_by_step = panel.against == "steps"
    floor, ceiling = _range(panel.metric, is_binary=is_binary)
    for index, (name, seeds) in enumerate(rows.items()):
        curves = [_curve(columns, panel) for columns in seeds]
        curves = [curve for curve in curves if len(curve[0])]
        if not curves:
            continue
        grid, mean, low, high = mean_curve(curves, is_by_step=is_by_step)
        colour = COLOURS[index % len(COLOURS)]
        style = STYLES[index // len(COLOURS) % len(STYLES)]
        # a band does not leave the range of the metric, unless the mean does
        lowest = mean.min(where=~np.isnan(mean), initial=floor)
        low = np.clip(low, lowest, ceiling)
        high = np.clip(high, floor, ceiling)
        axes.fill_between(grid, scale * low, scale * high, color=colour, alpha=0.12, linewidth=0)
        marker = "o" if len(grid) == 1 or (is_accuracy and is_by_step) else None
        axes.plot(
            grid,
            scale * mean,
            color=colour,
            linestyle=style,
            linewidth=1.8,
            marker=marker,
            markersize=3,
            label=name,
        )
    if is_by_step:
        axes.locator_params(axis="x", integer=True)
    elif panel.against == "tokens":
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)


def _curve(columns: Columns, panel: Panel) -> Curve:
    """Return one metric of a run, smoothed for training; NaN for steps without a value."""
    positions = columns[_COLUMNS[panel.against]]
    values = np.array(columns.get(panel.metric, ()), np.float64).tolist()
    points = list(zip(positions, values, strict=False))
    if panel.metric == ACCURACY:
        points = [(x, y) for x, y in points if not np.isnan(y)]
    xs = [x for x, _ in points]
    ys: Sequence[float] = [y for _, y in points]
    if panel.metric != ACCURACY:
        ys = smoothed(ys)
    return np.array(xs, np.float64), np.array(ys, np.float64)


def mean_curve(
    curves: Sequence[Curve], *, is_by_step: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return positions, means and 95 % interval ends over seeds, up to the shortest curve.

    With `is_by_step` the positions are the steps that all curves have; others are interpolated
    linearly.
    """
    if is_by_step:
        steps = [set(positions.tolist()) for positions, _ in curves]
        grid = np.array(sorted(set.intersection(*steps)), np.float64)
    else:
        first = max(positions[0] for positions, _ in curves)
        last = min(positions[-1] for positions, _ in curves)
        grid = np.linspace(first, last, _GRID_POINTS) if last > first else np.array([last])
    values = np.stack([np.interp(grid, positions, heights) for positions, heights in curves])
    mean = values.mean(axis=0)
    count = len(curves)
    if count < 2:
        return grid, mean, mean, mean
    deviation = values.std(axis=0, ddof=1)
    half = student_quantile(count - 1) * deviation / np.sqrt(count)
    return grid, mean, mean - half, mean + half


def _range(metric: str, *, is_binary: bool = True) -> tuple[float, float]:
    """Return the range of a metric's values before scaling; bands over few seeds are cut there."""
    if metric == ACCURACY and not is_binary:
        return -np.inf, np.inf
    unit = "fraction" if metric == ACCURACY else metric_of(metric).unit
    is_signed = unit in _SIGNED or metric in _SIGNED or metric.startswith("audit/")
    floor = -np.inf if is_signed else 0.0
    ceiling = 1.0 if unit in ("fraction", "probability") else np.inf
    return floor, ceiling


def _legend(figure: "Figure", axes: "Axes", height: float, *, seeds: Sequence[int]) -> None:
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
    note = f"mean of {_count_of_seeds(seeds)}"
    if len(seeds) > 1:
        note += "; band: 95 % interval over seeds"
    figure.text(0.99, 0.005, note, color=INK, fontsize=8, ha="right", va="bottom")
