"""What each command does, from reading its inputs to telling the result."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dapo.assemble import (
    Inputs,
    build_engine,
    build_parts,
    evaluation_plan,
    gpu_names,
    open_judge,
    read_inputs,
)
from dapo.config import Config, DataSpec, build_config, dump_config, load_config
from dapo.data.problems import spec_name
from dapo.errors import CheckpointError, ConfigError, DapoError
from dapo.evaluation import evaluate
from dapo.policy.model import export_model
from dapo.rewards.pool import VerifierPool
from dapo.run import RunDirectory, atomic_write_json, default_run_path, make_manifest, step_of
from dapo.telemetry.console import ProgressDisplay, final_report
from dapo.telemetry.plots import plot_curves
from dapo.train import Progress, read_evaluations, restore, summarise, train


def start_run(config: Config, *, run_dir: Path | None, config_name: str) -> None:
    """`dapo train`: read everything, then make the run directory, then train."""
    path = run_dir or default_run_path(config_name, datetime.now())
    refuse_existing_run(path)
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
    config = load_config(run.config, overrides)
    with run.lock():
        inputs = read_inputs(config)
        with open_judge(config) as judge:
            run_training(config, inputs, judge, run)


def run_training(config: Config, inputs: Inputs, judge: VerifierPool, run: RunDirectory) -> None:
    """Train from the newest checkpoint (or the beginning) to the end, then show what came of it."""
    checkpoint = run.latest_checkpoint(warn=lambda text: print(f"warning: {text}", file=sys.stderr))
    first_step = step_of(checkpoint) + 1 if checkpoint else 1
    run.cut_after(first_step - 1 if checkpoint else -1)
    display = ProgressDisplay(config.train.num_steps, first_step=first_step)
    with build_parts(config, inputs, judge, run, display, first_step=first_step) as parts:
        for note in inputs.notes:
            parts.tracker.message(note)
        parts.tracker.message(f"writing to {run.path}")
        progress = restore(parts, checkpoint) if checkpoint else Progress()
        reason = "failed"
        try:
            train(config, parts, progress)
            reason = "finished"
        except DapoError as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        finally:
            parts.tracker.close()
            run.write_summary(summarise(parts, progress, exit_reason=reason))
    report(config, run)


def refuse_existing_run(path: Path) -> None:
    """Say so before the model is loaded, not after."""
    if (path / "config.yaml").exists():
        raise CheckpointError(
            f"{path} already holds a run; continue it with `dapo resume {path}` or choose another --run-dir"
        )


def report(config: Config, run: RunDirectory) -> None:
    """The end of a run, for a person: before and after, responses, curves, where everything lies."""
    plot_curves(run.metrics, run.curves, title=f"{config.model.name}, DAPO on {spec_name(config.data.train)}")
    evaluations = read_evaluations(run)
    final_report(
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        samples=compared_responses(evaluations, config.eval.show_samples),
        run_path=run.path,
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
    inputs = read_inputs(config)
    plan = evaluation_plan(config, inputs.loaded)
    with ExitStack() as stack:
        judge = stack.enter_context(open_judge(config))
        engine = build_engine(config, inputs.loaded)
        stack.callback(engine.close)
        if checkpoint is not None:
            engine.load_weights(SavedWeights(checkpoint), version=step_of(checkpoint))
        display = EvaluationDisplay()
        stack.callback(display.close)
        result = evaluate(engine, judge, inputs.encoder, inputs.held_out, plan, on_progress=display.progress)
    summary = {"model": model_or_run, "data": data, **result.summary()}
    if output is not None:
        atomic_write_json(output, {**summary, "table": result.table()})
    evaluation_report(summary, output=output)
