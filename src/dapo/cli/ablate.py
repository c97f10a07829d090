"""`dapo ablate`: makes the runs of an experiment, shows their progress and prints its table."""

import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from dapo.analysis.ablate.experiment import Experiment, Variant, load_experiment, shipped_ladders
from dapo.cli.formatting import number, print_ruled, ruled_table
from dapo.config.option_entries import option_differences
from dapo.core.errors import ConfigError
from dapo.core.terminal import print_json, print_text, printable, stdout_to_stderr, warn
from dapo.core.text import plural, shorten
from dapo.runs.console import BAR_WIDTH, SafeConsole, duration, start_live

if TYPE_CHECKING:
    from dapo.analysis.ablate.results import Results

_MAX_SEEDS = 10_000
_LOG_WIDTH = 120
"""Characters per line of tables that go to a file."""


def choose_experiment(
    config: Path | None, overrides: Sequence[str], ladder: str | None, seeds: str | None
) -> Experiment:
    """Load the experiment of a command line. Raises ConfigError.

    Args:
        config: an experiment file, or a configuration on which a ladder is run.
        overrides: `key=value` for every run.
        ladder: the name of a shipped ladder; None: the default one.
        seeds: seeds in the form of `parse_seeds`; None: those of the file.
    """
    if config is None:
        raise ConfigError(
            "dapo ablate takes an experiment file or a configuration; --show NAME prints a shipped"
            f" ladder: {', '.join(shipped_ladders())}"
        )
    seed_list = None if seeds is None else parse_seeds(seeds)
    return load_experiment(config, overrides, ladder=ladder, seeds=seed_list)


def ablate(
    experiment: Experiment, folder: Path, output: Path | None, *, jobs: int | None, as_json: bool
) -> bool:
    """Run an experiment or collect its finished runs; return True if no run has failed.

    Args:
        experiment: the experiment, valid.
        folder: the folder of its runs, with those that exist already.
        output: the folder of tables and pictures; None: `folder`.
        jobs: how many runs train at a time; None: start none, and collect the finished ones.
        as_json: print JSON instead of tables.
    """
    with stdout_to_stderr(as_json):
        results, failures = _run(experiment, folder, jobs=jobs)
    _write_and_print(results, output or folder, as_json=as_json)
    return not failures


def parse_seeds(text: str) -> list[int]:
    """Parse `0,1,2` or `100-104`, or both, to seeds in order. Raises ConfigError."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if match is None:
            raise ConfigError(f"--seeds {text}: expected seeds such as 0,1,2 or 100-104")
        first = int(match[1])
        last = int(match[2] or match[1])
        if not 0 <= last - first < _MAX_SEEDS:
            raise ConfigError(f"--seeds {text}: expected seeds such as 0,1,2 or 100-104")
        seeds += range(first, last + 1)
    return seeds


def _run(
    experiment: Experiment, folder: Path, *, jobs: int | None
) -> "tuple[Results, dict[str, str]]":
    """Return the results, and the reasons of failed runs; `jobs` None starts no run."""
    from dapo.analysis.ablate.results import collect, write_results
    from dapo.analysis.ablate.runner import require_same_options, run_experiment
    from dapo.analysis.ablate.table import make_table
    from dapo.core.waiting import Interrupted
    from dapo.training.signals import signals_as_requests

    def keep(failures: Mapping[str, str]) -> None:
        results = collect(experiment, folder, failures)
        write_results(results, make_table(results), folder)

    if jobs is None:
        require_same_options(experiment, folder)
        return collect(experiment, folder), {}
    for line in _without_effect(experiment):
        warn(line)
    advice = f"; the runs are saved, continue with: {shlex.join(['dapo', *sys.argv[1:]])}"
    message = "saving the runs, then stopping; Ctrl-C now ends them at once"
    try:
        with (
            signals_as_requests(message, on_second=signal.default_int_handler) as stop,
            closing(_ProgressDisplay()) as display,
        ):
            failures = run_experiment(
                experiment, folder, jobs=jobs, stop=stop, display=display, on_finished=keep
            )
    except Interrupted as error:
        raise Interrupted(error.exit_code - 128, advice) from None
    return collect(experiment, folder, failures), failures


def report_again(paths: Sequence[Path], output: Path | None, *, as_json: bool) -> None:
    """Print the table of stored results; merge several folders into `output`."""
    from dapo.analysis.ablate.results import RESULTS_JSON, merge, read_results

    folders = [path.parent if path.name == RESULTS_JSON else path for path in paths]
    if len(folders) > 1 and output is None:
        raise ConfigError("several --report are merged into one result: add --output FOLDER for it")
    results = merge([read_results(folder) for folder in folders])
    _write_and_print(results, output or folders[0], as_json=as_json)


def _write_and_print(results: "Results", output: Path, *, as_json: bool) -> None:
    from dapo.analysis.ablate.figures import plot_results
    from dapo.analysis.ablate.results import write_results
    from dapo.analysis.ablate.table import make_table

    table = make_table(results)
    write_results(results, table, output)
    pictures = plot_results(results, output)
    if as_json:
        print_json({**results.facts, "table": table, "pictures": [str(path) for path in pictures]})
        return
    width = None if sys.stdout.isatty() else _LOG_WIDTH
    print_tables(SafeConsole(width=width), table, results.facts)
    for path in pictures:
        print_text(f"picture: {path}")
    print_text(f"results: {output / 'results.json'}")


def print_tables(
    console: SafeConsole, table: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    """Print, for each condition, accuracy with paired differences, and what each row has cost."""
    for condition in table:
        if condition["condition"]:
            console.print(Text(f"\n{printable(condition['condition'])}", style="bold underline"))
        baseline = facts["experiment"]["baseline"]
        for part in (_accuracy_table(condition, baseline), _cost_table(condition)):
            # rich wraps a title at the width of its table
            console.print(Text(f"\n{part.caption}", style="bold"), soft_wrap=True)
            part.caption = None
            print_ruled(console, part)
        for note in condition["notes"]:
            console.print(f"note: {note}", soft_wrap=True)
    console.print(
        "Intervals are over seeds and problems, of one seed over problems alone; *: the interval"
        " excludes 0. Seconds exclude evaluations. Length, truncated and entropy are means of the"
        " last tenth of the steps; skipped is a fraction of the updates.",
        soft_wrap=True,
    )


def _accuracy_table(condition: Mapping[str, Any], baseline: str) -> Table:
    rows = condition["rows"]
    shows_previous = any(row["previous"] not in (None, baseline) for row in rows)
    counts = {len(row["seeds"]) for row in rows}
    k = condition["samples_per_problem"]
    facts = ["" if k is None else f"avg@{k}", f"{condition['problems']} held-out problems"]
    # a column of seeds only if rows have different numbers of them
    shows_seeds = len(counts) > 1
    if len(counts) == 1:
        facts.append(plural(counts.pop(), "seed"))
    is_binary = condition.get("binary", True)
    show = partial(_with_range, is_binary=is_binary)
    columns = ["accuracy" if is_binary else "mean score"]
    if shows_seeds:
        columns.insert(0, "seeds")
    if shows_previous:
        columns.append("difference to the row named")
    columns.append(f"vs {printable(shorten(baseline, 16))}")
    quantity = "Accuracy in %" if is_binary else "Mean score"
    title = f"{quantity} with 95 % intervals: {', '.join(filter(None, facts))}"
    table = _table(title, "", *columns)
    accuracy = condition["accuracy_before"]
    if accuracy is not None:
        cells = [""] * len(columns)
        cells[1 if shows_seeds else 0] = _number(accuracy["mean"], is_binary=is_binary)
        table.add_row("before training", *cells, style="dim")
    for row in rows:
        cells = [show(row["accuracy"])]
        if shows_seeds:
            cells.insert(0, str(len(row["seeds"])))
        if shows_previous:
            previous = printable(shorten(row["previous"] or "", 16))
            cells.append(f"{show(row['to_previous'], '+')} {previous}")
        table.add_row(printable(row["variant"]), *cells, show(row["to_baseline"], "+"))
    return table


def _cost_table(condition: Mapping[str, Any]) -> Table:
    styles = dict.fromkeys(("tokens", "seconds", "steps"), ",.0f")
    styles |= {"length": ",.1f", "truncated": ".1%", "entropy": ".3f", "skipped": ".1%"}
    table = _table("Cost of a run, and how the policy ends", "", *styles)
    for row in condition["rows"]:
        cells = (number(row[name]["mean"], style) for name, style in styles.items())
        table.add_row(printable(row["variant"]), *cells)
    return table


def _table(title: str, *names: str) -> Table:
    return ruled_table(Column(names[0], min_width=16), *names[1:], caption=title)


def _with_range(estimate: Mapping[str, Any] | None, sign: str = "", *, is_binary: bool) -> str:
    """Return a mean with its interval, and a star after a difference whose interval excludes 0."""
    if estimate is None:
        return ""
    mean = _number(estimate["mean"], sign, is_binary=is_binary)
    if estimate["low"] is None:
        return mean
    low = _number(estimate["low"], sign, is_binary=is_binary)
    high = _number(estimate["high"], sign, is_binary=is_binary)
    text = f"{mean} [{low}, {high}]"
    if not sign:
        return text
    excludes_zero = not estimate["low"] <= 0 <= estimate["high"]
    return f"{text}*" if excludes_zero else f"{text} "


def _number(value: float | None, sign: str = "", *, is_binary: bool) -> str:
    """Return an accuracy in per cent, or a mean score."""
    if not is_binary:
        return number(value, f"{sign}.3f")
    if value is not None:
        value = 100 * value
    return number(value, f"{sign}.1f")


def _without_effect(experiment: Experiment) -> Iterator[str]:
    """Describe the options of rows that have no effect in their configurations."""
    from dapo.start.ignored_options import ignored_options

    reported = set()
    for condition in experiment.conditions:
        for variant in experiment.variants:
            config = experiment.run(experiment.seeds[0], condition, variant).config
            names = {item.partition("=")[0] for item in variant.own}
            for line in ignored_options(config):
                option = line.partition(":")[0]
                if (
                    option in names
                    and variant.inherits is not None
                    and (variant.name, option) not in reported
                ):
                    reported.add((variant.name, option))
                    yield f"{variant.name}: an option without effect: {line}"


def print_plan(experiment: Experiment, folder: Path, *, as_json: bool) -> None:
    """Print the runs of an experiment and the options that each row changes; start nothing."""
    from dapo.analysis.ablate.results import describe_experiment

    runs = experiment.runs()
    if as_json:
        plan = {"folder": str(folder), "runs": [run.name for run in runs]}
        print_json(describe_experiment(experiment) | plan)
        return
    print_text(f"{experiment.name}: {len(runs)} runs of {experiment.base} in {folder / 'runs'}")
    print_text(f"seeds: {', '.join(map(str, experiment.seeds))}")
    if experiment.shared:
        print_text(f"every run: {' '.join(experiment.shared)}")
    for condition in experiment.conditions:
        if condition.name:
            print_text(
                f"\ncondition {condition.name}: {' '.join(condition.own) or 'nothing changed'}"
            )
        for variant in experiment.variants:
            # a row adds to the one that it inherits, or to the configuration; it does not follow
            # the row above
            parent = Variant("", (), None)
            if variant.inherits is not None:
                parent = experiment.variant(variant.inherits)
            configs = [
                experiment.run(experiment.seeds[0], condition, row).config
                for row in (parent, variant)
            ]
            changed = [
                f"{name} {' -> '.join(json.dumps(value).strip(chr(34)) for value in values)}"
                for name, values in option_differences(*configs).items()
            ]
            origin = variant.inherits or experiment.base.name
            print_text(
                f"  {variant.name}: {', '.join(changed) or 'no option changes'}  (from {origin})"
            )
    for line in _without_effect(experiment):
        print_text(f"note: {line}")


class _ProgressDisplay:
    """A live display on a terminal; elsewhere a line for each run that ends."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._live = start_live(self._render, sys.stdout)

    def update(self, progress: Any) -> None:
        """Show new counts of runs."""
        self._progress = progress

    def message(self, text: str) -> None:
        """Print a line above the display."""
        if self._progress is not None:
            done = self._progress.finished + len(self._progress.failed)
            text = f"[{done}/{self._progress.total}] {text}"
        if self._live is None:
            print_text(text)
        else:
            self._live.console.print(text)

    def close(self) -> None:
        """Leave the last state on the terminal."""
        if self._live is not None:
            self._live.stop()

    def _render(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        progress = self._progress
        if progress is None:
            return rows
        done = progress.finished + len(progress.failed)
        remaining = ""
        if progress.seconds_left is not None:
            remaining = f", about {duration(progress.seconds_left)} left"
        failed = f", {len(progress.failed)} failed" if progress.failed else ""
        bar = ProgressBar(total=progress.total, completed=done, width=BAR_WIDTH)
        rows.add_row(
            Text(f"{done} of {progress.total} runs", style="bold"),
            bar,
            f"{done / progress.total:.0%}{failed}{remaining}",
        )
        for name, where in progress.running.items():
            rows.add_row(printable(name), Text(where, style="dim"), "")
        return rows
