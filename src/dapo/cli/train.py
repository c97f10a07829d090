"""What each command does, from reading its inputs to telling the result."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from dapo.assemble import (
    Inputs,
    build_run,
    gpu_names,
    open_judge,
    read_inputs,
    read_model,
    resolve_auto,
)
from dapo.config import Config, dump_config, load_config
from dapo.config.data_spec import spec_name
from dapo.core.errors import CheckpointError, DapoError, TrainerLost
from dapo.policy.lora import export_adapter, saved_weights
from dapo.policy.model import export_model
from dapo.rewards.workers.pool import VerifierPool
from dapo.telemetry.console import ProgressDisplay, final_report
from dapo.telemetry.curves import plot_curves
from dapo.training import one_step_off
from dapo.training.checkpoint_store import describe, disk_errors_as_storage_error
from dapo.training.checkpointing import is_logged, restore
from dapo.training.run_directory import RunDirectory, default_run_path, make_manifest, refuse_existing_run, step_of
from dapo.training.signals import Interrupted, StoppableEngine, signals_as_requests
from dapo.training.state import Run, TrainState
from dapo.training.train import read_evaluations, summarise, train

SHOWN_SAMPLES = 3
"""Responses that the final report shows from before and after training."""
SCHEDULES: Mapping[str, Callable[[Config, Run, TrainState], None]] = {"sync": train, "one_step_off": one_step_off.train}


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
        with disk_errors_as_storage_error(), run.lock():
            run_training(config, inputs, judge, run)


def resume_run(path: Path, overrides: Sequence[str]) -> None:
    """`dapo resume`: continue from the newest whole checkpoint, with the options of the run."""
    run = RunDirectory.open(path)
    config = resolve_auto(load_config(run.config, overrides))
    with disk_errors_as_storage_error(), run.lock():
        inputs = read_inputs(config)
        with open_judge(config) as judge:
            run_training(config, inputs, judge, run)


def run_training(config: Config, inputs: Inputs, judge: VerifierPool, run: RunDirectory) -> None:
    """Train to the end, then show what came of it; where a trainer rank is lost, go back to the newest checkpoint."""
    limit = config.distributed.max_restarts
    for restarts in count():
        try:
            train_from_latest_checkpoint(config, inputs, judge, run)
            break
        except TrainerLost as error:
            if restarts == limit:
                raise TrainerLost(
                    f"{error}; the run has gone back to its last checkpoint {restarts} times "
                    f"(distributed.max_restarts); continue it with: dapo resume {shlex.quote(str(run.path))}"
                ) from error
            warn(f"{error}; the run goes back to its last checkpoint by itself, time {restarts + 1} of {limit}")
    report(config, run)


def train_from_latest_checkpoint(config: Config, inputs: Inputs, judge: VerifierPool, run: RunDirectory) -> None:
    """Train from the newest checkpoint (or the beginning) to the end."""
    run.clear_leftovers()
    checkpoint = run.latest_checkpoint(warn=warn)
    first_step = step_of(checkpoint) + 1 if checkpoint else 1
    if checkpoint:
        run.cut_after(step_of(checkpoint), is_logged=is_logged(checkpoint))
        run.drop_old_checkpoints(
            step_of(checkpoint), config.train.keep_checkpoints, keep_best=True
        )  # which a kill may have come before
    else:
        run.cut_after(-1)
    display = ProgressDisplay(config.train.num_steps, first_step=first_step)
    with (
        signals_as_requests() as request,
        build_run(config, inputs, judge, run, display, first_step=first_step) as parts,
    ):
        parts.engine, parts.stop = StoppableEngine(parts.engine, request), request
        for note in inputs.notes:
            parts.tracker.message(note)
        parts.tracker.message(f"writing to {run.path}")
        train_state = restore(parts, checkpoint) if checkpoint else TrainState()
        if config.schedule == "sync":  # the run may have had another, whose next batch is stale
            one_step_off.requeue(parts, train_state)
        reason = "failed"
        try:
            SCHEDULES[config.schedule](config, parts, train_state)
            reason = "finished"
        except Interrupted as error:
            reason = f"interrupted: {error}"
            raise
        except DapoError as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            close_run(parts, train_state, reason)


def close_run(parts: Run, train_state: TrainState, reason: str) -> None:
    """Close the trackers and write summary.json; a disk that takes nothing more must not hide why the run ended."""
    try:
        parts.tracker.close()
        parts.directory.write_summary(summarise(parts, train_state, exit_reason=reason))
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
        samples=compared_responses(evaluations, SHOWN_SAMPLES),
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


def export_run(path: Path, out_dir: Path, *, step: int | None, adapter: bool = False) -> None:
    """`dapo export`: a checkpoint as a Hugging Face model directory, or its `adapter` alone as peft's."""
    run = RunDirectory.open(path)
    config = resolve_auto(load_config(run.config))
    checkpoint = run.checkpoint(step) if step is not None else run.latest_checkpoint(warn=warn)
    if checkpoint is None:
        raise CheckpointError(f"{run.path} has no checkpoint yet, so there is nothing to export")
    loaded = read_model(config)
    if adapter:
        export_adapter(checkpoint, loaded, out_dir)
    else:
        export_model(saved_weights(checkpoint, loaded.model).named_tensors(), loaded, out_dir)
    print(f"{out_dir}: {'adapter of ' if adapter else ''}{config.model.name} after {step_of(checkpoint)} steps")
