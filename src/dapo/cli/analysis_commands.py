"""The commands that read runs: view, compare, explain, doctor, ablate."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dapo.cli.arguments import COMPARE, INSPECT, AsJson, Overrides, Run
from dapo.core.errors import ConfigError
from dapo.core.files import damage_of
from dapo.core.terminal import print_json, print_text

# as in main.py, each command imports what it needs, so that --help answers at once

commands = typer.Typer()


@commands.command(rich_help_panel=INSPECT, epilog="Example: dapo view runs/a runs/b --no-browser")
def view(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN_DIR", help="Run directories, or folders of them.", show_default="./runs"
        ),
    ] = None,
    port: Annotated[
        int | None,
        Option(min=0, max=65_535, help="Port on 127.0.0.1.", show_default="8020, or a free port"),
    ] = None,
    no_browser: Annotated[
        bool, Option("--no-browser", help="Print the address without opening a browser.")
    ] = False,
    save: Annotated[
        Path | None,
        Option(
            metavar="FILE.html",
            help="Write the page of one run as a file that works offline, instead of serving it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show runs on a local page, while they train or afterwards, or save the page as a file."""
    if save is not None:
        if port is not None:
            raise ConfigError("--save writes a file and serves no page; leave out --port")
        if runs is None or len(runs) != 1:
            raise ConfigError(
                "--save writes the page of one run: dapo view RUN_DIR --save FILE.html"
            )
        _save_page(runs[0], save, as_json)
        return
    from dapo.analysis.view.queries import Runs
    from dapo.analysis.view.server import serve
    from dapo.core.text import plural

    table = Runs(runs or [Path("runs")])

    def on_ready(url: str) -> None:
        if as_json:
            entries = [
                {"name": name, "path": str(run.files.directory.path)}
                for name, run in table.runs.items()
            ]
            print_json({"url": url, "runs": entries})
            return
        print_text(f"{plural(len(table.runs), 'run')} at {url} (this machine only); Ctrl-C ends")
        if not no_browser:
            webbrowser.open(url)

    serve(table, port=port, on_ready=on_ready)
    if not as_json:
        print_text("ended; nothing was written into the runs")


def _save_page(run: Path, file: Path, as_json: bool) -> None:
    """Write the page of a run as an HTML file, and print what it holds."""
    from dapo.analysis.view.report import write_report
    from dapo.core.text import size
    from dapo.runs.stages import run_path_of

    facts = write_report(run_path_of(run), file)
    if as_json:
        print_json(facts)
        return
    count = "all"
    if facts["groups"] != facts["of_groups"]:
        count = f"{facts['groups']:,} of {facts['of_groups']:,}"
    print_text(
        f"{facts['output']}: {size(facts['bytes'])}, with {count} groups of responses; it opens"
        " without a network"
    )


@commands.command(rich_help_panel=COMPARE, epilog="Example: dapo compare runs/a runs/b --by-step")
def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN_A RUN_B", help="Run directories.")],
    by_step: Annotated[
        bool, Option("--by-step", help="With two runs, also print differences by step.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: options, accuracy, training curves and costs.

    Differences of accuracy and of training curves are paired, with 95 % intervals.
    """
    if len(runs) < 2:
        raise ConfigError("dapo compare takes two runs or more; each is compared with the first")
    from dapo.cli.compare import print_comparisons

    with damage_of(", ".join(map(str, runs))):
        print_comparisons(runs, by_step=by_step, as_json=as_json)


@commands.command(
    "explain", rich_help_panel=INSPECT, epilog="Example: dapo explain runs/a --step 12 --group 3"
)
def explain_command(
    run_dir: Run,
    step: Annotated[
        int | None,
        Option(min=1, help="A finished step.", show_default="the newest that trained a group"),
    ] = None,
    group: Annotated[
        int | None,
        Option(help="The group's id.", show_default="the group with the largest spread of rewards"),
    ] = None,
    equations: Annotated[
        bool,
        Option("--equations", help="Also print equations 11, 13 and 9 of the paper with numbers."),
    ] = False,
    tokens: Annotated[
        bool, Option("--tokens", help="Also print the probability of each sampled token.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a group of responses was scored, and why it trained."""
    from dapo.cli.explain import explain

    with damage_of(run_dir):
        explain(run_dir, step, group, equations=equations, tokens=tokens, as_json=as_json)


@commands.command(rich_help_panel=INSPECT, epilog="Example: dapo doctor runs/a --strict")
def doctor(
    run_dir: Run,
    as_json: AsJson = False,
    strict: Annotated[
        bool, Option("--strict", help="Set the exit code to 1 if there is an error or a warning.")
    ] = False,
) -> None:
    """Report the problems of a run, and the options to change.

    Each finding comes with its evidence and with prompts that show it.
    """
    from dapo.analysis.doctor import diagnose
    from dapo.cli.doctor import print_diagnosis

    with damage_of(run_dir):
        diagnosis = diagnose(run_dir)
        if as_json:
            print_json({"run": str(run_dir), **diagnosis.to_json()})
        else:
            print_diagnosis(run_dir, diagnosis)
    if strict and any(case.holds for case in diagnosis.issues):
        raise typer.Exit(1)


@commands.command("ablate", rich_help_panel=COMPARE, epilog="Example: dapo ablate --show table1")
def ablate_command(
    config: Annotated[
        Path | None,
        Argument(
            metavar="FILE.yaml", help="An experiment file, or a configuration for the ladder."
        ),
    ] = None,
    overrides: Overrides = None,
    ladder: Annotated[
        str | None,
        Option(help="With a configuration: table1 or leave-one-out.", show_default="table1"),
    ] = None,
    seeds: Annotated[
        str | None,
        Option(
            metavar="LIST", help="Seeds such as 0,1,2 or 100-104.", show_default="those of the file"
        ),
    ] = None,
    folder: Annotated[
        Path | None, Option(help="Folder of the runs.", show_default="runs/NAME")
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="Folder for results.json and pictures.", show_default="that of the runs"),
    ] = None,
    jobs: Annotated[
        int, Option(min=1, max=1024, help="Number of concurrent runs; they share the threads.")
    ] = 1,
    report: Annotated[
        list[Path] | None,
        Option(
            metavar="FOLDER",
            help=(
                "Print and draw the stored results of a folder, without training; repeat it to"
                " merge folders."
            ),
        ),
    ] = None,
    show: Annotated[str | None, Option(metavar="LADDER", help="Print a shipped ladder.")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check and list the runs without starting them.")
    ] = False,
    no_run: Annotated[
        bool,
        Option("--no-run", help="Print the table of the finished runs without starting others."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train variants of a configuration with several seeds.

    The variants are those of Table 1 of the paper, or those of an experiment file.
    """
    from dapo.analysis.ablate.experiment import find_ladder
    from dapo.cli.ablate import ablate, choose_experiment, print_plan, report_again

    if show is not None:
        file = find_ladder(show)
        text = file.read_text(encoding="utf-8")
        if as_json:
            print_json({"name": show, "path": str(file), "text": text})
        else:
            print_text(text, end="")
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
