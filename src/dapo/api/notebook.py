"""Progress of a run in a notebook: one display of curves and the latest lines, which is updated in
place.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

from dapo.api.python_errors import in_python
from dapo.core.terminal import print_text
from dapo.runs.console import REDRAW_S, ProgressDisplay, notebook_display, stopwatch
from dapo.runs.metric_table import PHASES, is_mean_score
from dapo.runs.sinks import Display

CURVES = {
    "reward/accuracy": "accuracy",
    "reward/mean": "reward",
    "rollout/response_tokens_mean": "length",
}
CURVES["loss/entropy"] = "entropy"
"""The metrics of which a notebook shows curves, with their labels; before them, the accuracies of
evaluations.
"""
POINTS = 150  # of a curve, at most
LINES = 10  # the latest ones that stay visible


class PythonDisplay(ProgressDisplay):
    """The display of `dapo train`, whose messages name Python calls."""

    def message(self, text: str, *, cut: bool = False) -> None:
        super().message(in_python(text), cut=cut)


def display_class() -> Callable[..., Display]:
    """The display of progress for a script or, in a kernel, which can show and replace HTML, for a
    notebook.
    """
    return NotebookDisplay if notebook_display() else PythonDisplay


class NotebookDisplay:
    """Curves, the latest lines and the current phase, which are updated in place; messages are
    printed.
    """

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
        self._curves: dict[str, list[float]] = {}
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
        self._add(metrics)

    def message(self, text: str) -> None:
        print_text(in_python(text))

    def recall(self, earlier_steps: Iterable[Mapping[str, float]]) -> None:
        earlier = list(earlier_steps)
        self._lines.recall(earlier)
        for metrics in earlier:
            self._add(metrics)

    def close(self) -> None:
        self._show(self._html())
        self._lines.close()

    def _add(self, metrics: Mapping[str, float]) -> None:
        matches = [
            match
            for name in metrics
            if (match := re.fullmatch("eval/(.+)/accuracy", name)) is not None
        ]
        evaluations = [
            f"eval/{match[1]}/score_mean" if is_mean_score(metrics, match[1]) else match[0]
            for match in matches
        ]
        self._curves = {name: [] for name in evaluations} | self._curves
        for name in (*evaluations, *CURVES):
            # older runs have no score_mean
            value = metrics.get(name, metrics.get(name.replace("/score_mean", "/accuracy")))
            if value is not None and math.isfinite(value):
                self._curves.setdefault(name, []).append(value)

    def _show(self, html: str) -> None:
        self._handle.update({"text/html": html}, raw=True)

    def _html(self) -> str:
        lines = self._text.getvalue().splitlines()[-LINES:]
        charts = "".join(_chart(name, values) for name, values in self._curves.items() if values)
        return f"<div>{charts}</div><pre>{escape(chr(10).join(lines))}</pre>"

    def _phase_html(self, name: str, done: int, total: int, note: str) -> str:
        counts = f" {done}/{total} {PHASES[name].counts}," if total else ""
        text = (
            f"step {self._step}/{self._num_steps}: {name}{counts}"
            f" {stopwatch(time.monotonic() - self._began)}"
        )
        bar = (
            f"<progress max='{total}' value='{done}' style='vertical-align:middle'></progress> "
            if total
            else ""
        )
        small = f"<br><small>{escape(note)}</small>" if note else ""
        return f"<div style='font-family:monospace'>{bar}{escape(text)}{small}</div>"


def _chart(name: str, values: Sequence[float]) -> str:
    """A small curve of a metric with its name and its latest value, as SVG."""
    values = values[:: -(-len(values) // POINTS) * -1][::-1]
    low = min(values)
    high = max(values)
    points = [
        f"{4 + 152 * i / max(1, len(values) - 1):.0f},{44 - 40 * (value - low) / ((high - low) or 1):.1f}"
        for i, value in enumerate(values)
    ]
    line = (
        f"<polyline points='{' '.join(points)}' fill='none' stroke='currentColor'"
        " stroke-width='1.5'/>"
    )
    end = "<circle cx='{}' cy='{}' r='2' fill='currentColor'/>".format(*points[-1].split(","))
    svg = f"<svg width='160' height='48' role='img' aria-label='{escape(name)}'>{line}{end}</svg>"
    title = CURVES.get(name) or name.removesuffix("/accuracy").replace(
        "/score_mean", ", mean score"
    )
    label = f"{escape(title)} <b>{values[-1]:.3g}</b>"
    return (
        f"<div style='display:inline-block;margin-right:1em'><small>{label}</small><br>{svg}</div>"
    )
