"""Pictures of an experiment: each row's mean over seeds with a band, against steps, generated tokens or seconds."""

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
from dapo.core.files import atomic_file
from dapo.evaluation.intervals import student_quantile
from dapo.runs.curves import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    SMOOTHED_FROM_STEPS,
    frame,
    plain_text,
    running_mean,
    smoothing_window,
)
from dapo.runs.metric_table import metric_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The positions on the horizontal axis, and the values."""

COLOURS = (BLUE, ORANGE, GREEN, RED, "#7c3aed", "#0891b2", "#a16207", "#db2777", "#65a30d", "#475569")
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)))
"""Of lines; rows after the colours begin again with the next one."""
AXIS_NAMES = {"steps": "training step", "tokens": "generated tokens", "seconds": "seconds without evaluations"}
_COLUMNS = {"steps": "step", "tokens": "tokens", "seconds": "seconds"}
_PER_ROW = 3
_GRID_POINTS = 100
_SIZE = (5.0, 3.6)  # inches per panel
_DIFFERENCE_INCHES = 0.3  # per row
_LEGEND_INCHES, _LEGEND_COLUMNS = 0.24, 3
_PERCENT = 100.0
_BOUNDS = {"%": (0, 1), "correct (%)": (0, 1), "probability": (0, 1), "rollout/entropy_estimate": (0, np.inf)}
"""What values of a unit, or of a metric, can be before scaling: bands over few seeds are cut there."""


def plot_results(results: Results, folder: Path) -> list[Path]:
    """Write the pictures of an experiment into a folder.

    They are `curves.png`, or one `curves-CONDITION.png` per condition that has a curve, and `differences.png`, where
    two rows can be compared.
    """
    written = []
    for condition in results.conditions:
        path = folder / f"curves{f'-{file_name(condition)}' if condition else ''}.png"
        try:
            figure = results_figure(results, condition)
        except DataError:
            continue
        written.append(_save(figure, path))
    if (differences := differences_figure(results)) is not None:
        written.append(_save(differences, folder / "differences.png"))
    return written


def _save(figure: "Figure", path: Path) -> Path:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def results_figure(results: Results, condition: str) -> "Figure":
    """The panels of an experiment for one condition that have a value. Raises DataError if there is no curve yet."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = [each["name"] for each in results.variants]
    rows = _rows_of(results, condition)
    if not rows:
        raise DataError(f"no run of {condition or 'the experiment'} has made a step yet: there is nothing to plot")
    panels = [panel for panel in results.panels if any(len(_curve(columns, panel)[0]) for columns in rows.values())]
    if not panels:
        raise DataError(f"no metric of the plots has a value yet in {condition or 'the experiment'}")
    height = ceil(len(panels) / _PER_ROW)
    width = ceil(len(panels) / height)
    legend = _LEGEND_INCHES * ceil(len(names) / _LEGEND_COLUMNS) + 0.35
    inches = (max(_SIZE[0] * width, 8.0), _SIZE[1] * height + legend)
    rect = (0, legend / inches[1], 1, 1 - legend / inches[1])
    layout = ConstrainedLayoutEngine(rect=rect, h_pad=0.12, w_pad=0.08)
    figure = Figure(figsize=inches, dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.subplots(height, width, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _panel(axes, panel, names, rows)
    for axes in islice(grid, len(panels), None):
        axes.set_visible(False)
    _title_and_legend(figure, results, condition, grid[0], legend / inches[1])
    return figure


def differences_figure(results: Results) -> "Figure | None":
    """The paired differences in accuracy to the baseline with their 95 % intervals, row by row; None if there are none.

    What is filled has an interval that leaves out 0.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: list[tuple[str, Mapping[str, Any] | None, int]] = []
    for table in make_table(results):
        rows = [(row["variant"], row["to_baseline"], i) for i, row in enumerate(table["rows"])]
        rows = [row for row in rows if row[1] is not None and row[1]["low"] is not None]
        lines += [(table["condition"], None, 0)] if table["condition"] and rows else []
        lines += rows
    if not lines:
        return None
    figure = Figure(figsize=(8.0, _DIFFERENCE_INCHES * len(lines) + 1.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    facts = results.facts["experiment"]
    frame(axes, title=plain_text(f"{facts['name']}: held-out accuracy against {facts['baseline']}"), unit="")
    axes.axvline(0, color=INK, linewidth=1)
    for y, (_, found, index) in enumerate(lines):
        if found is not None:
            colour, low, high = COLOURS[index % len(COLOURS)], _PERCENT * found["low"], _PERCENT * found["high"]
            axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
            fill = "white" if found["low"] <= 0 <= found["high"] else colour
            axes.plot([_PERCENT * found["mean"]], [y], "o", color=colour, markerfacecolor=fill, markersize=6.5)
    axes.set_yticks(range(len(lines)), [plain_text(name) for name, *_ in lines])
    for label, (_, found, _) in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if found is None else "normal")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(False, axis="y")
    seeds = len(facts["seeds"])
    axes.set_xlabel(
        f"points, with 95 % intervals over seeds and problems; {seeds} seed{'s' * (seeds > 1)}; filled: without 0",
        color=INK,
        fontsize=9,
    )
    return figure


def _rows_of(results: Results, condition: str) -> dict[tuple[str, int], dict[str, NDArray[Any]]]:
    """The columns of the curves of a condition's runs, by row and seed."""
    table = results.curves.to_pydict()
    found: dict[tuple[str, int], list[int]] = {}
    for i, name in enumerate(table["condition"]):
        if name == condition:
            found.setdefault((table["variant"][i], table["seed"][i]), []).append(i)
    return {
        key: {name: np.array([values[i] for i in rows]) for name, values in table.items()}
        for key, rows in found.items()
    }


def _panel(
    axes: "Axes", panel: Panel, names: Sequence[str], rows: Mapping[tuple[str, int], Mapping[str, NDArray[Any]]]
) -> None:
    """One metric of every row against one axis."""
    is_accuracy = panel.metric == ACCURACY
    unit, scale = ("correct (%)", _PERCENT) if is_accuracy else _unit(panel.metric)
    frame(axes, title=_title(panel.metric), unit=unit)
    axes.yaxis.set_label_coords(-0.13, 0.5)
    axes.set_xlabel(AXIS_NAMES[panel.against], color=INK)
    for index, name in enumerate(names):
        seeds = [columns for (row, _), columns in rows.items() if row == name]
        curves = [curve for columns in seeds if len((curve := _curve(columns, panel))[0])]
        if not curves:
            continue
        grid, mean, low, high = mean_curve(curves, is_by_step=panel.against == "steps")
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
        floor, ceiling = _BOUNDS.get(panel.metric, _BOUNDS.get(unit, (-np.inf, np.inf)))
        low, high = np.clip(low, floor, ceiling), np.clip(high, floor, ceiling)
        axes.fill_between(grid, scale * low, scale * high, color=colour, alpha=0.12, linewidth=0)
        marker = "o" if len(grid) == 1 or (is_accuracy and panel.against == "steps") else None
        axes.plot(
            grid, scale * mean, color=colour, linestyle=style, linewidth=1.8, marker=marker, markersize=3, label=name
        )
    if panel.against == "steps":
        axes.locator_params(axis="x", integer=True)
    elif panel.against == "tokens":
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)


def _curve(columns: Mapping[str, NDArray[Any]], panel: Panel) -> Curve:
    """The points of one run at which the metric was logged; training metrics are smoothed as in a run's own curves."""
    values = np.array([np.nan if value is None else value for value in columns[panel.metric]], np.float64)
    kept = np.isfinite(values)
    values, at = values[kept], columns[_COLUMNS[panel.against]][kept].astype(np.float64)
    if panel.metric != ACCURACY and len(values) >= SMOOTHED_FROM_STEPS:
        values = np.asarray(running_mean(values.tolist(), smoothing_window(len(values))))
    return at, values


def mean_curve(
    curves: Sequence[Curve], *, is_by_step: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The mean of several seeds' curves and its 95 % interval over seeds, up to where the shortest ends.

    Args:
        curves: One per seed.
        is_by_step: The positions are steps, of which those that all have are compared; otherwise each curve is
            interpolated linearly at positions between.

    Returns:
        Positions, means, lower and upper ends. The ends of one seed, or of equal values, are the mean.
    """
    if is_by_step:
        shared = set(curves[0][0].tolist()).intersection(*(at.tolist() for at, _ in curves[1:]))
        grid = np.array(sorted(shared), np.float64)
    else:
        first, last = max(at[0] for at, _ in curves), min(at[-1] for at, _ in curves)
        grid = np.linspace(first, last, _GRID_POINTS) if last > first else np.array([last])
    values = np.stack([np.interp(grid, at, found) for at, found in curves])
    mean = values.mean(axis=0)
    if len(curves) < 2:
        return grid, mean, mean, mean
    half = student_quantile(len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return grid, mean, mean - half, mean + half


def _unit(metric: str) -> tuple[str, float]:
    row = metric_of(metric)
    return ("%" if row.scale == _PERCENT else row.unit), row.scale


def _title(metric: str) -> str:
    return "Held-out accuracy" if metric == ACCURACY else metric


def _title_and_legend(figure: "Figure", results: Results, condition: str, axes: "Axes", height: float) -> None:
    facts = results.facts["experiment"]
    title = f"{facts['name']}{f': {condition}' if condition else ''}"
    figure.suptitle(plain_text(title), color=INK, fontsize=13, x=0.01, ha="left")
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
    seeds = len(facts["seeds"])
    note = f"mean of {seeds} seed{'s' * (seeds > 1)}"
    note += "; band: 95 % interval over seeds" if seeds > 1 else ""
    figure.text(0.99, 0.005, note, color=INK, fontsize=8, ha="right", va="bottom")
