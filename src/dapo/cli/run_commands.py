"""The commands that start, continue and evaluate runs, such as train, resume and eval."""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dapo.cli.arguments import (
    COMPARE,
    INSPECT,
    TRAIN,
    AsJson,
    Changes,
    ConfigOrOption,
    ConfigPath,
    NewRun,
    Overrides,
    Run,
    Trust,
    complete_config,
    set_once,
)
from dapo.core.errors import ConfigError, DapoError, DataError
from dapo.core.memory import keep_freed_memory
from dapo.core.model_files import DtypeName
from dapo.core.terminal import print_json, stdout_to_stderr

# as in main.py, each command imports what it needs, so that --help and a config error answer at
# once

commands = typer.Typer()


@commands.command(
    rich_help_panel=TRAIN, epilog="Example: dapo train my.yaml optim.lr=2e-6 --run-dir runs/a"
)
def train(
    config: ConfigOrOption,
    overrides: Overrides = None,
    run_dir: NewRun = None,
    as_json: AsJson = False,
) -> None:
    """Train a model from a configuration, or from options alone.

    With options alone: dapo train model=NAME data.train=SOURCE.
    """
    from dapo.config import build_config, find_config
    from dapo.config.load import read_options
    from dapo.config.options import STAGES
    from dapo.config.stages import build_stages

    stages = None
    if "=" in config and not os.path.lexists(config):
        options = [config, *(overrides or [])]
        set_once(options)
        loaded = build_config({}, options, where="dapo train")
        file = Path("run")
    else:
        file = find_config(config)
        raw = read_options(file)
        if STAGES in raw:
            stages = build_stages(raw, overrides or [], where=str(file))
        else:
            loaded = build_config(raw, overrides or [], where=str(file))
    from dapo.cli.train import start_run, start_stages
    from dapo.runs.directory import default_run_path

    path = run_dir or default_run_path(file, datetime.now())
    keep_freed_memory()
    with stdout_to_stderr(as_json):
        if stages is None:
            start_run(loaded, run_dir=path, config_name=file.stem)
        else:
            start_stages(stages, run_dir=path)
    if as_json:
        _print_run(path)


@commands.command(rich_help_panel=TRAIN, epilog="Example: dapo resume runs/a train.num_steps=200")
def resume(
    run_dir: Run, overrides: Changes = None, trust: Trust = False, as_json: AsJson = False
) -> None:
    """Continue a run from its last checkpoint."""
    from dapo.cli.train import resume_run

    keep_freed_memory()
    with stdout_to_stderr(as_json):
        trust_runs(trust, run_dir)
        resume_run(run_dir, overrides or [])
    if as_json:
        _print_run(run_dir)


def trust_runs(wanted: bool, *runs: str | Path) -> None:
    """Carry out `--trust` for the arguments that are runs."""
    from dapo.runs.directory import RunDirectory
    from dapo.runs.stored_config import trust_module_folders

    for run in runs if wanted else ():
        if RunDirectory.is_run(run):
            trust_module_folders(run)


def _print_run(path: Path) -> None:
    from dapo.runs.status import run_status

    print_json(run_status(path).as_json())


@commands.command(
    rich_help_panel=TRAIN, epilog="Example: dapo fork runs/a --step 40 --times 4 --no-train"
)
def fork(
    run: Annotated[Path, Argument(metavar="RUN_DIR", help="The run to fork.")],
    overrides: Changes = None,
    step: Annotated[
        int | None,
        Option(min=1, help="Step of the checkpoint to start from.", show_default="the newest"),
    ] = None,
    times: Annotated[
        int | None, Option(min=1, help="Number of branches, each with its own seed.")
    ] = None,
    run_dir: Annotated[
        Path | None, Option(help="Run directory to write; --times appends -1, -2 and so on.")
    ] = None,
    no_train: Annotated[
        bool,
        Option("--no-train", help="Create the run without training it; dapo resume trains it."),
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Start a new run from a checkpoint of another run.

    The two runs are equal up to that step and use the same random numbers after it.
    """
    from dapo.cli.train import fork_run

    if not no_train:
        keep_freed_memory()
    with stdout_to_stderr(as_json):
        trust_runs(trust, run)
    fork_run(
        run,
        step=step,
        overrides=overrides or [],
        times=times,
        run_dir=run_dir,
        trains=not no_train,
        as_json=as_json,
    )


@commands.command(
    rich_help_panel=TRAIN, epilog="Example: dapo submit runs/a --time 12:00:00 --dry-run"
)
def submit(
    config_or_run: Annotated[
        Path,
        Argument(
            metavar="CONFIG.yaml|RUN_DIR",
            autocompletion=complete_config,
            help="A configuration, as for dapo train, or a run to continue.",
        ),
    ],
    overrides: Overrides = None,
    nodes: Annotated[int, Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, Option(min=0, help="GPUs per node.")] = 0,
    cpus_per_node: Annotated[
        int | None, Option(min=1, help="CPUs per node.", show_default="all")
    ] = None,
    time: Annotated[
        str | None, Option(metavar="D-HH:MM:SS", help="Time limit.", show_default="the partition's")
    ] = None,
    partition: Annotated[str | None, Option(help="Slurm partition.")] = None,
    account: Annotated[str | None, Option(help="Slurm account.")] = None,
    run_dir: NewRun = None,
    setup: Annotated[
        list[str] | None,
        Option(
            metavar="LINE",
            help='Shell command that the job runs first, such as "module load cuda"; repeatable.',
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        Option(metavar="OPTION", help="Option of sbatch, such as --sbatch=--qos=high; repeatable."),
    ] = None,
    stop_before: Annotated[
        int,
        Option(
            metavar="SECONDS",
            min=1,
            max=65_535,
            help="Seconds before the time limit at which the run saves its state and is requeued.",
        ),
    ] = 120,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the job script without writing or submitting it.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train on a Slurm cluster.

    The batch job starts Ray on its nodes, and resumes the run when Slurm requeues it.
    """
    from dapo.cli.submit import print_submission, submit_run
    from dapo.distributed.slurm.job import Allocation

    options = tuple(sbatch or ())
    allocation = Allocation(
        nodes, gpus_per_node, cpus_per_node, time, partition, account, stop_before, options
    )
    how: dict[str, Any] = {
        "run_dir": run_dir,
        "setup": tuple(setup or ()),
        "dry_run": dry_run,
        "trust": trust,
    }
    report = submit_run(config_or_run, overrides or [], allocation, **how)
    (print_json if as_json else print_submission)(report)


@commands.command(
    rich_help_panel=TRAIN, epilog="Example: dapo check my.yaml rollout.group_size=32 --probe"
)
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    probe: Annotated[
        bool, Option("--probe", help="Also measure two steps of the real model; write nothing.")
    ] = False,
    problems: Annotated[
        int | None, Option(min=1, help="With --probe: number of problems to judge.")
    ] = None,
    samples: Annotated[
        int | None,
        Option(
            min=2, help="With --probe: responses per problem.", show_default="rollout.group_size"
        ),
    ] = None,
    against: Annotated[
        Path | None,
        Option(metavar="RUN_DIR", help="With --probe: compare with a run's first steps."),
    ] = None,
    verbose: Annotated[
        bool,
        Option(
            "--verbose",
            help="Print the step, memory and disk by part, and differences from the paper.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration before training: memory, disk, mistakes.

    The first line is the verdict. The exit code is 2 if the configuration cannot run.
    """
    if not probe and (problems or samples or against):
        raise ConfigError("--problems, --samples and --against need --probe")
    from dapo.config import find_config
    from dapo.config.load import build_config, read_options
    from dapo.config.options import STAGES
    from dapo.config.stages import build_stages

    file = find_config(config)
    raw = read_options(file)
    if STAGES in raw:
        stages = build_stages(raw, overrides or [], where=str(file))
        if as_json or probe:
            raise ConfigError(
                f"{file} has stages, which are checked without --json and --probe; copy one into a"
                " file of its own"
            )
        from dapo.cli.check.stages import check_each

        fits = check_each(stages, path=config, verbose=verbose)
    else:
        loaded = build_config(raw, overrides or [], where=str(file))
        from dapo.cli.check.command import check_config

        if probe:
            keep_freed_memory()  # as in the run
        shown: dict[str, Any] = {"verbose": verbose, "as_json": as_json}
        measured: dict[str, Any] = {"problems": problems, "samples": samples, "against": against}
        fits = check_config(loaded, path=config, probe=probe, **measured, **shown)
    if not fits:
        raise typer.Exit(ConfigError.exit_code)


@commands.command(
    rich_help_panel=TRAIN, epilog="Example: dapo clean runs/a runs/b --keep weights --yes"
)
def clean(
    runs: Annotated[list[Path], Argument(metavar="RUN_DIR", help="Runs that have ended.")],
    keep: Annotated[
        str,
        Option(
            metavar="WHAT",
            help=(
                "What to keep: newest (the newest checkpoint, and the weights of the others),"
                " weights or nothing."
            ),
        ),
    ] = "newest",
    yes: Annotated[
        bool, Option("--yes", help="Delete; without this option, only list what would be deleted.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only list what would be deleted, as without --yes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Free disk space: delete optimizer states, which are needed only to resume a run.

    Without --yes, only lists what would be deleted. A checkpoint without its optimizer state can be
    evaluated and exported, but not resumed or forked.
    """
    if yes and dry_run:
        raise ConfigError("--yes deletes and --dry-run does not; keep one of them")
    from dapo.cli.clean import clean_runs

    clean_runs(runs, keep=keep, apply=yes, as_json=as_json)


@commands.command(rich_help_panel=INSPECT, epilog="Example: dapo status runs/a --follow")
def status(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN_DIR", help="Run directories, or a folder of them.", show_default="./runs"
        ),
    ] = None,
    follow: Annotated[
        bool,
        Option("--follow", help="Show one run's steps until it ends; Ctrl-C ends only this."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of runs: step, time left, accuracy, disk use.

    The exit code is 1 if a run failed, and 2 if one cannot be read.
    """
    from dapo.runs.run_reader import find_runs
    from dapo.runs.status import run_status

    places = runs or [Path("runs")]
    if follow:
        _follow(find_runs(places), as_json)
        return
    statuses = []
    damaged = dict[str, DapoError]()
    for path in (paths := places if len(places) > 1 else find_runs(places) or places):
        try:
            statuses.append(run_status(path))
        except DapoError as error:
            if len(paths) == 1:
                raise
            damaged[str(path)] = error
    if as_json:
        problems = [
            {"run": path, "state": "damaged", "error": str(error)}
            for path, error in damaged.items()
        ]
        print_json({"runs": [*(status_of_run.as_json() for status_of_run in statuses), *problems]})
    else:
        from dapo.cli.status import print_status

        print_status(statuses, damaged)
    if any(status_of_run.state == "failed" for status_of_run in statuses) or damaged:
        raise typer.Exit(DataError.exit_code if damaged else 1)


def _follow(paths: list[Path], as_json: bool) -> None:
    """Follow the run of `--follow` until it ends: the named one, or the only one that trains."""
    from dapo.cli.status import follow_run
    from dapo.runs.directory import RunDirectory

    if len(paths) != 1:
        live = [path for path in paths if RunDirectory.open(path).holder() is not None]
        if len(live) != 1:
            raise ConfigError(
                f"--follow shows one run, and {len(live)} of {len(paths)} are training: name it,"
                " for example: dapo status runs/a --follow"
            )
        paths = live
    final_status = follow_run(paths[0], quiet=as_json)
    if as_json:
        print_json({"runs": [final_status.as_json()]})
    if final_status.state == "failed":
        raise typer.Exit(1)


@commands.command(
    "eval",
    rich_help_panel=COMPARE,
    epilog="Example: dapo eval --compare smollm2-135m-instruct runs/a --by-problem",
)
def evaluate(
    model_or_run: Annotated[
        str | None,
        Argument(
            metavar="MODEL_OR_RUN",
            help=(
                "A model alias, Hugging Face id, model directory or run directory; not with"
                " --compare."
            ),
        ),
    ] = None,
    overrides: Changes = None,
    data: Annotated[
        str | None,
        Option(
            help="Problems such as problems.jsonl, builtin:sums or aime24.",
            show_default="data.eval of the run",
        ),
    ] = None,
    samples_per_problem: Annotated[
        int | None, Option(min=1, help="Responses per problem, the k of avg@k.")
    ] = None,
    until_width: Annotated[
        float | None,
        Option(
            metavar="POINTS",
            help=(
                "End when the 95 % interval is at most this wide, in points; problems are then"
                " drawn at random."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            help=(
                "JSON file for the result with every response; an interrupted evaluation resumes"
                " from OUTPUT.partial."
            )
        ),
    ] = None,
    server: Annotated[
        str | None,
        Option(
            metavar="URL",
            help=(
                "OpenAI-compatible server, such as http://HOST:PORT/v1; MODEL_OR_RUN is then the"
                " name of its model."
            ),
        ),
    ] = None,
    concurrency: Annotated[
        int, Option(min=1, help="With --server: number of concurrent requests.")
    ] = 16,
    compare: Annotated[
        tuple[str, str] | None,
        Option(
            metavar="A B",
            help=(
                "Compare two models, runs or result files on the same problems with the same seeds."
            ),
        ),
    ] = None,
    by_problem: Annotated[
        bool, Option("--by-problem", help="Also print one line per problem.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: avg@k, pass@j and cons@k with 95 % intervals."""
    from dapo.start.evaluate import EvalRequest, compare_models, evaluate_model

    if compare is not None and model_or_run is not None and "=" in model_or_run:
        # with --compare the first argument is an option
        overrides = set_once([model_or_run, *(overrides or [])])
        model_or_run = None
    request = EvalRequest(
        data,
        samples_per_problem,
        server,
        output,
        tuple(overrides or ()),
        concurrency=concurrency,
        until_width=until_width,
    )
    if until_width is not None and not 0 < until_width < 100:
        raise ConfigError(f"--until-width: expected points between 0 and 100, got {until_width:g}")
    if until_width is not None and compare is not None:
        raise ConfigError(
            "--until-width is for one model: evaluate each with --output, and compare the files"
        )
    if (model_or_run is None) == (compare is None):
        raise ConfigError("dapo eval takes either one model or run, or two with --compare A B")
    with stdout_to_stderr(as_json):
        trust_runs(trust, *(compare or [model_or_run or ""]))
        evaluation = (
            compare_models(*compare, request)
            if compare
            else evaluate_model(model_or_run or "", request)
        )
    from dapo.cli.eval_report import evaluation_json, print_evaluation

    if as_json:
        print_json(evaluation_json(evaluation, by_problem=by_problem))
    else:
        print_evaluation(evaluation, output, by_problem=by_problem)
    results = (
        [evaluation["first"], evaluation["second"]] if "comparison" in evaluation else [evaluation]
    )
    # nothing was judged: the evaluation has failed
    if any(result["accuracy"] is None for result in results):
        raise typer.Exit(1)


@commands.command(rich_help_panel=TRAIN, epilog="Example: dapo export runs/a my-adapter --adapter")
def export(
    run_dir: Run,
    out_dir: Annotated[
        Path, Argument(metavar="OUT_DIR", help="Model directory to write; must not exist yet.")
    ],
    step: Annotated[
        int | None, Option(help="Step of the checkpoint to export.", show_default="the newest")
    ] = None,
    adapter: Annotated[
        bool, Option("--adapter", help="Write only the LoRA adapter, in peft's format.")
    ] = False,
    push: Annotated[
        str | None,
        Option(
            metavar="OWNER/NAME",
            help="Upload it to this repository on the Hugging Face hub, which is made if missing.",
        ),
    ] = None,
    private: Annotated[
        bool, Option("--private", help="Make the repository of --push private.")
    ] = False,
    dtype: Annotated[
        DtypeName, Option(metavar="TYPE", help="Type of the weights; auto: the run's model.dtype.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write the model of a run as a Hugging Face model directory, with a model card."""
    from dapo.cli.train import export_run

    with stdout_to_stderr(as_json):
        summary = export_run(
            run_dir, out_dir, step=step, adapter=adapter, push=push, private=private, dtype=dtype
        )
    if as_json:
        print_json(summary)
