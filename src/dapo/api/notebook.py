"""Progress of a run in a notebook: a display that is updated in place, and a permanent line per step."""

import importlib
import sys
import time
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from dapo.core.terminal import print_text
from dapo.runs.console import ProgressDisplay, stopwatch
from dapo.runs.metric_table import PHASES
from dapo.runs.sinks import Display

REFRESH_S = 0.5
"""Minimum seconds between two updates of the display."""


def open_display(num_steps: int, first_step: int, token_budget: int | None) -> Display:
    """Open a display of progress: for a notebook, or that of `dapo train`."""
    if in_notebook():
        return NotebookDisplay(num_steps, first_step=first_step, token_budget=token_budget)
    return ProgressDisplay(num_steps, first_step=first_step, token_budget=token_budget)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show and replace HTML."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookDisplay:
    """Log lines, and below them the current phase, which is updated in place."""

    def __init__(self, num_steps: int, *, first_step: int, token_budget: int | None = None, show: Any = None) -> None:
        """`show` displays HTML and returns a handle with `update`; None: IPython's."""
        self._lines = ProgressDisplay(num_steps, first_step=first_step, token_budget=token_budget)
        self._num_steps, self._step = num_steps, first_step
        self._name, self._began, self._shown = "start", time.monotonic(), 0.0
        self._handle = (show or _Handle)(self._html("start", 0, 0, ""))

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        now = time.monotonic()
        if name != self._name:
            self._name, self._began = name, now
        elif now - self._shown < REFRESH_S:
            return
        self._shown = now
        self._handle.update(self._html(name, done, total, note))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = min(step + 1, self._num_steps)
        self._lines.log(step, metrics)

    def message(self, text: str) -> None:
        print_text(text)

    def recall(self, earlier_steps: Iterable[Mapping[str, float]]) -> None:
        self._lines.recall(earlier_steps)

    def close(self) -> None:
        self._handle.update("")
        self._lines.close()

    def _html(self, name: str, done: int, total: int, note: str) -> str:
        counts = f" {done}/{total} {PHASES[name].counts}," if total else ""
        text = f"step {self._step}/{self._num_steps}: {name}{counts} {stopwatch(time.monotonic() - self._began)}"
        bar = f"<progress max='{total}' value='{done}' style='vertical-align:middle'></progress> " if total else ""
        small = f"<br><small>{escape(note)}</small>" if note else ""
        return f"<div style='font-family:monospace'>{bar}{escape(text)}{small}</div>"


class _Handle:
    def __init__(self, html: str) -> None:
        self._ipython: Any = importlib.import_module("IPython.display")
        self._handle = self._ipython.display(self._ipython.HTML(html), display_id=True)

    def update(self, html: str) -> None:
        self._handle.update(self._ipython.HTML(html))
