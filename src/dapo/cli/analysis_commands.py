"""The commands that read runs: view, report, compare, explain, whatif, doctor, ablate."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dapo.cli.arguments import AsJson, Overrides, Run, Trust
from dapo.cli.run_commands import trust_runs
from dapo.core.errors import ConfigError
from dapo.core.files import damage_of
from dapo.core.terminal import print_json, print_text, stdout_to_stderr

# as in main.py, each command imports what it needs, so that --help answers at once

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def view(
    runs: Annotated[
        list[Path] | None, Argument(metavar="RUN", help="run directories, or folders of them; default: ./runs")
    ] = None,
    port: Annotated[
        int | None, Option(min=0, max=65_535, help="port on 127.0.0.1; default: 8020, or a free one; 0: a free one")
    ] = None,
    no_browser: Annotated[bool, Option("--no-browser", help="only print the address")] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs on a local page: curves, responses, problems, evaluations and comparisons."""
    from dapo.analysis.view.queries import Runs
    from dapo.analysis.view.server import serve
    from dapo.cli.formatting import plural

    shown = Runs(runs or [])

    def on_ready(url: str) -> None:
        if as_json:
            found = [{"name": name, "path": str(run.files.directory.path)} for name, run in shown.runs.items()]
            print_json({"url": url, "runs": found})
            return
        print_text(f"{plural(len(shown.runs), 'run')} at {url} (this machine only); Ctrl-C ends")
        if not no_browser:
            webbrowser.open(url)

    serve(shown, port=port, on_ready=on_ready)
    if not as_json:
        print_text("ended; nothing was written into the runs")


@commands.command()
def report(
    run: Run,
    output: Annotated[Path | None, Option(metavar="FILE.html", help="default: the run's name, here")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's page as one HTML file that opens without a network: curves, sampled responses, evaluations."""
    from dapo.analysis.view.report import write_report
    from dapo.cli.formatting import size

    found = write_report(run, output)
    if as_json:
        print_json(found)
        return
    shown = "all" if found["groups"] == found["of_groups"] else f"{found['groups']:,} of {found['of_groups']:,}"
    print_text(
        f"{found['output']}: {size(found['bytes'])}, with {shown} groups of responses; it opens without a network"
    )


@commands.command()
def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN_A RUN_B [RUN_C ...]", help="run directories")],
    by_step: Annotated[bool, Option("--by-step", help="with two runs: also print differences by step")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: options, paired differences of accuracy and of training curves, tokens and seconds."""
    if len(runs) < 2:
        raise ConfigError("dapo compare takes two runs or more; each is compared with the first")
    from dapo.cli.compare import print_comparisons

    with damage_of(", ".join(map(str, runs))):
        print_comparisons(runs, by_step=by_step, as_json=as_json)


@commands.command("explain")
def explain_command(
    run_dir: Run,
    step: Annotated[int, Option(min=1, help="a finished step")],
    group: Annotated[int | None, Option(help="the group's id; default: the group with the most clipped tokens")] = None,
    no_replay: Annotated[bool, Option("--no-replay", help="do not repeat the step to compute ratios")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show equations 11, 13, 9 and 8 with the numbers of one group of a step."""
    from dapo.cli.explain import explain

    with stdout_to_stderr(as_json):
        trust_runs(trust, run_dir)
    with damage_of(run_dir):
        explain(run_dir, step, group, replay=not no_replay, as_json=as_json)


@commands.command("whatif")
def whatif_command(
    run_dir: Run,
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE]...",
            help="options of reward, overlong, advantage, dynamic_sampling.enabled or .filter; --gradient: also loss",
        ),
    ] = None,
    steps: Annotated[str, Option(metavar="A:B", help="steps from A to B, both included")] = ":",
    gradient: Annotated[
        bool, Option("--gradient", help="also compare policy gradients, at stored checkpoints")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Judge and filter a run's stored responses again with changed options; trains nothing."""
    from dapo.cli.whatif import whatif

    with stdout_to_stderr(as_json):
        trust_runs(trust, run_dir)
    with damage_of(run_dir):
        whatif(run_dir, overrides or [], steps=steps, gradient=gradient, as_json=as_json)


@commands.command()
def doctor(
    run_dir: Run,
    as_json: AsJson = False,
    strict: Annotated[bool, Option("--strict", help="exit 1 if there is an error or a warning")] = False,
) -> None:
    """Report the problems of a run: findings with evidence, the prompts they show on, and the option to change."""
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


@commands.command("ablate")
def ablate_command(
    config: Annotated[
        Path | None, Argument(metavar="FILE.yaml", help="an experiment file; or a configuration for the ladder")
    ] = None,
    overrides: Overrides = None,
    ladder: Annotated[str | None, Option(help="with a configuration: table1 (the default) or leave-one-out")] = None,
    seeds: Annotated[str | None, Option(metavar="LIST", help="0,1,2 or 100-104; default: the file's")] = None,
    folder: Annotated[Path | None, Option(help="folder of the runs; default: runs/NAME")] = None,
    output: Annotated[Path | None, Option(help="write results.json and pictures there; default: the folder")] = None,
    jobs: Annotated[int, Option(min=1, max=1024, help="number of concurrent runs, which share the threads")] = 1,
    report: Annotated[
        list[Path] | None,
        Option(
            metavar="FOLDER", help="table and pictures of stored results; several folders are merged; start nothing"
        ),
    ] = None,
    show: Annotated[str | None, Option(metavar="LADDER", help="print a shipped ladder")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="check and list the runs; start nothing")] = False,
    no_run: Annotated[bool, Option("--no-run", help="print the table of finished runs; start nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Train variants of a configuration with several seeds and compare them: Table 1's ladder, or your own."""
    from dapo.analysis.ablate.experiment import find_ladder
    from dapo.cli.ablate import ablate, report_again

    if show is not None:
        print_text(find_ladder(show).read_text(encoding="utf-8"), end="")
    elif report:
        if config is not None or overrides:
            raise ConfigError("--report makes the table from stored results: give a folder, and no configuration")
        report_again(report, output, as_json=as_json)
    elif not ablate(
        config,
        overrides or [],
        ladder=ladder,
        seeds=seeds,
        folder=folder,
        output=output,
        jobs=None if no_run else jobs,
        dry_run=dry_run,
        as_json=as_json,
    ):
        raise typer.Exit(1)
