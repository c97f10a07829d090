"""`dapo status`: prints the state of runs."""

import shlex
from collections.abc import Mapping, Sequence

from rich.table import Column, Table

from dapo.cli.formatting import number, right, size
from dapo.core.errors import DapoError
from dapo.core.terminal import printable
from dapo.runs.console import SafeConsole, accuracies_in, duration, metric_columns
from dapo.runs.manifest import Fork, describe_changes
from dapo.runs.metric_table import accuracy_text, is_mean_score
from dapo.runs.status import RunStatus
from dapo.runs.time_left import training_seconds


def print_status(statuses: Sequence[RunStatus], damaged: Mapping[str, DapoError]) -> None:
    """Print one run in lines or several as a table, damaged runs last."""
    console = SafeConsole()
    for path, error in damaged.items():
        console.print(f"{path}: damaged: {error}", soft_wrap=True)
    if len(statuses) == 1:
        for label, text in _details(statuses[0]):
            console.print(f"{label:<12}{text}", soft_wrap=True)
        return
    results = [_result(status) for status in statuses]
    label = "result" if any(text.startswith("mean score") for text in results) else "accuracy"
    numbers = right("step", "left", label, "disk", no_wrap=True)
    table = Table(Column("run", overflow="fold"), "state", *numbers)
    for status, result in zip(statuses, results, strict=True):
        remaining = "" if status.seconds_left is None else duration(status.seconds_left)
        cells = (_steps(status), remaining, result, size(status.disk_bytes["total"]))
        table.add_row(status.run, status.state, *cells)
    if statuses:
        console.print(table)
    for status in statuses:
        if status.state == "failed":
            console.print(f"{status.run}: {status.exit_reason}", soft_wrap=True)


def _result(status: RunStatus) -> str:
    """Return the accuracy or mean score of the last evaluation, else that of training."""
    evaluated = [
        name
        for name, evaluation in status.evaluations.items()
        if evaluation.get("accuracy") is not None
    ]
    if not evaluated:
        accuracy = status.metrics.get("reward/accuracy")
        score = status.metrics.get("reward/score_mean")
        if accuracy is None and score is not None:
            return accuracy_text(score, is_score=True)
        return number(accuracy, ".1%")
    name = evaluated[-1]
    metrics = {f"eval/{name}/{key}": value for key, value in status.evaluations[name].items()}
    accuracy = metrics[f"eval/{name}/accuracy"]
    assert accuracy is not None
    return accuracy_text(accuracy, is_score=is_mean_score(metrics, name))


def _details(status: RunStatus) -> list[tuple[str, str]]:
    """List the lines of a run, each a label and its text."""
    rows = [("run", status.run), ("state", _state(status)), ("step", _steps(status))]
    fork = Fork.of_record(status.fork)
    if fork is not None:
        rows.insert(1, ("forked from", printable(fork.describe())))
    if status.seconds_left is not None:
        progress = f"{_steps(status)}, about {duration(status.seconds_left)} left"
        if status.seconds_since_step is not None:
            progress += f"; the newest step {duration(status.seconds_since_step)} ago"
        rows[-1] = ("step", progress)
    for change in status.changes:
        options = describe_changes(change["options"])
        rows.append(("changed", printable(f"{options}, after step {change['after_step']}")))
    if status.metrics:
        values = {name: value for name, value in status.metrics.items() if value is not None}
        values["time/step_s"] = training_seconds(values)
        columns = [" ".join(column.split()) for column in metric_columns(values)]
        rows.append(("metrics", ", ".join(columns)))
    for name, evaluation in status.evaluations.items():
        accuracies = {}
        for metric, value in evaluation.items():
            if value is not None:
                accuracies[f"eval/{name}/{metric}"] = value
        step = f"{evaluation['step']:.0f}"
        rows += [("evaluation", f"{line}, at step {step}") for line in accuracies_in(accuracies)]
    newest = "none yet"
    if status.checkpoint is not None:
        newest = f"step {status.checkpoint['step']}"
    rows.append(("checkpoint", newest))
    rows.append(("disk", _disk_use(status)))
    return rows


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


def _state(status: RunStatus) -> str:
    match status.state:
        case "running":
            if status.process:
                return f"running, process {status.process}"
            return "running, just starting"
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
            return f"stopped ({why}); continue with: dapo resume {shlex.quote(status.run)}"
        case "failed":
            return f"failed: {status.exit_reason}"
        case "solved":
            return "solved: all problems of a step were solved"
        case _:
            return status.state


def _steps(status: RunStatus) -> str:
    num_steps = "?" if status.num_steps is None else status.num_steps
    return f"{status.step}/{num_steps}"
