"""How far a command is that works through many pieces."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dapo.telemetry.console import duration

_LINES_IN_ALL = 10


@contextmanager
def progress(title: str, *, unit: str = "problems") -> Iterator[Callable[[int, int], None]]:
    """A function `(done, total)`: on a terminal a bar with the time left, elsewhere ten lines in all, on stderr."""
    console = Console(stderr=True)
    is_live = console.is_terminal
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not is_live,
    )
    task = bar.add_task(title)
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        bar.update(task, completed=done, total=total)
        if not is_live and total and done * _LINES_IN_ALL // total > said:
            said = done * _LINES_IN_ALL // total
            left = bar.tasks[0].time_remaining
            told = f"{title}: {done:,}/{total:,} {unit}" + (f", {duration(left)} left" if left else "")
            print(told, file=sys.stderr, flush=True)

    with bar:
        yield tell
