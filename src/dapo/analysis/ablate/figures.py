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
from dapo.runs.curves import frame, new_figure, plain_text, save_figure
from dapo.runs.metric_table import metric_of
from dapo.runs.panels import COLOURS, INK, held_out_unit, metric_unit, smoothed
from sample_intervals import student_quantile

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
    """The panels of one condition, without those that have no value yet.

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
    columns = [runs for row in rows.values() for runs in row]
    panels = [
        panel for panel in results.panels if any(len(_curve(runs, panel)[0]) for runs in columns)
    ]
    if not panels:
        raise DataError(
            f"no metric of the plots has a value yet in {condition or 'the experiment'}"
        )
    height = ceil(len(panels) / _PER_ROW)
    width = ceil(len(panels) / height)
    legend = _LEGEND_INCHES * ceil(len(names) / _LEGEND_COLUMNS) + 0.35
    inches = (max(_SIZE[0] * width, 8.0), _SIZE[1] * height + legend)
    rect = (0, legend / inches[1], 1, 1 - legend / inches[1])
    layout = ConstrainedLayoutEngine(rect=rect, h_pad=0.12, w_pad=0.08)
    title = f"{results.facts['experiment']['name']}{f': {condition}' if condition else ''}"
    figure = new_figure(*inches, title, layout=layout)
    grid = figure.subplots(height, width, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _panel(axes, panel, rows, is_binary=results.is_binary(condition))
    for axes in islice(grid, len(panels), None):
        axes.set_visible(False)
    _legend(figure, grid[0], legend / inches[1], seeds=len(results.facts["experiment"]["seeds"]))
    return figure


def differences_figure(results: Results) -> "Figure | None":
    """Draw each row's accuracy minus the baseline's with 95 % intervals, if any.

    A filled point has an interval without 0.
    """
    lines: list[tuple[str, Mapping[str, Any] | None, int]] = []
    is_binary = True
    for table in make_table(results):
        rows = [(row["variant"], row["to_baseline"], i) for i, row in enumerate(table["rows"])]
        rows = [row for row in rows if row[1] is not None and row[1]["low"] is not None]
        lines += [(table["condition"], None, 0)] if table["condition"] and rows else []
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
            colour = COLOURS[index % len(COLOURS)]
            low = scale * difference["low"]
            high = scale * difference["high"]
            axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
            fill = "white" if difference["low"] <= 0 <= difference["high"] else colour
            axes.plot(
                [scale * difference["mean"]],
                [y],
                "o",
                color=colour,
                markerfacecolor=fill,
                markersize=6.5,
            )
    axes.set_yticks(range(len(lines)), [plain_text(name) for name, *_ in lines])
    for label, (_, difference, _) in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if difference is None else "normal")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(False, axis="y")
    seeds = len(facts["seeds"])
    unit = "points" if is_binary else "difference"
    intervals = (
        f"with 95 % intervals over seeds and problems; {seeds} seed{'s' * (seeds > 1)}; filled:"
        " without 0"
    )
    axes.set_xlabel(f"{unit}, {intervals}", color=INK, fontsize=9)
    return figure


def _panel(
    axes: "Axes", panel: Panel, rows: Mapping[str, Sequence[Columns]], *, is_binary: bool
) -> None:
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
    for index, (name, seeds) in enumerate(rows.items()):
        curves = [curve for columns in seeds if len((curve := _curve(columns, panel))[0])]
        if not curves:
            continue
        grid, mean, low, high = mean_curve(curves, is_by_step=panel.against == "steps")
        colour = COLOURS[index % len(COLOURS)]
        style = STYLES[index // len(COLOURS) % len(STYLES)]
        floor, ceiling = _range(panel.metric, is_binary=is_binary)
        low = np.clip(low, mean.min(where=~np.isnan(mean), initial=floor), ceiling)
        high = np.clip(high, floor, ceiling)
        axes.fill_between(grid, scale * low, scale * high, color=colour, alpha=0.12, linewidth=0)
        marker = "o" if len(grid) == 1 or (is_accuracy and panel.against == "steps") else None
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
    if panel.against == "steps":
        axes.locator_params(axis="x", integer=True)
    elif panel.against == "tokens":
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)


def _curve(columns: Columns, panel: Panel) -> Curve:
    """Return one metric of a run, smoothed for training; NaN for steps without a value."""
    values = columns.get(panel.metric, ())
    at = columns[_COLUMNS[panel.against]]
    pairs = zip(at, np.array(values, np.float64).tolist(), strict=False)
    points = [(x, y) for x, y in pairs if panel.metric != ACCURACY or not np.isnan(y)]
    heights = [y for _, y in points]
    smooth = heights if panel.metric == ACCURACY else smoothed(heights)
    return np.array([x for x, _ in points], np.float64), np.array(smooth, np.float64)


def mean_curve(
    curves: Sequence[Curve], *, is_by_step: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return positions, means and 95 % interval ends over seeds, up to the shortest curve.

    With `is_by_step` the positions are the steps that all curves have; others are interpolated
    linearly.
    """
    if is_by_step:
        shared = set(curves[0][0].tolist()).intersection(*(at.tolist() for at, _ in curves[1:]))
        grid = np.array(sorted(shared), np.float64)
    else:
        first = max(at[0] for at, _ in curves)
        last = min(at[-1] for at, _ in curves)
        grid = np.linspace(first, last, _GRID_POINTS) if last > first else np.array([last])
    values = np.stack([np.interp(grid, at, heights) for at, heights in curves])
    mean = values.mean(axis=0)
    if len(curves) < 2:
        return grid, mean, mean, mean
    half = student_quantile(len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return grid, mean, mean - half, mean + half


def _range(metric: str, *, is_binary: bool = True) -> tuple[float, float]:
    """The range of a metric's values before scaling; bands over few seeds are cut there."""
    if metric == ACCURACY and not is_binary:
        return -np.inf, np.inf
    unit = "fraction" if metric == ACCURACY else metric_of(metric).unit
    is_signed = unit in _SIGNED or metric in _SIGNED or metric.startswith("audit/")
    return -np.inf if is_signed else 0.0, 1.0 if unit in ("fraction", "probability") else np.inf


def _legend(figure: "Figure", axes: "Axes", height: float, *, seeds: int) -> None:
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
    note = f"mean of {seeds} seed{'s' * (seeds > 1)}"
    note += "; band: 95 % interval over seeds" if seeds > 1 else ""
    figure.text(0.99, 0.005, note, color=INK, fontsize=8, ha="right", va="bottom")
