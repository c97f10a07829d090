"""The `dapo` command."""

import errno
import sys
import traceback
import warnings
from collections.abc import Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from dapo import __version__
from dapo.cli.data import AsJson, data_app
from dapo.core.errors import EXIT_CODES, ConfigError, DapoError
from dapo.core.memory_management import keep_freed_memory
from dapo.core.secrets import mask_text
from dapo.core.terminal import print_json, print_text, printable, stdout_to_stderr

# torch and transformers are imported inside the commands, so that --help and a config error answer at once

app = typer.Typer(
    name="dapo",
    help="Reinforcement learning for language models with DAPO (arXiv 2503.14476).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(data_app, name="data", help="Import, inspect and clean problems.")

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="file with options, or a shipped one: quickstart (`dapo configs`)")
]
CommandLineError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What typer raises for an option that does not exist and the like; it has no public name there."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="options over those of the file, for example loss.clip_high=0.3; dapo options lists all of them",
    ),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, or the process's own; errors meant for users come without a traceback."""
    warnings.formatwarning = _format_warning
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for argument in given:
            if not argument.isascii() and argument.encode(errors="ignore").decode() != argument:
                raise ConfigError(f"the argument {argument!a} is not UTF-8")
        code = app(given, standalone_mode=False)
    except OSError as error:
        sys.excepthook = _print_traceback  # instead of typer's
        # the name is the user's: no name that is made here is that long
        if error.errno != errno.ENAMETOOLONG:
            raise
        code = ConfigError.exit_code
        text = f"{str(error.filename)[:60]}...: {error.strerror}"
        _print_error(f"error: {text}\n", text, "ConfigError", code, given)
    except DapoError as error:
        text, code = mask_text(str(error)), error.exit_code
        _print_error(f"error: {text}\n" if code < 128 else f"{text}\n", text, type(error).__name__, code, given)
    except CommandLineError as error:  # it shows what was typed
        typed = StringIO()
        error.show(typed)
        code = error.exit_code
        _print_error(mask_text(typed.getvalue()), mask_text(error.format_message()), "UsageError", code, given)
    except Exception:
        sys.excepthook = _print_traceback  # instead of typer's
        raise
    sys.exit(code or 0)


def _print_error(shown: str, message: str, kind: str, code: int, given: Sequence[str]) -> None:
    """Show an error to a person and, if JSON was asked for, to a program as well."""
    print_text(shown, file=sys.stderr, end="")
    if "--json" in given:
        print_json({"error": message, "kind": kind, "exit_code": code})


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return printable(f"{filename}:{lineno}: {category.__name__}: {message}\n")


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_text(mask_text("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="run directory to write; must not hold a run yet")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model; with options alone where all that must be set is: dapo train model=NAME data.train=SOURCE ..."""
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
        if sys.stdout.isatty():  # the imports and the model take a while, in which nothing else is shown
            print_text(f"the verifier is ready; loading {loaded.model.name} and {loaded.data.train_source.label} ...")
        from dapo.cli.train import start_run

        keep_freed_memory()
        start_run(loaded, run_dir=path, config_name=config.stem, judge=judge)
    if as_json:
        _print_run(path)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its last checkpoint."""
    from dapo.cli.train import resume_run

    keep_freed_memory()
    with stdout_to_stderr(as_json):
        resume_run(run_dir, overrides or [])
    if as_json:
        _print_run(run_dir)


def _print_run(path: Path) -> None:
    """The end of a run, for a program: what `dapo status` says of it."""
    from dapo.runs.status import run_status

    print_json(run_status(path).as_json())


@app.command()
def status(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="run directories, live or ended")],
    as_json: AsJson = False,
) -> None:
    """Show how runs stand: state, step, time left, last metrics, evaluation and checkpoint; exit 1 if one failed."""
    from dapo.runs.status import run_status

    found = [run_status(path) for path in runs]
    if as_json:
        print_json({"runs": [each.as_json() for each in found]})
    else:
        from dapo.cli.status import print_status

        print_status(found)
    if any(each.state == "failed" for each in found):
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    model_or_run: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="alias, Hugging Face id, model or run directory; not with --compare"
        ),
    ] = None,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(help="data source: problems.jsonl, builtin:sums, aime24; default: a run's own data.eval"),
    ] = None,
    samples_per_problem: Annotated[
        int | None, typer.Option(min=1, help="responses per problem: the k of avg@k")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="write the result with every response as JSON; a killed evaluation continues from OUTPUT.partial"
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="sample from an OpenAI-compatible server, http://HOST:PORT/v1; MODEL is its name"
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="with --server: requests in flight")] = 16,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="two models, runs or result files: their paired difference on the same problems and random seeds",
        ),
    ] = None,
    by_problem: Annotated[bool, typer.Option("--by-problem", help="also print one line per problem")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: avg@k, pass@j and cons@k with 95 % intervals."""
    from dapo.api.lifecycle.evaluate_models import EvalRequest, compare_models, evaluate_model
    from dapo.cli.eval_report import evaluation_json, print_comparison, print_evaluation

    if compare is not None and model_or_run is not None and "=" in model_or_run:
        # with --compare no model stands before the options
        overrides, model_or_run = [model_or_run, *(overrides or [])], None
    request = EvalRequest(data, samples_per_problem, server, output, tuple(overrides or ()), concurrency=concurrency)
    if (model_or_run is None) == (compare is None):
        raise ConfigError("dapo eval takes either one model or run, or two with --compare A B")
    with stdout_to_stderr(as_json):
        found = compare_models(*compare, request) if compare else evaluate_model(model_or_run or "", request)
    if as_json:
        print_json(evaluation_json(found, by_problem=by_problem))
    else:
        (print_comparison if compare else print_evaluation)(found, output, by_problem=by_problem)


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="change an assumption of the estimates, for example memory_gib=96; may be repeated",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="also sample, judge and update with the real model; writes nothing")
    ] = False,
    problems: Annotated[int | None, typer.Option(min=1, help="with --probe: problems to judge")] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, help="with --probe: responses per problem; default: rollout.group_size")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="with --probe: compare it with the first steps of a run")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe what would run: sizes, options without effect, differences from the paper, memory and time."""
    if not probe and (problems or samples or against):
        raise ConfigError("--problems, --samples and --against need --probe")
    from dapo.config import load_config

    loaded = load_config(config, overrides or [])
    from dapo.cli.check.command import ProbeRequest, check_config

    request = ProbeRequest(problems, samples, against) if probe else None
    if probe:
        keep_freed_memory()  # as in the run
    if not check_config(loaded, assume or [], path=config, probe=request, as_json=as_json):
        raise typer.Exit(ConfigError.exit_code)


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="run directories, or folders of them; default: ./runs"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="port on 127.0.0.1; default: 8020, or a free one; 0: a free one"),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="only print the address")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the address and the runs as one JSON object")] = False,
) -> None:
    """Show runs on a local page: curves, responses, problems, evaluations and comparisons."""
    from dapo.cli.view import view_runs

    view_runs(runs or [], port=port, open_browser=not no_browser and not as_json, as_json=as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")],
    output: Annotated[Path | None, typer.Option(metavar="FILE.html", help="default: the run's name, here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object: the file and what is in it")] = False,
) -> None:
    """Write a run's page as one HTML file that opens without a network: curves, sampled responses, evaluations."""
    from dapo.cli.view import report_run

    report_run(run, output, as_json=as_json)


@app.command()
def submit(
    config_or_run: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml|RUN_DIR", help="as for dapo train; or a run, to continue it")
    ],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="number of nodes")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs per node")] = 0,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="CPUs per node; the whole node if not given")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="D-HH:MM:SS", help="time limit; the partition's if not given")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="run directory to write; must not hold a run yet")] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help='shell command to run first: "module load cuda"; may be repeated'),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="another option of sbatch, --sbatch=--qos=high; may be repeated"),
    ] = None,
    stop_before: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            min=1,
            max=65_535,
            help="seconds before the time limit at which the run saves and is queued again",
        ),
    ] = 120,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script, write and submit nothing")] = False,
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
    report = submit_run(config_or_run, overrides or [], allocation, run_dir=run_dir, setup=lines, dry_run=dry_run)
    (print_json if as_json else print_submission)(report)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory")],
    out_dir: Annotated[
        Path, typer.Argument(metavar="OUT_DIR", help="the model directory to write; must not exist yet")
    ],
    step: Annotated[int | None, typer.Option(help="checkpoint to export; the newest if not given")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write only the adapter of a run with model.lora, in peft's format")
    ] = False,
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


@app.command("options")
def show_options(
    section: Annotated[
        str | None, typer.Argument(metavar="[SECTION]", help="a section such as loss, or an option; all if not given")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be set: name, default, the paper's value, unit, meaning."""
    from dapo.config.option_entries import entries_of

    found = entries_of(section)
    if as_json:
        print_json({"options": [entry.as_json() for entry in found]})
    else:
        from dapo.cli.options import print_options

        print_options(found)


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, for editors: `dapo schema > dapo.schema.json`."""
    from dapo.config.schema import config_schema

    print_json(config_schema())


@app.command("configs")
def show_configs(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="print this one, for a file of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the list as one JSON object")] = False,
) -> None:
    """List the configurations that come with dapo, or print one: `dapo configs tiny > my.yaml`."""
    from dapo.cli.configs import list_configs, print_config

    if name is None:
        list_configs(as_json=as_json)
    else:
        print_config(name)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_A RUN_B [RUN_C ...]", help="run directories")],
    by_step: Annotated[bool, typer.Option("--by-step", help="of two runs, also print the differences by step")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs beside each other: options, paired differences of accuracy and of training curves, tokens and seconds."""
    if len(runs) < 2:
        raise ConfigError("dapo compare takes two runs or more; the others are compared with the first")
    from dapo.cli.compare import print_comparisons

    print_comparisons(runs, by_step=by_step, as_json=as_json)


@app.command()
def fork(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run to fork")],
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="the checkpoint to begin with")] = ...,  # type: ignore[assignment]
    times: Annotated[
        int | None, typer.Option(min=1, help="make so many branches, each with a seed of its own after the step")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="run directory to write; with --times -1, -2 ... are added to its name")
    ] = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="only make the run; dapo resume trains it")] = False,
    as_json: AsJson = False,
) -> None:
    """Begin a new run with a checkpoint of another: equal up to that step, and with the same draws after it."""
    from dapo.cli.fork import fork_run

    if not no_train:
        keep_freed_memory()
    fork_run(
        run, step=step, overrides=overrides or [], times=times, run_dir=run_dir, trains=not no_train, as_json=as_json
    )


@app.command("ablate")
def ablate_command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="FILE.yaml", help="an experiment file; or a configuration, on which the ladder is run"),
    ] = None,
    overrides: Overrides = None,
    ladder: Annotated[
        str | None, typer.Option(help="with a configuration: table1 (the default) or leave-one-out")
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="LIST", help="0,1,2 or 100-104; default: the file's")] = None,
    folder: Annotated[Path | None, typer.Option(help="of the runs; default: runs/NAME")] = None,
    output: Annotated[
        Path | None, typer.Option(help="write results.json and pictures there; default: the folder")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="runs at a time, which share the threads")] = 1,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="make table and pictures of stored results, of several folders those of all their seeds; runs nothing",
        ),
    ] = None,
    show: Annotated[str | None, typer.Option(metavar="LADDER", help="print a shipped ladder, to copy it")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check and list the runs; start nothing")] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="the table of what is there; start nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Train variants of a configuration with several seeds, and compare them: the ladder of Table 1, or your own."""
    from dapo.cli.ablate import AblateRequest, ablate

    request = AblateRequest(
        config,
        tuple(overrides or ()),
        ladder,
        seeds,
        folder,
        output,
        tuple(report or ()),
        show,
        jobs,
        dry_run,
        no_run,
        as_json,
    )
    if not ablate(request):
        raise typer.Exit(1)


@app.command("explain")
def explain_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory")],
    step: Annotated[int, typer.Option(min=1, help="a finished step")],
    group: Annotated[
        int | None, typer.Option(help="the group's id; if not given, the one with the most clipped tokens")
    ] = None,
    no_replay: Annotated[
        bool, typer.Option("--no-replay", help="do not train the step again in memory, which ratios may need")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object with every number")] = False,
) -> None:
    """Walk one group of a step through the equations (11, 13, 9, 8) with its own numbers."""
    from dapo.cli.explain import explain

    explain(run_dir, step, group, replay=not no_replay, as_json=as_json)


@app.command()
def doctor(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, also of a run that trains")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 if there is an error or a warning")] = False,
) -> None:
    """Say what is wrong with a run: findings with evidence, problems, and the option to change."""
    from dapo.cli.doctor import examine, print_diagnosis

    diagnosis = examine(run_dir)
    if as_json:
        print_json({"run": str(run_dir), **diagnosis.to_json()})
    else:
        print_diagnosis(run_dir, diagnosis)
    if strict and any(case.holds for case in diagnosis.alarms):
        raise typer.Exit(1)


@app.command("whatif")
def whatif_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="options of reward, overlong, advantage, dynamic_sampling.enabled or .filter, preset; with --gradient "
            "also of loss",
        ),
    ] = None,
    steps: Annotated[str, typer.Option(metavar="A:B", help="steps from A to B, both included")] = ":",
    gradient: Annotated[
        bool, typer.Option("--gradient", help="compare the policy gradients at the checkpoints before the steps")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Judge and filter a run's stored responses anew with changed options; trains nothing."""
    from dapo.cli.whatif import whatif

    whatif(run_dir, overrides or [], steps=steps, gradient=gradient, as_json=as_json)


reward_app = typer.Typer(no_args_is_help=True, help="Try a reward before training on it.", rich_markup_mode=None)
app.add_typer(reward_app, name="reward")


@reward_app.command("test")
def reward_test(
    verifier: Annotated[str, typer.Argument(metavar="VERIFIER", help="a name such as math, or MODULE:FUNCTION")],
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="take the first problems of this source")] = None,
    answer: Annotated[str | None, typer.Option(help="the example problem's reference")] = None,
    right: Annotated[str | None, typer.Option(help="a correct response, if none of the usual forms is")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="print every response, not only the suspicious ones")] = False,
    as_json: AsJson = False,
) -> None:
    """Audit a reward on empty, endless, hedging and hostile responses; exit 1 if it accepts one."""
    from dapo.cli.reward import examine_reward, print_report

    with stdout_to_stderr(as_json):
        report = examine_reward(verifier, data=data, answer=answer, right=right, overrides=overrides or [])
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report, show_all=show_all)
    if report.suspicious:
        raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(f"dapo {__version__}")
        raise typer.Exit


@app.callback(epilog=f"Exit codes: {'; '.join(f'{code}: {meaning}' for code, meaning in EXIT_CODES.items())}.")
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Reinforcement learning for language models with DAPO (arXiv 2503.14476)."""


if __name__ == "__main__":
    main()
