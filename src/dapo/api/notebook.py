"""Progress of a run in a notebook: curves and the latest lines, updated in place."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from itertools import groupby
from typing import Any, TypeVar

from dapo.api.python_words import in_python
from dapo.core.terminal import print_text
from dapo.core.waiting import STOP_SIGNAL
from dapo.runs.console import REDRAW_S, ProgressDisplay, notebook_display, stopwatch
from dapo.runs.metric_table import PHASES
from dapo.runs.panels import Panel, Record, panels_of, points_of, smoothed
from dapo.runs.sinks import Display

T = TypeVar("T")
POINTS = 150  # of a curve, at most
LINES = 10  # the latest ones that stay visible


class PythonDisplay(ProgressDisplay):
    """The display of `dapo train`, whose messages name Python calls."""

    def message(self, text: str, *, cut: bool = False) -> None:
        super().message(in_python(text), cut=cut)


def display_class() -> Callable[..., Display]:
    """Return the display for a script, or for a kernel that can replace HTML."""
    return NotebookDisplay if notebook_display() else PythonDisplay


class NotebookDisplay:
    """Shows curves, the latest lines and the phase, updated in place; prints messages."""

    def __init__(
        self, num_steps: int, *, first_step: int, token_budget: int | None = None, show: Any = None
    ) -> None:
        """`show` displays like `IPython.display.display`, which None stands for."""
        self._text = StringIO()
        self._lines = ProgressDisplay(
            num_steps, first_step=first_step, token_budget=token_budget, stream=self._text
        )
        self._num_steps = num_steps
        self._step = first_step
        self._records: list[dict[str, Any]] = []
        self._charts: str | None = ""  # None: to be drawn again
        self._name = "start"
        self._began = time.monotonic()
        self._shown = 0.0
        show = show or notebook_display()
        self._handle = show(
            {"text/html": self._phase_html("start", 0, 0, "")}, raw=True, display_id=True
        )

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        now = time.monotonic()
        if name != self._name:
            self._name = name
            self._began = now
        if now - self._shown >= REDRAW_S:
            self._shown = now
            self._show(self._html() + self._phase_html(name, done, total, note))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = min(step + 1, self._num_steps)
        self._lines.log(step, metrics)
        self._add(step, metrics)

    def message(self, text: str) -> None:
        print_text(in_python(text))

    def recall(self, earlier_steps: Iterable[Mapping[str, float]]) -> None:
        earlier = list(earlier_steps)
        self._lines.recall(earlier)
        for metrics in earlier:
            self._add(int(metrics["step"]), metrics)

    def close(self) -> None:
        self._show(self._html())
        self._lines.close()

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; those of its evaluation may come apart."""
        self._charts = None
        if not self._records or self._records[-1]["step"] != step:
            self._records.append({"step": step})
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._records[-1][name] = value

    def _show(self, html: str) -> None:
        self._handle.update({"text/html": html}, raw=True)

    def _html(self) -> str:
        lines = self._text.getvalue().splitlines()[-LINES:]
        if self._charts is None:
            self._charts = "".join(
                _chart(panel, self._records) for panel in panels_of(self._records)
            )
        return f"<div>{self._charts}</div><pre>{escape(chr(10).join(lines))}</pre>"

    def _phase_html(self, name: str, done: int, total: int, note: str) -> str:
        counts = f" {done}/{total} {PHASES[name].counts}," if total else ""
        text = (
            f"step {self._step}/{self._num_steps}: {name}{counts}"
            f" {stopwatch(time.monotonic() - self._began)}"
        )
        bar = ""
        if STOP_SIGNAL.is_raised:
            text += "; stopping, with the state saved (the stop button once more: at once)"
        if total:
            bar = (
                f"<progress max='{total}' value='{done}' style='vertical-align:middle'></progress> "
            )
        small = f"<br><small>{escape(note)}</small>" if note else ""
        return f"<div style='font-family:monospace'>{bar}{escape(text)}{small}</div>"


def _chart(panel: Panel, records: Sequence[Record]) -> str:
    """Draw the curves of a panel as SVG, with names and latest values; empty without values."""
    curves: list[tuple[str, Sequence[int], Sequence[float]]] = []
    labels = []
    for series in panel.series:
        steps, values = points_of(records, series.metric, series.scale)
        if not steps:
            continue
        drawn = _thinned(values)
        if series.data is None:
            drawn = smoothed(drawn)  # thinned before, because it takes the square of the time
        curves.append((series.colour, _thinned(steps), drawn))
        label = f"{escape(series.label)} <b>{values[-1]:.3g}</b>".strip()
        labels.append(f"<span style='color:{series.colour}'>{label}</span>")
    right = "" if panel.right is None else _chart(panel.right, records)
    if not curves:
        return right
    numbers = [value for _, _, values in curves for value in values if not math.isnan(value)]
    low = min(0.0, *numbers) if panel.begins_at_zero else min(numbers)
    height = (max(numbers) - low) or 1.0
    last_step = records[-1]["step"] or 1
    svg = ""
    for colour, drawn_steps, drawn in curves:
        points: list[tuple[float, float] | None] = []
        for step, value in zip(drawn_steps, drawn, strict=True):
            point = (4 + 192 * step / last_step, 60 - 56 * (value - low) / height)
            points.append(None if math.isnan(value) else point)
        svg += _lines(points, colour)
    title = escape(f"{panel.title}, {panel.unit}" if panel.title else panel.unit)
    picture = f"<svg width='200' height='64' role='img' aria-label='{title}'>{svg}</svg>"
    style = "display:inline-block;vertical-align:top;margin-right:1em"
    caption = f"{title}<br>{'<br>'.join(labels)}"
    return f"<div style='{style}'><small>{caption}</small><br>{picture}</div>{right}"


def _lines(points: Sequence[tuple[float, float] | None], colour: str) -> str:
    """Return a line through the points with a gap at each None, and a dot at the last point."""
    svg = ""
    for is_gap, stretch in groupby(points, key=lambda point: point is None):
        if not is_gap:
            text = " ".join(f"{x:.0f},{y:.1f}" for x, y in filter(None, stretch))
            svg += f"<polyline points='{text}' fill='none' stroke='{colour}' stroke-width='1.5'/>"
    last = next((point for point in reversed(points) if point is not None), None)
    if last is not None:
        svg += f"<circle cx='{last[0]:.0f}' cy='{last[1]:.1f}' r='2' fill='{colour}'/>"
    return svg


def _thinned(values: Sequence[T]) -> Sequence[T]:
    """At most `POINTS` of the values, at equal distances, with the last one."""
    every = -(-len(values) // POINTS)
    return values[::-every][::-1]
