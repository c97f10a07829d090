"""The commands that read runs: view, report, compare, explain, doctor, ablate."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dapo.cli.arguments import AsJson, Overrides, Run, Trust
from dapo.cli.help import COMPARE, INSPECT, Commands
from dapo.cli.run_commands import trust_runs
from dapo.core.errors import ConfigError
from dapo.core.files import damage_of
from dapo.core.terminal import print_json, print_text, stdout_to_stderr

# as in main.py, each command imports what it needs, so that --help answers at once

commands = Commands()


@commands.command(group=INSPECT)
def view(
    runs: Annotated[list[Path] | None, Argument(metavar="RUN_DIR")] = None,
    port: Annotated[int | None, Option(min=0, max=65_535)] = None,
    no_browser: Annotated[bool, Option("--no-browser")] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs on a local page, while they train or afterwards."""
    from dapo.analysis.view.queries import Runs
    from dapo.analysis.view.server import serve
    from dapo.cli.formatting import plural

    shown = Runs(runs or [Path("runs")])

    def on_ready(url: str) -> None:
        if as_json:
            found = [
                {"name": name, "path": str(run.files.directory.path)}
                for name, run in shown.runs.items()
            ]
            print_json({"url": url, "runs": found})
            return
        print_text(f"{plural(len(shown.runs), 'run')} at {url} (this machine only); Ctrl-C ends")
        if not no_browser:
            webbrowser.open(url)

    serve(shown, port=port, on_ready=on_ready)
    if not as_json:
        print_text("ended; nothing was written into the runs")


@commands.command(group=INSPECT)
def report(
    run: Run,
    output: Annotated[Path | None, Option(metavar="FILE.html")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's page as one HTML file that works offline."""
    from dapo.analysis.view.report import write_report
    from dapo.cli.formatting import size

    found = write_report(run, output)
    if as_json:
        print_json(found)
        return
    shown = (
        "all"
        if found["groups"] == found["of_groups"]
        else f"{found['groups']:,} of {found['of_groups']:,}"
    )
    about = f"{size(found['bytes'])}, with {shown} groups of responses; it opens without a network"
    print_text(f"{found['output']}: {about}")


@commands.command(group=COMPARE)
def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN_A RUN_B")],
    by_step: Annotated[bool, Option("--by-step")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: options, accuracy, training curves and costs."""
    if len(runs) < 2:
        raise ConfigError("dapo compare takes two runs or more; each is compared with the first")
    from dapo.cli.compare import print_comparisons

    with damage_of(", ".join(map(str, runs))):
        print_comparisons(runs, by_step=by_step, as_json=as_json)


@commands.command("explain", group=INSPECT)
def explain_command(
    run_dir: Run,
    step: Annotated[int | None, Option(min=1)] = None,
    group: Annotated[int | None, Option()] = None,
    no_replay: Annotated[bool, Option("--no-replay")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show how a group of responses was scored and trained on."""
    from dapo.cli.explain import explain

    with stdout_to_stderr(as_json):
        trust_runs(trust, run_dir)
    with damage_of(run_dir):
        explain(run_dir, step, group, replay=not no_replay, as_json=as_json)


@commands.command(group=INSPECT)
def doctor(
    run_dir: Run, as_json: AsJson = False, strict: Annotated[bool, Option("--strict")] = False
) -> None:
    """Report the problems of a run, and the options to change."""
    from dapo.analysis.doctor import diagnose
    from dapo.cli.doctor import diagnosis_lines

    with damage_of(run_dir):
        diagnosis = diagnose(run_dir)
        if as_json:
            print_json({"run": str(run_dir), **diagnosis.to_json()})
        else:
            for line in diagnosis_lines(run_dir, diagnosis):
                print_text(line)
    if strict and any(case.holds for case in diagnosis.issues):
        raise typer.Exit(1)


@commands.command("ablate", group=COMPARE)
def ablate_command(
    config: Annotated[Path | None, Argument(metavar="FILE.yaml")] = None,
    overrides: Overrides = None,
    ladder: Annotated[str | None, Option()] = None,
    seeds: Annotated[str | None, Option(metavar="LIST")] = None,
    folder: Annotated[Path | None, Option()] = None,
    output: Annotated[Path | None, Option()] = None,
    jobs: Annotated[int, Option(min=1, max=1024)] = 1,
    report: Annotated[list[Path] | None, Option(metavar="FOLDER")] = None,
    show: Annotated[str | None, Option(metavar="LADDER")] = None,
    dry_run: Annotated[bool, Option("--dry-run")] = False,
    no_run: Annotated[bool, Option("--no-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Train variants of a configuration with several seeds."""
    from dapo.analysis.ablate.experiment import find_ladder
    from dapo.cli.ablate import ablate, choose_experiment, print_plan, report_again

    if show is not None:
        print_text(find_ladder(show).read_text(encoding="utf-8"), end="")
    elif report:
        if config is not None or overrides:
            raise ConfigError(
                "--report makes the table from stored results: give a folder, and no configuration"
            )
        report_again(report, output, as_json=as_json)
    else:
        experiment = choose_experiment(config, overrides or [], ladder, seeds)
        folder = folder or Path("runs") / experiment.name
        if dry_run:
            print_plan(experiment, folder, as_json=as_json)
        elif not ablate(experiment, folder, output, jobs=None if no_run else jobs, as_json=as_json):
            raise typer.Exit(1)
