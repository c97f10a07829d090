"""The progress bar of commands that process many items."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dapo.core.terminal import print_text
from dapo.telemetry.console import SafeConsole, duration

_TOTAL_LINES = 10


@contextmanager
def progress(title: str, *, unit: str = "problems") -> Iterator[Callable[[int, int], None]]:
    """Yield a function `(done, total)` that shows progress on stderr: a bar on a terminal, else ten lines."""
    console = SafeConsole(stderr=True)
    is_terminal = console.is_terminal
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), MofNCompleteColumn(), unit, TimeElapsedColumn(), "left", TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not is_terminal)
    task = bar.add_task(title)
    printed_lines = 0

    def report(done: int, total: int) -> None:
        nonlocal printed_lines
        bar.update(task, completed=done, total=total)
        if not is_terminal and total and done * _TOTAL_LINES // total > printed_lines:
            printed_lines = done * _TOTAL_LINES // total
            left = bar.tasks[0].time_remaining
            line = f"{title}: {done:,}/{total:,} {unit}" + (f", {duration(left)} left" if left else "")
            print_text(line, file=sys.stderr)

    with bar:
        yield report
