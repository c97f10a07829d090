"""What each command does, from reading its inputs to telling the result."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo.assemble import (
    Inputs,
    build_engine,
    build_parts,
    evaluation_plan,
    gpu_names,
    open_judge,
    read_inputs,
    read_model,
    resolve_auto,
)
from dapo.checkpoints import describe
from dapo.config import Config, DataSpec, build_config, dump_config, load_config, parse_overrides
from dapo.data.spec import spec_kind, spec_name
from dapo.errors import CheckpointError, ConfigError, DapoError
from dapo.evaluation import evaluate
from dapo.interrupt import Interrupted, StoppableEngine, signals_as_requests
from dapo.parts import Parts, Progress
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.model import export_model
from dapo.rewards.pool import VerifierPool
from dapo.run import RunDirectory, atomic_write_json, default_run_path, make_manifest, refuse_existing_run, step_of
from dapo.saving import is_logged, restore
from dapo.telemetry.console import ProgressDisplay, final_report
from dapo.telemetry.plots import plot_curves
from dapo.train import read_evaluations, summarise, train

DEFAULT_EVAL_TOKENS = 1024
"""Response limit of `dapo eval` for a model that no run made; eval.max_response_tokens overrides it."""


def start_run(config: Config, *, run_dir: Path | None, config_name: str) -> None:
    """`dapo train`: read everything, then make the run directory, then train."""
    path = run_dir or default_run_path(config_name, datetime.now())
    refuse_existing_run(path)
    config = resolve_auto(config)
    inputs = read_inputs(config)
    with open_judge(config) as judge:
        started = datetime.now(UTC)
        manifest = make_manifest(sys.argv, seed=config.train.seed, started=started, gpus=gpu_names())
        run = RunDirectory.create(path, dump_config(config), manifest)
        with run.lock():
            run_training(config, inputs, judge, run)


def resume_run(path: Path, overrides: Sequence[str]) -> None:
    """`dapo resume`: continue from the newest whole checkpoint, with the options of the run."""
    run = RunDirectory.open(path)
    config = resolve_auto(load_config(run.config, overrides))
    with run.lock():
        inputs = read_inputs(config)
        with open_judge(config) as judge:
            run_training(config, inputs, judge, run)


def run_training(config: Config, inputs: Inputs, judge: VerifierPool, run: RunDirectory) -> None:
    """Train from the newest checkpoint (or the beginning) to the end, then show what came of it."""
    checkpoint = run.latest_checkpoint(warn=warn)
    first_step = step_of(checkpoint) + 1 if checkpoint else 1
    if checkpoint:
        run.cut_after(step_of(checkpoint), is_logged=is_logged(checkpoint))
    else:
        run.cut_after(-1)
    display = ProgressDisplay(config.train.num_steps, first_step=first_step)
    with (
        signals_as_requests() as request,
        build_parts(config, inputs, judge, run, display, first_step=first_step) as parts,
    ):
        parts.engine = StoppableEngine(parts.engine, request)
        for note in inputs.notes:
            parts.tracker.message(note)
        parts.tracker.message(f"writing to {run.path}")
        progress = restore(parts, checkpoint) if checkpoint else Progress()
        reason = "failed"
        try:
            train(config, parts, progress)
            reason = "finished"
        except Interrupted as error:
            reason = f"interrupted: {error}"
            raise
        except DapoError as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            close_run(parts, progress, reason)
    report(config, run)


def close_run(parts: Parts, progress: Progress, reason: str) -> None:
    """Close the trackers and write summary.json; a disk that takes nothing more must not hide why the run ended."""
    try:
        parts.tracker.close()
        parts.run.write_summary(summarise(parts, progress, exit_reason=reason))
    except OSError as error:
        warn(f"the summary could not be written: {describe(error)}")


def warn(text: str) -> None:
    """To the standard error."""
    print(f"warning: {text}", file=sys.stderr)


def report(config: Config, run: RunDirectory) -> None:
    """The end of a run, for a person: before and after, responses, curves, where everything lies."""
    plot_curves(
        run.metrics, run.curves, title=f"{config.model.name}, {config.preset} on {spec_name(config.data.train)}"
    )
    evaluations = read_evaluations(run)
    newest = run.latest_checkpoint(warn=warn)
    final_report(
        Console(),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        samples=compared_responses(evaluations, config.eval.show_samples),
        files={
            "curves": run.curves,
            "metrics, a line a step": run.metrics,
            "every judged response": run.path / "rollouts",
            "evaluations": run.path / "eval",
            "checkpoint": newest,
            "evaluate it": f"dapo eval {run.path} --data builtin:gcd",
            "export it": f"dapo export {run.path} my-model",
        },
    )


def compared_responses(evaluations: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Responses to the same problems before and after training, one of each source first."""
    if len(evaluations) < 2:
        return []
    before, after = evaluations[0]["table"], evaluations[-1]["table"]
    by_source: dict[str, list[int]] = {}
    for i, row in enumerate(before):
        by_source.setdefault(row["source"], []).append(i)
    picked = [row for rank in zip_longest(*by_source.values()) for row in rank if row is not None][:count]
    return [
        {
            "question": before[i]["question"],
            "answer": before[i]["answer"],
            "before": before[i]["responses"][0]["text"],
            "before_correct": before[i]["responses"][0]["correct"],
            "after": after[i]["responses"][0]["text"],
            "after_correct": after[i]["responses"][0]["correct"],
        }
        for i in picked
    ]


def evaluate_model(
    model_or_run: str, *, data: str, samples_per_problem: int | None, output: Path | None, overrides: Sequence[str]
) -> None:
    """`dapo eval`: print, and write if asked, avg@k and pass@k of a model or of a run's newest checkpoint."""
    config, checkpoint = evaluation_config(model_or_run, parse_data_argument(data), overrides)
    if samples_per_problem is not None:
        config = config.model_copy(
            update={"eval": config.eval.model_copy(update={"samples_per_problem": samples_per_problem})}
        )
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    inputs = read_inputs(config, training=False)
    plan = evaluation_plan(config, inputs.loaded)
    with ExitStack() as stack:
        judge = stack.enter_context(open_judge(config))
        engine = build_engine(config, inputs.loaded)
        stack.callback(engine.close)
        if checkpoint is not None:
            engine.load_weights(SavedWeights(checkpoint), version=step_of(checkpoint))
        display = ProgressDisplay(1)
        stack.callback(display.close)
        tell = partial(display.phase, "evaluate")
        result = evaluate(engine, judge, inputs.encoder, inputs.held_out, plan, on_progress=tell)
    summary = {"model": model_or_run, "data": data, **result.summary()}
    if output is not None:
        atomic_write_json(output, {**summary, "table": result.table()})
    print_evaluation(summary, output)


def evaluation_config(model_or_run: str, data: DataSpec, overrides: Sequence[str]) -> tuple[Config, Path | None]:
    """A run's own options and newest checkpoint, or the paper's evaluation of a model that no run made."""
    if (Path(model_or_run) / "manifest.json").is_file():
        run = RunDirectory.open(model_or_run)
        checkpoint = run.latest_checkpoint(warn=warn)
        if checkpoint is None:
            raise CheckpointError(f"{run.path} has no checkpoint yet, so there is nothing to evaluate")
        trained = load_config(run.config)
        raw = trained.model_dump(mode="json")
        if spec_kind(data) != spec_kind(trained.data.train):
            raw["reward"] = {}  # another kind of problem wants another verifier
    else:
        checkpoint = None
        raw = {
            "model": model_or_run,
            "data": {},
            "rollout": {"max_response_tokens": DEFAULT_EVAL_TOKENS},
            "overlong": {"mode": "off"},
        }
    raw["data"] |= {"train": data, "eval": data}
    return resolve_auto(build_config(raw, overrides, where="dapo eval")), checkpoint


def parse_data_argument(text: str) -> DataSpec:
    """`--data` takes a spec, or a mapping as YAML: `{builtin: {sums: {}}, size: 50}`."""
    if not text.lstrip().startswith("{"):
        return text
    parsed = parse_overrides([f"data={text}"])["data"]
    if not isinstance(parsed, dict):
        raise ConfigError(f"--data {text}: expected a data source or a mapping")
    return parsed


def print_evaluation(summary: Mapping[str, Any], output: Path | None) -> None:
    """The result as a small table."""
    table = Table(title=f"{summary['model']} on {summary['name']}", title_style="bold", title_justify="left")
    for column in ("", "result"):
        table.add_column(column, justify="right" if column else "left")
    k = summary["samples_per_problem"]
    table.add_row(f"avg@{k}", f"{summary['accuracy']:.1%}" if summary["binary"] else f"{summary['accuracy']:.4f}")
    table.add_row("95 % interval", f"{summary['low']:.3f} to {summary['high']:.3f}")
    for name in (name for name in summary if name.startswith("pass@")):
        table.add_row(name, f"{summary[name]:.1%}")
    for source, row in summary["by_source"].items() if len(summary["by_source"]) > 1 else ():
        table.add_row(f"  {source} ({row['problems']} problems)", f"{row['accuracy']:.3f}")
    table.add_row("problems", f"{summary['problems']:,}")
    table.add_row("mean response, tokens", f"{summary['response_tokens_mean']:.1f}")
    table.add_row("truncated", f"{summary['truncated_fraction']:.1%}")
    console = Console()
    console.print(table)
    if summary["verifier_errors"]:
        console.print(f"{summary['verifier_errors']} responses could not be judged: {summary['most_frequent_error']}")
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def export_run(path: Path, out_dir: Path, *, step: int | None) -> None:
    """`dapo export`: a checkpoint's weights as a Hugging Face model directory."""
    run = RunDirectory.open(path)
    config = resolve_auto(load_config(run.config))
    checkpoint = run.checkpoint(step) if step is not None else run.latest_checkpoint(warn=warn)
    if checkpoint is None:
        raise CheckpointError(f"{run.path} has no checkpoint yet, so there is nothing to export")
    loaded = read_model(config)
    export_model(SavedWeights(checkpoint).named_tensors(), loaded, out_dir)
    print(f"{out_dir}: {config.model.name} after {step_of(checkpoint)} steps")
