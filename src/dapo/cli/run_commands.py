"""The commands that start, continue and evaluate runs: train, resume, fork, submit, check, status, eval, export."""

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dapo.cli.arguments import AsJson, ConfigPath, NewRun, Overrides, Run, Trust
from dapo.core.errors import ConfigError, DapoError, DataError
from dapo.core.memory import keep_freed_memory
from dapo.core.terminal import print_json, print_text, stdout_to_stderr

# as in main.py, each command imports what it needs, so that --help and a config error answer at once

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def train(config: ConfigPath, overrides: Overrides = None, run_dir: NewRun = None, as_json: AsJson = False) -> None:
    """Train a model, from a configuration or from options alone: dapo train model=NAME data.train=SOURCE ..."""
    from dapo.config import build_config, find_config, load_config

    if "=" in str(config) and not config.exists():
        loaded, config = build_config({}, [str(config), *(overrides or [])], where="dapo train"), Path("run")
    else:
        config = find_config(config)
        loaded = load_config(config, overrides or [])
    from dapo.runs.directory import default_run_path
    from dapo.training.preflight import open_judge

    path = run_dir or default_run_path(config, datetime.now())
    with stdout_to_stderr(as_json), open_judge(loaded, run_dir=path) as judge:
        if sys.stdout.isatty():  # imports and loading take a while and print nothing
            print_text(f"the verifier is ready; loading {loaded.model.name} and {loaded.data.train_source.label} ...")
        from dapo.cli.train import start_run

        keep_freed_memory()
        start_run(loaded, run_dir=path, config_name=config.stem, judge=judge)
    if as_json:
        _print_run(path)


@commands.command()
def resume(run_dir: Run, overrides: Overrides = None, trust: Trust = False, as_json: AsJson = False) -> None:
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


@commands.command()
def fork(
    run: Annotated[Path, Argument(metavar="RUN_DIR", help="the run to fork")],
    overrides: Overrides = None,
    step: Annotated[int, Option(min=1, help="the step of the checkpoint to start from")] = ...,  # type: ignore[assignment]
    times: Annotated[int | None, Option(min=1, help="number of branches, each with its own seed")] = None,
    run_dir: Annotated[Path | None, Option(help="run directory to write; --times appends -1, -2 ...")] = None,
    no_train: Annotated[bool, Option("--no-train", help="make the run; dapo resume trains it")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Start a new run from a checkpoint of another: equal up to that step, with the same random numbers after it."""
    from dapo.cli.train import fork_run

    if not no_train:
        keep_freed_memory()
    with stdout_to_stderr(as_json):
        trust_runs(trust, run)
    fork_run(
        run, step=step, overrides=overrides or [], times=times, run_dir=run_dir, trains=not no_train, as_json=as_json
    )


@commands.command()
def submit(
    config_or_run: Annotated[Path, Argument(metavar="CONFIG.yaml|RUN_DIR", help="as for dapo train; or a run")],
    overrides: Overrides = None,
    nodes: Annotated[int, Option(min=1, help="number of nodes")] = 1,
    gpus_per_node: Annotated[int, Option(min=0, help="GPUs per node")] = 0,
    cpus_per_node: Annotated[int | None, Option(min=1, help="CPUs per node; the whole node if not given")] = None,
    time: Annotated[str | None, Option(metavar="D-HH:MM:SS", help="time limit; the partition's if not given")] = None,
    partition: Annotated[str | None, Option(help="Slurm partition")] = None,
    account: Annotated[str | None, Option(help="Slurm account")] = None,
    run_dir: NewRun = None,
    setup: Annotated[
        list[str] | None, Option(metavar="LINE", help='shell command to run first: "module load cuda"; repeatable')
    ] = None,
    sbatch: Annotated[
        list[str] | None, Option(metavar="OPTION", help="option of sbatch, for example --sbatch=--qos=high; repeatable")
    ] = None,
    stop_before: Annotated[
        int,
        Option(
            metavar="SECONDS",
            min=1,
            max=65_535,
            help="seconds before the time limit at which the run saves and requeues",
        ),
    ] = 120,
    dry_run: Annotated[bool, Option("--dry-run", help="print the script, write and submit nothing")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train on a Slurm cluster: a batch job that starts Ray on its nodes, and continues the run when requeued."""
    from dapo.cli.submit import print_submission, submit_run
    from dapo.distributed.slurm.job import Allocation

    allocation = Allocation(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        time=time,
        partition=partition,
        account=account,
        stop_before_s=stop_before,
        options=tuple(sbatch or ()),
    )
    lines = tuple(setup or ())
    report = submit_run(
        config_or_run, overrides or [], allocation, run_dir=run_dir, setup=lines, dry_run=dry_run, trust=trust
    )
    (print_json if as_json else print_submission)(report)


@commands.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    assume: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="replace an assumption, for example memory_gib=96; may be repeated"),
    ] = None,
    probe: Annotated[bool, Option("--probe", help="also measure two steps of the real model; writes nothing")] = False,
    problems: Annotated[int | None, Option(min=1, help="with --probe: problems to judge")] = None,
    samples: Annotated[
        int | None, Option(min=2, help="with --probe: responses per problem (rollout.group_size)")
    ] = None,
    against: Annotated[
        Path | None, Option(metavar="RUN_DIR", help="with --probe: compare with a run's first steps")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a configuration: sizes, options without effect, differences from the paper, memory; measure a step."""
    if not probe and (problems or samples or against):
        raise ConfigError("--problems, --samples and --against need --probe")
    from dapo.config import load_config

    loaded = load_config(config, overrides or [])
    from dapo.cli.check.command import check_config

    if probe:
        keep_freed_memory()  # as in the run
    can_run = check_config(
        loaded,
        assume or [],
        path=config,
        probe=probe,
        problems=problems,
        samples=samples,
        against=against,
        as_json=as_json,
    )
    if not can_run:
        raise typer.Exit(ConfigError.exit_code)


@commands.command()
def status(
    runs: Annotated[list[Path], Argument(metavar="RUN_DIR...", help="run directories, live or ended")],
    as_json: AsJson = False,
) -> None:
    """Show the state of runs: step, time left, last metrics, evaluation and checkpoint; exit 1 if one failed."""
    from dapo.runs.status import run_status

    found, damaged = [], dict[str, DapoError]()
    for path in runs:
        try:
            found.append(run_status(path))
        except DapoError as error:
            if len(runs) == 1:
                raise
            damaged[str(path)] = error
    if as_json:
        shown = [{"run": path, "state": "damaged", "error": str(error)} for path, error in damaged.items()]
        print_json({"runs": [*(each.as_json() for each in found), *shown]})
    else:
        from dapo.cli.status import print_status

        print_status(found, damaged)
    if any(each.state == "failed" for each in found) or damaged:
        raise typer.Exit(DataError.exit_code if damaged else 1)


@commands.command("eval")
def evaluate(
    model_or_run: Annotated[
        str | None,
        Argument(metavar="MODEL_OR_RUN", help="alias, Hugging Face id, model or run directory; not with --compare"),
    ] = None,
    overrides: Overrides = None,
    data: Annotated[str | None, Option(help="problems.jsonl, builtin:sums, aime24; default: a run's data.eval")] = None,
    samples_per_problem: Annotated[int | None, Option(min=1, help="responses per problem: the k of avg@k")] = None,
    output: Annotated[
        Path | None,
        Option(help="write the result as JSON with every response; a killed evaluation resumes from OUTPUT.partial"),
    ] = None,
    server: Annotated[
        str | None,
        Option(metavar="URL", help="an OpenAI-compatible server, http://HOST:PORT/v1; MODEL is its name there"),
    ] = None,
    concurrency: Annotated[int, Option(min=1, help="with --server: requests in flight")] = 16,
    compare: Annotated[
        tuple[str, str] | None,
        Option(
            metavar="A B", help="paired difference of two models, runs or result files, on the same problems and seeds"
        ),
    ] = None,
    by_problem: Annotated[bool, Option("--by-problem", help="also print one line per problem")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: avg@k, pass@j and cons@k with 95 % intervals."""
    from dapo.api.lifecycle.evaluate_models import EvalRequest, compare_models, evaluate_model
    from dapo.cli.eval_report import evaluation_json, print_evaluation

    if compare is not None and model_or_run is not None and "=" in model_or_run:
        # with --compare the first argument is an option
        overrides, model_or_run = [model_or_run, *(overrides or [])], None
    request = EvalRequest(data, samples_per_problem, server, output, tuple(overrides or ()), concurrency=concurrency)
    if (model_or_run is None) == (compare is None):
        raise ConfigError("dapo eval takes either one model or run, or two with --compare A B")
    with stdout_to_stderr(as_json):
        trust_runs(trust, *(compare or [model_or_run or ""]))
        found = compare_models(*compare, request) if compare else evaluate_model(model_or_run or "", request)
    if as_json:
        print_json(evaluation_json(found, by_problem=by_problem))
    else:
        print_evaluation(found, output, by_problem=by_problem)


@commands.command()
def export(
    run_dir: Run,
    out_dir: Annotated[Path, Argument(metavar="OUT_DIR", help="the model directory to write; must not exist yet")],
    step: Annotated[int | None, Option(help="checkpoint to export; the newest if not given")] = None,
    adapter: Annotated[bool, Option("--adapter", help="write only the adapter (model.lora), in peft's format")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a Hugging Face model directory."""
    from dapo.cli.train import export_run

    with stdout_to_stderr(as_json):
        written = export_run(run_dir, out_dir, step=step, adapter=adapter)
    if as_json:
        print_json(written)
    else:
        kind = "adapter of " if adapter else ""
        print_text(f"{out_dir}: {kind}{written['base']} after {written['step']} steps")
