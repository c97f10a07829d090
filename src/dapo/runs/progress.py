"""The progress bar of commands that process many items."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dapo.core.terminal import print_text
from dapo.runs.console import SafeConsole, duration

_TOTAL_LINES = 10


@contextmanager
def progress(title: str, *, unit: str = "problems", after_s: float = 0) -> Iterator[Callable[[int, int], None]]:
    """Yield a function `(done, total)` that shows progress on stderr: a bar on a terminal, else ten lines.

    With `after_s`, nothing is shown in the first `after_s` seconds after the first report.
    """
    console = SafeConsole(stderr=True)
    is_terminal = console.is_terminal
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), MofNCompleteColumn(), unit, TimeElapsedColumn(), "left", TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not is_terminal)
    task = bar.add_task(title)
    printed_lines = 0

    began: float | None = None

    def report(done: int, total: int) -> None:
        nonlocal printed_lines, began
        began = time.monotonic() if began is None else began
        if after_s and time.monotonic() - began < after_s:
            return
        bar.start()
        bar.update(task, completed=done, total=total)
        if not is_terminal and total and done * _TOTAL_LINES // total > printed_lines:
            printed_lines = done * _TOTAL_LINES // total
            left = bar.tasks[0].time_remaining
            line = f"{title}: {done:,}/{total:,} {unit}" + (f", {duration(left)} left" if left else "")
            print_text(line, file=sys.stderr)

    if not after_s:
        bar.start()
    try:
        yield report
    finally:
        bar.stop()
