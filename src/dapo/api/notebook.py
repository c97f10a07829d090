"""Progress of a run in a notebook: time left, curves, the latest steps and a response, in place."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, TypeVar

from dapo.api.python_words import in_python
from dapo.api.shown_tables import html_table
from dapo.core.terminal import print_text, printable
from dapo.core.text import one_line, shorten
from dapo.core.waiting import STOP_SIGNAL
from dapo.runs.console import (
    REDRAW_S,
    ProgressDisplay,
    columns_of,
    duration,
    notebook_display,
    stopwatch,
)
from dapo.runs.metric_table import PHASES, is_mean_score
from dapo.runs.outcomes import verdict_word
from dapo.runs.panels import HEAD_ROOM, Panel, Record, axis_limits, panels_of, points_of, smoothed
from dapo.runs.sinks import Display
from dapo.runs.time_left import TimeLeft, training_seconds

T = TypeVar("T")
POINTS = 150  # of a curve, at most
LINES = 10  # the latest steps in the table
WIDTH = 192
HEIGHT = 56
MARGIN = 40
"""Size of a chart's panel in pixels, and of the space for the labels of its vertical axis."""
RESPONSE_CHARS = 400
_ALWAYS_SHOWN = ("reward/accuracy", "reward/score_mean", "reward/mean", "loss/nll")
"""Columns of the table that stay even if all its steps have the same value."""


class PythonDisplay(ProgressDisplay):
    """The display of `dapo train`, whose messages name Python calls."""

    def message(self, text: str, *, cut: bool = False) -> None:
        super().message(in_python(text), cut=cut)


def display_class() -> Callable[..., Display]:
    """Return the display for a script, or for a kernel that can replace HTML."""
    return NotebookDisplay if notebook_display() else PythonDisplay


class NotebookDisplay:
    """Shows one display that is updated in place, and prints messages."""

    def __init__(
        self, num_steps: int, *, first_step: int, token_budget: int | None = None, show: Any = None
    ) -> None:
        """`show` displays like `IPython.display.display`, which None stands for."""
        self._num_steps = num_steps
        self._finished_steps = first_step - 1
        self._time_left = TimeLeft(token_budget)
        self._records: list[dict[str, Any]] = []
        self._drawn: str | None = ""  # charts and table; None: to be drawn again
        self._sample = ""
        self._state = ""
        self._name = "start"
        self._began = time.monotonic()
        self._phase_began = self._began
        self._shown = 0.0
        show = show or notebook_display()
        html = self._heading(self._phase_text("start", 0, 0))
        self._handle = show({"text/html": html}, raw=True, display_id=True)

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        now = time.monotonic()
        if name != self._name:
            self._name = name
            self._phase_began = now
        if now - self._shown >= REDRAW_S:
            self._shown = now
            self._show(self._heading(self._phase_text(name, done, total), note))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > 0 and any(not name.startswith("eval/") for name in metrics):
            self._finished_steps = step
            self._time_left.add(metrics)
        self._add(step, metrics)

    def message(self, text: str) -> None:
        print_text(in_python(text))

    def sample(self, row: Mapping[str, Any]) -> None:
        """Take a response of the rollout table, which is shown until the next one."""
        if row["correct"] is None and row["error"] is None:
            verdict = f"score {row['score']:.4g}"
        else:
            verdict = verdict_word(row["correct"], row["error"])
        question = _short(row["question"])
        answer = _short(row["answer"])
        response = _short(row["response"]) or "(nothing)"
        self._sample = (
            "<div style='border-left:3px solid #94a3b8;padding-left:.6em;margin:.6em 0'>"
            f"<small style='opacity:.7'>a response of step {row['step']} to</small>"
            f" {question} <small style='opacity:.7'>reference</small> {answer}"
            "<div style='white-space:pre-wrap;overflow-wrap:anywhere'>"
            f"{response} <b>[{escape(verdict)}]</b></div></div>"
        )

    def recall(self, earlier_steps: Iterable[Mapping[str, float]]) -> None:
        for metrics in earlier_steps:
            self._time_left.add(metrics, timed=False)
            self._add(int(metrics["step"]), metrics)

    def end(self, state: str) -> None:
        """Receive the state in which the run has ended."""
        self._state = state

    def close(self) -> None:
        seconds = stopwatch(time.monotonic() - self._began)
        self._show(self._heading(f"{self._state or 'ended'} after {seconds}", is_over=True))

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; those of its evaluation may come apart."""
        self._drawn = None
        if not self._records or self._records[-1]["step"] != step:
            self._records.append({"step": step})
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._records[-1][name] = value

    def _show(self, heading: str) -> None:
        if self._drawn is None:
            charts = "".join(_chart(panel, self._records) for panel in panels_of(self._records))
            self._drawn = f"<div>{charts}</div>{_table(self._records, self._num_steps)}"
        html = f"<div style='max-width:60em'>{heading}{self._drawn}{self._sample}</div>"
        self._handle.update({"text/html": html}, raw=True)

    def _heading(self, text: str, note: str = "", *, is_over: bool = False) -> str:
        """Return the steps with their bar, the time left, and what happens now."""
        total = self._num_steps
        done = self._finished_steps
        # a run ends with its last step, or when its budget of tokens is spent
        part = max(done / total, self._time_left.budget_fraction())
        # a phase is part of the step after the finished ones
        step = done if is_over else min(done + 1, total)
        facts = [f"step {step}/{total}"]
        seconds = self._time_left.seconds(total - done)
        if seconds is not None and not is_over:
            facts.append(f"{part:.0%}, {duration(seconds)} left")
        bar = f"<progress max='1' value='{part:.3f}' style='vertical-align:middle'></progress>"
        heading = f"<b>{', '.join(facts)}</b>"
        small = f"<br><small>{escape(printable(note))}</small>" if note else ""
        return f"<div>{bar} {heading}: {escape(text)}{small}</div>"

    def _phase_text(self, name: str, done: int, total: int) -> str:
        counts = f" {done}/{total} {PHASES[name].counts}," if total else ""
        seconds = stopwatch(time.monotonic() - self._phase_began)
        text = f"{name}{counts} {seconds}"
        if STOP_SIGNAL.is_raised:
            text += "; stopping, with the state saved (the stop button once more: at once)"
        return text


def _short(text: object) -> str:
    """Return the ends of a text in one line, as HTML."""
    line = one_line(str(text))
    return escape(printable(shorten(line, RESPONSE_CHARS, keep="ends")))


def _table(records: Sequence[Record], num_steps: int) -> str:
    """Return the latest steps as a table, and below it the values that all of them share."""
    # the evaluation before training, which is step 0, has a line while there is place
    candidates = [record for record in records if record["step"] > 0 or len(records) < LINES]
    latest = candidates[-LINES:]
    if not latest:
        return ""
    rows = [_cells(record, num_steps) for record in latest]
    columns = columns_of(latest[-1])
    order = ["step", *(column.label for column in columns), "seconds"]
    distinct_names = dict.fromkeys(name for row in rows for name in row)
    names = sorted(distinct_names, key=lambda name: _position(name, order))
    if names == ["step"]:
        return ""
    removable = {column.label for column in columns} | {"seconds"}
    removable -= {column.label for column in columns if column.metric in _ALWAYS_SHOWN}
    shared_values = {}
    for name in names:
        values = {row[name] for row in rows if name in row}
        if name in removable and len(rows) > 1 and len(values) == 1:
            shared_values[name] = values.pop()
    names = [name for name in names if name not in shared_values]
    table = html_table([{name: row.get(name, "") for name in names} for row in rows])
    if not shared_values:
        return table
    facts = ", ".join(f"{name} {value}" for name, value in shared_values.items())
    return f"{table}<small>in all these steps: {escape(facts)}</small>"


def _position(name: str, order: Sequence[str]) -> int:
    """Return the place of a name in an order, behind all others if it is not there."""
    return order.index(name) if name in order else len(order)


def _cells(record: Record, num_steps: int) -> dict[str, str]:
    """Return the shown metrics of a step by the heads of their columns."""
    cells = {"step": f"{record['step']}/{num_steps}"}
    for column in columns_of(record):
        if column.label and column.metric in record:
            cells[column.label] = column.show(record).strip()
    if "time/step_s" in record:
        cells["seconds"] = f"{training_seconds(record):.1f}"
    for name, value in record.items():
        data = name.removeprefix("eval/").removesuffix("/accuracy")
        # the sources of an evaluation have an accuracy, too, and no interval
        if name != f"eval/{data}/accuracy" or f"eval/{data}/low" not in record:
            continue
        if is_mean_score(record, data):
            cells[f"{data} (score)"] = f"{value:.3f}"
        else:
            cells[data] = f"{value:.1%}"
    return cells


@dataclass(frozen=True)
class _Curve:
    """A curve of a chart."""

    colour: str
    steps: Sequence[int]
    values: Sequence[float]  # one per step; nan for a gap


def _chart(panel: Panel, records: Sequence[Record]) -> str:
    """Draw the curves of a panel as SVG, with names and latest values; empty without values."""
    curves: list[_Curve] = []
    labels = []
    for series in panel.series:
        steps, values = points_of(records, series.metric, series.scale)
        if not steps:
            continue
        heights = _thinned(values)
        if series.data is None:
            heights = smoothed(heights)  # thinned before, because it takes the square of the time
        curves.append(_Curve(series.colour, _thinned(steps), heights))
        label = f"{escape(series.label)} <b>{values[-1]:.3g}</b>".strip()
        labels.append(f"<span style='color:{series.colour}'>{label}</span>")
    right = "" if panel.right is None else _chart(panel.right, records)
    if not curves:
        return right
    numbers = [value for curve in curves for value in curve.values if not math.isnan(value)]
    low, high = axis_limits(panel, min(numbers), max(numbers))
    last_step = max(1, records[-1]["step"])
    svg = _axes(low, high, last_step)
    for curve in curves:
        points: list[tuple[float, float] | None] = []
        for step, value in zip(curve.steps, curve.values, strict=True):
            if math.isnan(value):
                points.append(None)
                continue
            x = MARGIN + WIDTH * step / last_step
            points.append((x, _height(value, low, high)))
        svg += _lines(points, curve.colour)
    title = escape(f"{panel.title}, {panel.unit}" if panel.title else panel.unit)
    picture = (
        f"<svg width='{MARGIN + WIDTH + 8}' height='{HEIGHT + 22}' role='img'"
        f" aria-label='{title}'>{svg}</svg>"
    )
    style = f"display:inline-block;vertical-align:top;width:{MARGIN + WIDTH + 24}px"
    caption = f"{title}<br>{'<br>'.join(labels)}"
    return f"<div style='{style}'><small>{caption}</small><br>{picture}</div>{right}"


def _height(value: float, low: float, high: float) -> float:
    """Return the y of a value in pixels, from the top of a chart whose axis has these ends."""
    return 4 + HEIGHT * (high - value) / (high - low)


def _axes(low: float, high: float, last_step: int) -> str:
    """Return the frame of a chart with the labels of both axes."""
    bottom = 4 + HEIGHT
    right = MARGIN + WIDTH
    # `axis_limits` leaves room above and below the values
    room = (high - low) * HEAD_ROOM / (1 + 2 * HEAD_ROOM)
    highest = high - room
    lowest = 0.0 if low <= 0 < high else low + room
    highest_y = _height(highest, low, high) + 4
    lowest_y = _height(lowest, low, high) + 4
    path = f"M{MARGIN} 4V{bottom}H{right}"
    line = f"<path d='{path}' fill='none' stroke='currentColor' stroke-opacity='0.35'/>"
    texts = [
        _text(MARGIN, bottom + 12, "middle", "0"),
        _text(right, bottom + 12, "end", f"{last_step}"),
        _text(MARGIN - 4, lowest_y, "end", f"{lowest:.3g}"),
        _text(MARGIN - 4, highest_y, "end", f"{highest:.3g}"),
        _text(MARGIN + WIDTH / 2, bottom + 12, "middle", "step"),
    ]
    return f"<g opacity='0.75'>{line}{''.join(texts)}</g>"


def _text(x: float, y: float, anchor: str, text: str) -> str:
    """Return a label of a chart; `anchor` is the part of the text that stands at `x`."""
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}' font-size='10'"
        f" fill='currentColor'>{text}</text>"
    )


def _lines(points: Sequence[tuple[float, float] | None], colour: str) -> str:
    """Return a line through the points with a gap at each None, and a dot at the last point."""
    svg = ""
    for is_gap, stretch in groupby(points, key=lambda point: point is None):
        if not is_gap:
            pairs = " ".join(f"{x:.0f},{y:.1f}" for x, y in filter(None, stretch))
            svg += f"<polyline points='{pairs}' fill='none' stroke='{colour}' stroke-width='1.5'/>"
    drawn_points = [point for point in points if point is not None]
    if drawn_points:
        x, y = drawn_points[-1]
        svg += f"<circle cx='{x:.0f}' cy='{y:.1f}' r='2' fill='{colour}'/>"
    return svg


def _thinned(values: Sequence[T]) -> Sequence[T]:
    """At most `POINTS` of the values, at equal distances, with the last one."""
    distance = math.ceil(len(values) / POINTS)
    from_the_end = values[::-distance]
    return from_the_end[::-1]
