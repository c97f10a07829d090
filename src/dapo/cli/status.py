"""`dapo status`: prints the state of runs, and follows a run until it ends."""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from dapo.cli.formatting import number, right, say
from dapo.core.errors import DapoError
from dapo.core.terminal import printable
from dapo.core.text import plural, size
from dapo.runs.console import (
    SafeConsole,
    accuracies_in,
    duration,
    evaluation_line,
    metric_columns,
    start_live,
    step_line,
)
from dapo.runs.directory import ENDED, RunDirectory
from dapo.runs.manifest import Fork, describe_changes
from dapo.runs.metric_table import accuracy_text, is_mean_score
from dapo.runs.metrics_file import read_metrics
from dapo.runs.stages import stages_around, unbegun_advice
from dapo.runs.status import RunStatus, run_status
from dapo.runs.time_left import training_seconds

POLL_S = 1.0
_LABEL = 12
_PATH_WIDTH = 32
_ANY_WIDTH = 1000


def print_status(statuses: Sequence[RunStatus], damaged: Mapping[str, DapoError]) -> None:
    """Print one run in lines or several as a table, damaged runs last."""
    console = SafeConsole()
    if len(statuses) == 1 and not damaged:
        _print_run(console, statuses[0])
        return
    states = Counter(status.state for status in statuses)
    counts = [f"{count} {state}" for state, count in states.items()]
    if damaged:
        counts.append(f"{len(damaged)} damaged")
    say(console, f"{plural(states.total() + len(damaged), 'run')}: {', '.join(counts)}")
    if statuses:
        table = _table(statuses)
        wide = console.options.update_width(_ANY_WIDTH)
        if table.__rich_measure__(console, wide).maximum > console.width:
            table = _table(statuses, has_disk=False)
        console.print(table)
    for status in statuses:
        note = status.exit_reason if status.state == "failed" else _later_stage(status)
        if note:
            say(console, f"{status.run}: {note}")
    for path, error in damaged.items():
        say(console, f"{path}: damaged: {error}")


def _table(statuses: Sequence[RunStatus], *, has_disk: bool = True) -> Table:
    """Make a row for each run; a narrow terminal has no room for the disk use."""
    results = [_result(status) for status in statuses]
    label = "result" if any(text.startswith("mean score") for text in results) else "accuracy"
    longest_path = max(len(status.run) for status in statuses)
    table = Table(
        # a path stays whole, to be copied; on a narrow terminal the model gives way
        Column("run", overflow="fold", width=min(longest_path, _PATH_WIDTH)),
        Column("model", overflow="fold"),
        Column("state", no_wrap=True),
        *right("step", label, *(["disk"] if has_disk else []), no_wrap=True),
        Column("newest", no_wrap=True),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for status, result in zip(statuses, results, strict=True):
        model = Path(status.model or "").name
        when = _age(status)
        if status.seconds_left is not None:
            when += f", {duration(status.seconds_left)} left"
        disk = [size(status.disk_bytes["total"])] if has_disk else []
        table.add_row(status.run, model, status.state, _steps(status), result, *disk, when)
    return table


def follow_run(path: Path, *, quiet: bool = False) -> RunStatus:
    """Wait until a run ends, and show its progress meanwhile.

    A terminal has one line, which changes in place; elsewhere each step is a line. The run is not
    disturbed: Ctrl-C ends the following only.

    Args:
        path: the run directory.
        quiet: print nothing.

    Returns:
        The status at the end of the run, or when Ctrl-C was pressed.

    Raises the errors of `run_status`.
    """
    status = run_status(path)
    if quiet:
        with suppress(KeyboardInterrupt):
            while status.state == "running":
                time.sleep(POLL_S)
                status = run_status(path)
        return status
    console = SafeConsole()
    line = Text(printable(verdict_on(status)), no_wrap=True, overflow="ellipsis")
    was_running = status.state == "running"
    live = start_live(lambda: line, sys.stdout) if was_running else None
    if live is None:
        say(console, verdict_on(status))
    num_printed = len(read_step_metrics(path))
    try:
        while status.state == "running":
            time.sleep(POLL_S)
            status = run_status(path)
            line.plain = printable(verdict_on(status))
            if live is None:
                num_printed += _print_new_steps(console, status, num_printed)
    except KeyboardInterrupt:
        say(console, "no longer followed; the run goes on")
        return status
    finally:
        if live is not None:
            live.stop()
    if was_running:
        say(console, verdict_on(status))
    return status


def _print_new_steps(console: SafeConsole, status: RunStatus, num_printed: int) -> int:
    """Print the lines of steps that were logged meanwhile, and return their number."""
    new = read_step_metrics(Path(status.run))[num_printed:]
    for record in new:
        step = int(record["step"])
        values = {name: value for name, value in record.items() if value is not None}
        if any(not name.startswith("eval/") and name != "step" for name in values) and step:
            num_steps = status.num_steps or step
            values["time/step_s"] = training_seconds(values)
            left = status.seconds_left
            say(console, step_line(step, num_steps, values, left, width=console.width))
        evaluation = evaluation_line(step, values)
        if evaluation:
            say(console, evaluation)
    return len(new)


def read_step_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run; none before the first are written."""
    metrics = RunDirectory.open(path).metrics
    return list(read_metrics(metrics)) if metrics.exists() else []


def verdict_on(status: RunStatus) -> str:
    """Say how a run stands: its state, step, result and time, in a sentence."""
    facts = [status.state, f"step {_steps(status)}"]
    if status.seconds_left is not None:
        facts.append(f"about {duration(status.seconds_left)} left")
    result = _result(status)
    if result and "score" not in result:
        result = f"accuracy {result}"
    facts += [result, _age(status)]
    text = ", ".join(filter(None, facts))
    reason = _reason(status)
    return f"{text}: {reason}" if reason else text


def _age(status: RunStatus) -> str:
    """Return how long ago the newest step was logged, or the run was started; empty if unknown."""
    if status.updated is None:
        return ""
    try:
        seconds = time.time() - datetime.fromisoformat(status.updated).timestamp()
    except ValueError:  # of another version
        return ""
    return ago(seconds)


def ago(seconds: float) -> str:
    """Return an age in words, in its largest unit.

    >>> ago(3), ago(200), ago(3 * 3600), ago(400_000)
    ('3 s ago', '3 min ago', '3 h ago', '5 days ago')
    """
    if seconds < 60:
        return f"{max(0, seconds):.0f} s ago"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86400:.0f} days ago"


def _result(status: RunStatus) -> str:
    """Return the accuracy or mean score of the last evaluation, else that of training."""
    name = _whole_set(status)
    if name is None:
        accuracy = status.metrics.get("reward/accuracy")
        score = status.metrics.get("reward/score_mean")
        if accuracy is None and score is not None:
            return accuracy_text(score, is_score=True)
        return number(accuracy, ".1%")
    metrics = {f"eval/{name}/{key}": value for key, value in status.evaluations[name].items()}
    accuracy = metrics[f"eval/{name}/accuracy"]
    assert accuracy is not None
    return accuracy_text(accuracy, is_score=is_mean_score(metrics, name))


def _whole_set(status: RunStatus) -> str | None:
    """Return the name of the newest evaluation of all problems; the others are of its sources."""
    evaluated = [
        name for name, evaluation in _newest(status).items() if evaluation["accuracy"] is not None
    ]
    # only the whole set has an interval, and it is logged first
    whole = [name for name in evaluated if status.evaluations[name].get("low") is not None]
    return next(iter([*whole, *evaluated]), None)


def _newest(status: RunStatus) -> dict[str, dict[str, float | None]]:
    """Return what the newest evaluation has judged; a fork may have evaluated other data before."""
    newest = max((evaluation["step"] or 0 for evaluation in status.evaluations.values()), default=0)
    return {
        name: evaluation
        for name, evaluation in status.evaluations.items()
        if evaluation["step"] == newest and "accuracy" in evaluation
    }


def _print_run(console: SafeConsole, status: RunStatus) -> None:
    """Print the lines of a run, its verdict first, then labels and their texts."""
    say(console, verdict_on(status), style="bold")
    rows = [("run", status.run)]
    if status.model is not None:
        rows.append(("model", status.model))
    fork = Fork.of_record(status.fork)
    if fork is not None:
        rows.append(("forked from", printable(fork.describe())))
    if status.process:
        rows.append(("process", f"{status.process}"))
    for change in status.changes:
        options = describe_changes(change["options"])
        rows.append(("changed", printable(f"{options}, after step {change['after_step']}")))
    if status.metrics:
        values = {name: value for name, value in status.metrics.items() if value is not None}
        values["time/step_s"] = training_seconds(values)
        columns = [" ".join(column.split()) for column in metric_columns(values)]
        rows.append(("metrics", ", ".join(columns)))
    evaluation = _evaluation(status)
    if evaluation:
        rows.append(("evaluation", evaluation))
    newest = "none yet"
    if status.checkpoint is not None:
        newest = f"step {status.checkpoint['step']}"
    rows.append(("checkpoint", newest))
    rows.append(("disk", _disk_use(status)))
    for label, text in rows:
        say(console, text, label=label, indent=_LABEL)


def _evaluation(status: RunStatus) -> str:
    """Return the newest evaluation in a line: of all problems, and of the worst source."""
    name = _whole_set(status)
    if name is None:
        return ""
    whole = status.evaluations[name]
    metrics = {f"eval/{name}/{key}": value for key, value in whole.items() if value is not None}
    text = f"{', '.join(accuracies_in(metrics))}, at step {whole['step']:.0f}"
    sources = {
        source: evaluation["accuracy"]
        for source, evaluation in _newest(status).items()
        if source != name and evaluation["accuracy"] is not None
    }
    if not sources:
        return text
    worst = min(sources, key=lambda source: sources[source] or 0.0)
    value = sources[worst] or 0.0
    shown = accuracy_text(value, is_score=is_mean_score(metrics, name))
    return f"{text}; the worst of {len(sources)} sources: {worst} {shown}"


def _disk_use(status: RunStatus) -> str:
    """Return the size of a run, and those of its parts."""
    parts = [
        f"{name} {size(count)}"
        for name, count in status.disk_bytes.items()
        if name != "total" and count
    ]
    total = size(status.disk_bytes["total"])
    if not parts:
        return total
    return f"{total} ({', '.join(parts)})"


def _reason(status: RunStatus) -> str:
    """Return why the run is in its state, and what continues it; empty if the state says it."""
    match status.state:
        case "running" if not status.process:
            return "just starting"
        case "stopped":
            if (
                status.fork is not None
                and status.exit_reason is None
                and status.step <= status.fork["step"]
            ):
                return (
                    "not trained since the fork; train it with: dapo resume"
                    f" {shlex.quote(status.run)}"
                )
            why = status.stop_reason or "its process was killed"
            return f"{why}; continue with: dapo resume {shlex.quote(status.run)}"
        case "failed":
            return status.exit_reason or ""
        case "solved":
            facts = ["all problems of a step were solved", _later_stage(status)]
            return "; ".join(filter(None, facts))
        case "finished":
            return _later_stage(status)
        case _:
            return ""


def _later_stage(status: RunStatus) -> str:
    """Return which stage comes after a run that has ended, and the command for it; or nothing.

    Its process may live: the next stage begins after its model is loaded.
    """
    if status.state not in ENDED:
        return ""
    path = Path(status.run)
    try:
        folder = stages_around(path)
    except DapoError:  # its file is damaged, or of an older version: the run is shown alone
        return ""
    if folder is None or folder.newest_path.name != path.resolve().name:
        return ""
    if folder.unbegun is None:
        return ""
    return f"{unbegun_advice(path)} (unless it is just beginning)"


def _steps(status: RunStatus) -> str:
    num_steps = "?" if status.num_steps is None else status.num_steps
    return f"{status.step}/{num_steps}"
