"""The console: progress during a run, and the report at its end."""

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from dapo.core.errors import DapoError
from dapo.core.terminal import print_text, printable
from dapo.core.text import excerpt, with_interval
from dapo.runs.metric_table import PHASES, is_mean_score, metric_of
from dapo.runs.outcomes import VERDICT_WORDS, verdict_word
from dapo.runs.panels import TRAINING, has_mean_scores, training_series
from dapo.runs.time_left import TimeLeft, training_seconds

REFRESHES_PER_SECOND = 2  # 0.7 % of a core
BAR_WIDTH = 32
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"  # with which rich ends a text that it cuts
_CUT = "~"  # as wide, where the terminal's encoding has no ellipsis
_UNITS = {"fraction": "%", "tokens/s": " tok/s", "s": " s"}


class MetricColumn(NamedTuple):
    """A metric as a column of the console, with unit and scale from the table of metrics."""

    label: str
    metric: str
    width: int
    decimals: int
    sign: str = ""

    def show(self, metrics: Mapping[str, float]) -> str:
        """Format the number with its unit, right-aligned; a dash if it is missing or not finite."""
        value = metrics.get(self.metric)
        row = metric_of(self.metric)
        unit = _UNITS.get(row.unit, "")
        if value is None or not math.isfinite(value):
            return f"{'-':>{self.width}}{'':{len(unit)}}"
        return f"{value * row.scale:{self.sign}{self.width}.{self.decimals}f}{unit}"


METRIC_COLUMNS = (
    MetricColumn("reward", "reward/mean", 6, 3, sign="+"),
    MetricColumn("accuracy", "reward/accuracy", 5, 1),
    MetricColumn("kept", "rollout/keep_rate", 5, 1),
    MetricColumn("length", "rollout/response_tokens_mean", 7, 1),
    MetricColumn("truncated", "rollout/truncated_fraction", 5, 1),
    MetricColumn("entropy", "loss/entropy", 5, 3),
    MetricColumn("", "time/tokens_per_s", 5, 0),
    MetricColumn("", "time/step_s", 6, 1),
)
GRADED_COLUMNS = (
    METRIC_COLUMNS[0],
    MetricColumn("score", "reward/score_mean", 8, 3),
    *METRIC_COLUMNS[2:],
)
"""The columns of a step whose verdicts are scores, neither correct nor wrong."""

SUPERVISED_COLUMNS = (
    MetricColumn("loss", "loss/nll", 6, 4),
    MetricColumn("probability", "loss/token_prob_mean", 5, 3),
    MetricColumn("entropy", "loss/entropy", 5, 3),
    *METRIC_COLUMNS[-2:],
)
"""The columns of a step that imitates demonstrations, which has no rewards."""
LEAST_IMPORTANT = (6, 5, 4, 7, 2, 3)
"""Positions in METRIC_COLUMNS: tokens per second, entropy, truncated, seconds, kept, length."""


class SafeConsole(Console):
    """A console that prints text literally, without markup or highlighting, and escapes the unsafe.

    Pass styled text as a `rich.text.Text` or with a style argument.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape the text of a cell before its width is measured."""
        return super().render_str(printable(text, self.encoding), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape every segment of text; rich's own control codes are not text."""
        has_ellipsis = printable(_ELLIPSIS, self.encoding) == _ELLIPSIS
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            text = segment.text
            if not has_ellipsis:
                text = text.replace(_ELLIPSIS, _CUT)
            text = printable(text, self.encoding)
            yield segment if text == segment.text else Segment(text, segment.style)


def start_live(render: Callable[[], RenderableType], stream: TextIO) -> Live | None:
    """Start a live display of what `render` returns; None if the stream cannot show one."""
    # not rich's own test, which variables such as FORCE_COLOR make true for a log file
    if not stream.isatty():
        return None
    console = SafeConsole(file=stream, force_terminal=True)
    if console.is_dumb_terminal:
        return None
    # what other code prints to the same terminal must not tear the display
    redirects = stream in (sys.stdout, sys.stderr)
    live = Live(
        get_renderable=render,
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        redirect_stdout=redirects,
        redirect_stderr=redirects,
    )
    live.start()
    return live


class ProgressDisplay:
    """A live display on a terminal; elsewhere (log file, CI) one line per step in columns."""

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 1,
        token_budget: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Start the display.

        Args:
            num_steps: the steps of the run.
            first_step: the step that comes next: above 1 in a resumed run.
            token_budget: `train.token_budget`.
            stream: the terminal or file; None: the standard output.
        """
        self._stream = stream or sys.stdout
        self._num_steps = num_steps
        self._time_left = TimeLeft(token_budget)
        self._finished_steps = first_step - 1
        self._phase: tuple[str, int, int] | None = ("start", 0, 0)
        self._phase_started = time.monotonic()
        self._training: dict[str, list[float]] = {metric: [] for metric in TRAINING}
        self._has_scores = False
        self._note = ""
        self._live = start_live(self._render, self._stream)

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Show the current phase and its progress. The call is cheap, because a thread draws.

        Args:
            name: the phase.
            done: the finished part of its work.
            total: all of its work; 0: only its time is shown.
            note: what the phase has done so far, in a few words.
        """
        # the seconds of a phase go on while its numbers change
        if self._phase is None or name != self._phase[0]:
            self._phase_started = time.monotonic()
        self._phase = (name, done, total)
        self._note = note

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, of an evaluation, or of both."""
        evaluation = evaluation_line(step, metrics)
        self._add(metrics)
        if step > 0 and any(not name.startswith("eval/") for name in metrics):
            self._finished_steps = step
            self._time_left.add(metrics)
            metrics = {**metrics, "time/step_s": training_seconds(metrics)}
            width = None
            if self._live is not None:
                width = self._live.console.width
            line = step_line(step, self._num_steps, metrics, self._seconds_left(), width=width)
            self.message(line, cut=True)
        if evaluation:
            self.message(evaluation)

    def recall(self, earlier_steps: Iterable[Mapping[str, float]]) -> None:
        """Read the metrics of the steps before a resume, for the curve and the token budget."""
        for metrics in earlier_steps:
            self._add(metrics)
            self._time_left.add(metrics, timed=False)

    def close(self) -> None:
        """Stop, and leave the last state without its phase; do nothing in a second call."""
        self._phase = None
        if self._live is not None:
            self._live.stop()

    def message(self, text: str, *, cut: bool = False) -> None:
        """Print a text above a live display; a narrow terminal wraps it, or cuts it with `cut`."""
        if self._live is None:
            try:
                print_text(text, file=self._stream)
            except BrokenPipeError:
                # for later messages, and the flush as the process ends
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())
                raise DapoError(
                    "the output was closed, so training ends here; dapo resume RUN continues it"
                ) from None
        else:
            self._live.console.print(text, no_wrap=cut, overflow="ellipsis" if cut else None)

    def _seconds_left(self) -> float | None:
        return self._time_left.seconds(self._num_steps - self._finished_steps)

    def _render(self) -> RenderableType:
        """Draw steps, phase and curve; a thread of the display calls it."""
        rows = Table.grid(padding=(0, 2))
        rows.add_row(*self._steps_row())
        # read once: the training thread may change it meanwhile
        phase = self._phase
        if phase is not None:
            rows.add_row(*self._phase_row(*phase))
        curve = self._curve_row()
        if curve:
            rows.add_row(*curve)
        if phase is None or not self._note:
            return rows
        note = Text(self._note, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(rows, note)

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Read the metrics of a step, of an evaluation or of both for the curve."""
        self._has_scores = self._has_scores or has_mean_scores(metrics)
        for metric, values in self._training.items():
            value = metrics.get(metric)
            if value is not None and math.isfinite(value):
                values.append(value)

    def _curve_row(self) -> tuple[RenderableType, ...]:
        """Return the curve of the accuracy or score with its last and first value, if any."""
        logged = [name for name, values in self._training.items() if values]
        series = training_series(logged, self._has_scores)
        values = self._training[series.metric]
        if not values:
            return ()
        name = "score"
        style = ".3f"
        if series.is_percent:
            name = "accuracy"
            style = ".1%"
        note = f"{values[-1]:{style}}"
        if len(values) > 1:
            note += f" now, {values[0]:{style}} at first"
        return name, Text(sparkline(values, BAR_WIDTH), style="green"), note

    def _steps_row(self) -> tuple[RenderableType, ...]:
        done = self._finished_steps
        total = self._num_steps
        seconds_left = self._seconds_left()
        # the run ends at the last step or with the token budget, whichever comes first
        part = max(done / total, self._time_left.budget_fraction())
        is_over = self._phase is None or part >= 1
        if seconds_left is None or is_over:
            note = f"{part:.0%}"
        else:
            note = f"{part:.0%}, {duration(seconds_left)} left"
        # a phase is part of the step after the finished ones
        step = done
        if self._phase is not None:
            step = min(done + 1, total)
        bar = ProgressBar(total=1.0, completed=part, width=BAR_WIDTH)
        return Text(f"step {step}/{total}", style="bold"), bar, note

    def _phase_row(self, name: str, done: int, total: int) -> tuple[RenderableType, ...]:
        seconds = stopwatch(time.monotonic() - self._phase_started)
        if not total:
            return name, "", seconds
        bar = ProgressBar(
            total=total,
            completed=done,
            width=BAR_WIDTH,
            complete_style="cyan",
            finished_style="cyan",
        )
        return name, bar, f"{done}/{total} {PHASES[name].counts}, {seconds}"


def step_line(
    step: int,
    num_steps: int,
    metrics: Mapping[str, float],
    seconds_left: float | None,
    *,
    width: int | None = None,
) -> str:
    """Format a step as a line of a log file; the columns of all steps are equally wide.

    Args:
        step: The finished step.
        num_steps: The steps of the run.
        metrics: The metrics of the step.
        seconds_left: The estimate for the rest of the run, if there is one.
        width: A longer line leaves out columns, in the order of `LEAST_IMPORTANT`, until it fits.
    """
    start = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    columns = metric_columns(metrics)
    time_left = "-"
    if seconds_left is not None:
        time_left = duration(seconds_left)
    end = [f"left {time_left:>6}"]
    shortfall = metrics.get("rollout/shortfall_groups")
    if shortfall:
        groups = "group" if shortfall == 1 else "groups"
        end.append(f"({shortfall:.0f} {groups} short)")
    line = "  ".join([start, *columns, *end])
    for i in LEAST_IMPORTANT:
        if width is None or len(line) <= width:
            break
        if i >= len(columns):
            continue
        columns[i] = ""
        line = " ".join(filter(None, [start, *columns, *end]))
    return line


def columns_of(metrics: Mapping[str, float | None]) -> tuple[MetricColumn, ...]:
    """Return the columns for a step with these metrics."""
    if "loss/nll" in metrics:
        return SUPERVISED_COLUMNS
    has_accuracy = metrics.get("reward/accuracy") is not None
    if metrics.get("reward/score_mean") is not None and not has_accuracy:
        return GRADED_COLUMNS
    return METRIC_COLUMNS


def metric_columns(metrics: Mapping[str, float]) -> list[str]:
    """Format the metrics in a step's line, each column with the same width in every step."""
    columns = columns_of(metrics)
    with_label = [f"{column.label} {column.show(metrics)}" for column in columns if column.label]
    return with_label + [column.show(metrics) for column in columns if not column.label]


def accuracies_in(metrics: Mapping[str, float]) -> list[str]:
    """Format accuracy or mean score of each evaluation in the metrics, with name and interval."""
    names: dict[str, None] = {}
    for metric in metrics:
        if metric.startswith("eval/"):
            data_set, _, _ = metric.removeprefix("eval/").rpartition("/")
            names.setdefault(data_set)
    entries = []
    for name in names:
        accuracy = metrics.get(f"eval/{name}/accuracy")
        interval = (metrics.get(f"eval/{name}/low"), metrics.get(f"eval/{name}/high"))
        if accuracy is not None and is_mean_score(metrics, name):
            entries.append(f"{name} mean score {with_interval(accuracy, interval, '.3f')}")
        else:
            entries.append(f"{name} {with_interval(accuracy, interval)}")
    return entries


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format the accuracies of an evaluation as one line; empty if there are none."""
    entries = accuracies_in(metrics)
    if not entries:
        return ""
    line = f"step {step}: evaluation: {', '.join(entries)}"
    seconds = metrics.get("time/evaluate_s")
    if seconds is not None:
        line += f", in {stopwatch(seconds)}"
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw block characters from 0, or a negative minimum, to the maximum; averages over bins if
    there are too many values.
    """
    bins = min(width, len(values))
    edges = [round(i * len(values) / bins) for i in range(bins + 1)]
    means = [fmean(values[start:stop]) for start, stop in pairwise(edges)]
    bottom = min([*means, 0.0])
    span = max(max(means) - bottom, 1e-9)  # all values may be equal
    heights = [int(8 * (mean - bottom) / span) for mean in means]
    return "".join("▁▂▃▄▅▆▇█"[min(7, height)] for height in heights)


def duration(seconds: float) -> str:
    """Format seconds as `45s`, `8m`, `2h05m` or `3d04h`."""
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    hours = round(minutes / 60)
    return f"{hours // 24}d{hours % 24:02}h"


def stopwatch(seconds: float) -> str:
    """Format seconds as a running clock: `45s`, `2m05s` or, from an hour on, like `duration`."""
    if 59.5 <= seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02}s"
    return duration(seconds)


def final_report(
    console: Console,
    *,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    samples: Sequence[Mapping[str, Any]],
    files: Mapping[str, object],
    difference: str = "",
) -> None:
    """Print the report at the end of a run: accuracies, responses to the same problems, commands.

    Args:
        console: prints the report.
        before: the summary of the first evaluation, if there is one.
        after: the summary of the last one.
        samples: problems with question, answer, before, before_correct, after and after_correct;
            long texts are cut.
        files: paths or next commands by their labels, in the order to print.
        difference: how the two evaluations differ in more than the model; empty if they do not.
    """
    if before is not None and after is not None:
        console.print(_comparison(before, after))
        if difference:
            console.print(f"the two evaluations are not comparable: {difference}")
    for number, sample in enumerate(samples, start=1):
        title = f"\nProblem {number} of {len(samples)}, before and after training"
        console.print(Text(title, style="bold"))
        console.print(_sample(sample, console))
    console.print()
    width = max((len(label) for label in files), default=0)
    for label, location in files.items():
        shown_location = printable(str(location), console.encoding)
        line = Text.assemble((f"{label:<{width}}  ", "dim"), shown_location)
        # a path or a command must stay in one line, to be copied
        is_copied = str(location).startswith(("dapo ", "/")) or " " not in str(location)
        console.print(line, soft_wrap=is_copied)


def _comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """Return the table of two evaluations beside each other."""
    table = Table(
        "",
        Column("before training", justify="right"),
        Column("after training", justify="right"),
        title="Held-out problems",
        title_style="bold",
        title_justify="left",
    )
    label = "mean score"
    style = ".3f"
    if before.get("binary", True):
        label = "accuracy"
        style = ".1%"
    results = before, after
    accuracies = [with_interval(result["accuracy"], None, style) for result in results]
    table.add_row(label, *(Text(accuracy, style="bold") for accuracy in accuracies))
    intervals = []
    for result in results:
        interval = "none"
        if result["low"] is not None:
            interval = f"{result['low']:{style}} to {result['high']:{style}}"
        intervals.append(interval)
    table.add_row("95 % interval", *intervals)
    table.add_row("problems", *(f"{result['problems']:,}" for result in results))
    lengths = [f"{result['response_tokens_mean']:,.1f}" for result in results]
    table.add_row("mean response, tokens", *lengths)
    table.add_row("truncated", *(f"{result['truncated_fraction']:.1%}" for result in results))
    return table


def _sample(sample: Mapping[str, Any], console: Console) -> RenderableType:
    """Return a problem with its responses before and after training."""

    def shown(text: object) -> Text:
        return Text(printable(excerpt(str(text)), console.encoding))

    rows = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    rows.add_row(Text("question", style="dim"), shown(sample["question"]))
    rows.add_row(Text("reference", style="dim"), shown(sample["answer"]))
    for label in ("before", "after"):
        mark = Text.assemble((f"{label} ", "dim"), _mark(sample[f"{label}_correct"], console))
        rows.add_row(mark, shown(sample[label]))
    return Padding(rows, (0, 0, 0, 2))


def _mark(correct: bool | None, console: Console) -> Text:
    """Return the sign of a verdict, or its word where the terminal cannot print the sign."""
    symbol, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}[correct]
    if printable(symbol, console.encoding) == symbol:
        return Text(symbol, style=style)
    word = VERDICT_WORDS["error"] if correct is None else verdict_word(correct, None)
    return Text(word, style=style)


LOG_PARTS = 10
LOG_S = 10.0
"""A log file gets a line of progress after a tenth of the work, at least these seconds after the
one before.
"""
REDRAW_S = 1.0  # minimum seconds between two updates of a notebook's line


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` in a kernel, whose output can be replaced later; None elsewhere."""
    ipython = sys.modules.get("IPython")
    # IPython in a terminal has no kernel
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    display: Callable[..., Any] = importlib.import_module("IPython.display").display
    return display


def _with_note(title: str, note: str) -> str:
    return f"{title}: {note} so far" if note else title


@contextmanager
def progress(
    title: str, *, unit: str = "problems", after_s: float = 0
) -> Iterator[Callable[..., None]]:
    """Yield a function `(done, total, note="")` that shows progress on a terminal or in a notebook.

    Elsewhere it prints a line at the end, and a few before in a long run. All is on stderr.

    Args:
        title: what is done.
        unit: what is counted.
        after_s: the seconds after the first report in which nothing is shown.
    """
    console = SafeConsole(stderr=True)
    display = notebook_display()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        unit,
        TimeElapsedColumn(),
        "left",
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(title)
    began = None
    shown_at = time.monotonic()
    shown_parts = 0
    handle = None

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal began, shown_at, shown_parts, handle
        now = time.monotonic()
        began = began or now
        heading = _with_note(title, note if done < total else "")
        if after_s and now - began < after_s:
            return
        bar.start()
        bar.update(task, completed=done, total=total, description=heading)
        parts = done if display else done * LOG_PARTS // max(1, total)
        least_s = REDRAW_S if display else LOG_S
        is_due = done == total or now - shown_at >= least_s
        if console.is_terminal or parts <= shown_parts or not is_due:
            return
        shown_at = now
        shown_parts = parts
        seconds_left = bar.tasks[0].time_remaining
        time_left = f", {duration(seconds_left)} left" if seconds_left else ""
        line = f"{heading}: {done:,}/{total:,} {unit}{time_left}"
        if display is None:
            print_text(line, file=sys.stderr)
        elif handle is None:
            handle = display({"text/plain": printable(line)}, raw=True, display_id=True)
        else:
            handle.update({"text/plain": printable(line)}, raw=True)

    if not after_s:
        bar.start()
    try:
        yield report
    finally:
        bar.stop()
