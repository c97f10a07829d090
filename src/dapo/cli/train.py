"""`dapo train`, `dapo resume` and `dapo export`: from reading the inputs to printing the result."""

import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import torch

from dapo.assemble import Inputs, build_run, probe_kernels, read_inputs, read_model, require_hardware, resolve_auto
from dapo.cli.progress import progress
from dapo.cli.start import open_judge
from dapo.config import Config, dump_config
from dapo.core.errors import CheckpointError, DapoError, DataError, TrainerLost
from dapo.core.terminal import print_text
from dapo.policy.hf_io import require_new
from dapo.policy.lora import export_adapter, saved_weights
from dapo.policy.model import export_model
from dapo.rewards.workers.pool import VerifierPool
from dapo.telemetry.console import ProgressDisplay, SafeConsole, final_report
from dapo.telemetry.curves import plot_curves
from dapo.telemetry.sinks import read_metrics
from dapo.training import one_step_off
from dapo.training.checkpoint_writer import describe, disk_errors_as_storage_error
from dapo.training.checkpointing import is_logged, restore
from dapo.training.made_with import changes_since, made_with
from dapo.training.run_config import load_run_config, naming_start_folder
from dapo.training.run_directory import RunDirectory, default_run_path, make_manifest, step_of
from dapo.training.signals import Interrupted, signals_as_requests
from dapo.training.state import Run
from dapo.training.train import train

MAX_RESTARTS = 3  # times that a run goes back to its last checkpoint by itself when a trainer rank is lost
SHOWN_SAMPLES = 3  # responses that the final report shows from before and after training
SCHEDULES: Mapping[str, Callable[[Run], None]] = {"sync": train, "one_step_off": one_step_off.train}


def start_run(
    config: Config,
    *,
    run_dir: Path | None,
    config_name: str,
    max_restarts: int = MAX_RESTARTS,
    judge: VerifierPool | None = None,
) -> None:
    """`dapo train`: read everything, then make the run directory, then train.

    Args:
        config: the options of the run.
        run_dir: the directory to make; None: one in `runs` with name and time.
        config_name: the name for it.
        max_restarts: times that the run goes back to its last checkpoint by itself when a trainer rank is lost.
        judge: of `open_judge` for this configuration and directory; None: it is opened here.
    """
    path = run_dir or default_run_path(config_name, datetime.now())
    with open_judge(config, run_dir=path) if judge is None else nullcontext(judge) as verifiers:
        require_hardware(config)
        notes: list[str] = []
        config = resolve_auto(config, log=notes.append)
        inputs = _read_inputs(config, verifiers)
        inputs.notes += notes
        started = datetime.now(UTC)
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        inputs.kernels = probe_kernels(config, inputs.loaded)
        manifest = make_manifest(sys.argv, seed=config.train.seed, started=started, gpus=gpus, kernels=inputs.kernels)
        directory = RunDirectory.create(path, dump_config(config), manifest)
        with disk_errors_as_storage_error(), directory.lock():
            run_training(config, inputs, verifiers, directory, max_restarts=max_restarts)


def resume_run(path: Path, overrides: Sequence[str]) -> None:
    """`dapo resume`: continue from the newest complete checkpoint, with the options of the run."""
    directory = RunDirectory.open(path)
    config = resolve_auto(load_run_config(directory, overrides))
    with ExitStack() as stack:
        stack.enter_context(disk_errors_as_storage_error())
        stack.enter_context(directory.lock())
        checkpoint = directory.latest_checkpoint(warn=lambda text: None)
        num_steps = config.train.num_steps
        if checkpoint and step_of(checkpoint) >= num_steps and directory.exit_reason() == "finished":
            report(config, directory)
            at, more = f"{step_of(checkpoint)} of {num_steps}", f"train.num_steps={2 * step_of(checkpoint)}"
            print_text(f"\nalready at step {at}; to train on: dapo resume {shlex.quote(str(path))} {more}")
            return
        with naming_start_folder(directory):
            judge = stack.enter_context(open_judge(config))
            inputs = _read_inputs(config, judge)
        inputs.kernels = directory.kernels()
        run_training(config, inputs, judge, directory)


def _read_inputs(config: Config, judge: VerifierPool) -> Inputs:
    """The inputs of a run, with a progress bar where it takes more than a second to prepare the prompts."""
    with progress("prepare prompts", unit="prompts", after_s=1) as update_progress:
        return read_inputs(config, judge.needed_columns, on_progress=update_progress)


def run_training(
    config: Config, inputs: Inputs, judge: VerifierPool, directory: RunDirectory, *, max_restarts: int = MAX_RESTARTS
) -> None:
    """Train to the end and print what came of it; where a trainer rank is lost, go back to the newest checkpoint."""
    for restarts in count():
        try:
            with open_run(config, inputs, judge, directory) as run:
                SCHEDULES[config.schedule](run)
            break
        except TrainerLost as error:
            if restarts == max_restarts:
                raise TrainerLost(
                    f"{error}; the run has gone back to its last checkpoint {restarts} times "
                    f"(at most {max_restarts}); continue it with: dapo resume {shlex.quote(str(directory.path))}"
                ) from error
            warn(f"{error}; the run goes back to its last checkpoint by itself, time {restarts + 1} of {max_restarts}")
    report(config, directory)


@contextmanager
def open_run(config: Config, inputs: Inputs, judge: VerifierPool, directory: RunDirectory) -> Iterator[Run]:
    """A run at its newest checkpoint (or its beginning); signals ask it to stop; its summary is written at the end."""
    checkpoint = cut_after_checkpoint(config, directory)
    step = step_of(checkpoint) if checkpoint else 0
    display = ProgressDisplay(config.train.num_steps, first_step=step + 1)
    with (
        signals_as_requests() as stop,
        build_run(config, inputs, judge, directory, display, first_step=step + 1) as run,
    ):
        run.stop, run.verifier_output = stop, judge.output
        run.made_with = made_with(config, inputs.train, inputs.held_out)
        for note in [*inputs.notes, f"writing to {directory.path}"]:
            run.tracker.message(note)
        if checkpoint:
            restore(run, checkpoint)
            for line in changes_since(checkpoint, run.made_with, step=step):
                run.tracker.message(line)
            display.recall(read_metrics(directory.metrics) if directory.metrics.exists() else [])
        started, seconds_before = time.perf_counter(), run.state.wall_s
        if config.schedule == "sync":  # the run may have had another, whose prefetched batch is stale
            one_step_off.requeue(run)
        reason = "failed"
        gc.freeze()  # full collections look at all modules again and again: 0.3 s or more, also between two steps
        try:
            yield run
            reason = "solved" if run.is_solved else "finished"
        except Interrupted as error:
            reason = f"interrupted: {error}"
            raise
        except DapoError as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            gc.unfreeze()
            close_run(run, reason, wall_s=seconds_before + time.perf_counter() - started)


def cut_after_checkpoint(config: Config, directory: RunDirectory) -> Path | None:
    """The newest checkpoint, if there is one, with nothing in the run directory that is later."""
    directory.clear_leftovers()
    checkpoint = directory.latest_checkpoint(warn=warn)
    if checkpoint is None:
        directory.cut_after(-1)
        return None
    step = step_of(checkpoint)
    logged = step if is_logged(checkpoint) else step - 1
    if missing := directory.missing_metrics(logged):
        lost = f"{len(missing)} of the steps 1 to {logged}, the first is {missing[0]}"
        warn(f"{directory.metrics} has no line for {lost}; they are not computed again")
    directory.cut_after(step, is_logged=logged == step)
    # a kill may have come before the old ones were dropped
    directory.drop_old_checkpoints(step, config.train.keep_checkpoints)
    return checkpoint


def close_run(run: Run, reason: str, *, wall_s: float) -> None:
    """Close the trackers and write summary.json; a full disk must not hide why the run ended.

    Its `tokens_generated` and `wall_s` count the unfinished step too, whose work is thrown away.
    """
    evaluations = [
        {name: value for name, value in each.items() if name != "table"}
        for each in run.directory.first_and_last_evaluation(warn=lambda text: None)  # the report says it
    ]
    try:
        run.keep_verifier_output()
        run.tracker.close()
        run.directory.write_summary(
            {
                "steps": run.state.step,
                "wall_s": round(wall_s, 3),
                "tokens_generated": run.state.tokens_generated + run.sampling.tokens_discarded,
                "tokens_discarded": run.sampling.tokens_discarded,
                "tokens_trained": run.state.tokens_trained,
                "eval_first": evaluations[0] if evaluations else None,
                "eval_last": evaluations[-1] if evaluations else None,
                "exit_reason": reason,
            }
        )
    except OSError as error:
        warn(f"the summary could not be written: {describe(error)}")


def warn(text: str) -> None:
    """Print a warning to the standard error."""
    print_text(f"warning: {text}", file=sys.stderr)


def report(config: Config, directory: RunDirectory) -> None:
    """The end of a run, for a person: before and after, responses, curves, where everything lies."""
    title = f"{config.model.name}, {config.preset} on {config.data.train_source.label}"
    try:
        plot_curves(directory.metrics, directory.curves, title=title)
    except DataError as error:  # someone has removed the metrics
        warn(str(error))
    evaluations = directory.first_and_last_evaluation(warn)
    newest = directory.latest_checkpoint(warn=warn)
    # without held-out problems of its own a run has nothing to be evaluated on; one that has them may get more samples
    asked = "--samples-per-problem 8" if evaluations else "--data problems.jsonl"
    final_report(
        SafeConsole(),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        samples=compared_responses(evaluations, SHOWN_SAMPLES),
        files={
            "curves": directory.curves,
            "metrics, one line per step": directory.metrics,
            **({} if config.log.rollouts == "none" else {"judged responses": directory.path / "rollouts"}),
            **({"evaluations": directory.path / "eval"} if evaluations else {}),
            "checkpoint": newest,
            "evaluate it": f"dapo eval {directory.path} {asked}",
            "export it": f"dapo export {directory.path} my-model",
        },
    )


def compared_responses(evaluations: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Responses to the same problems before and after training, one of each source first."""
    if len(evaluations) < 2:
        return []
    before, after = evaluations[0]["table"], evaluations[-1]["table"]
    by_source: dict[str, list[int]] = {}
    for i, (row, other) in enumerate(zip(before, after, strict=False)):
        if row["id"] != other["id"]:  # one of the files is of other problems
            continue
        by_source.setdefault(row["source"], []).append(i)
    picked = [row for rank in zip_longest(*by_source.values()) for row in rank if row is not None][:count]
    pairs = [(before[i], before[i]["responses"][0], after[i]["responses"][0]) for i in picked]
    return [
        {"question": problem["question"], "answer": problem["answer"]}
        | {"before": old["text"], "before_correct": old.get("correct")}
        | {"after": new["text"], "after_correct": new.get("correct")}
        for problem, old, new in pairs
    ]


def export_run(path: Path, out_dir: Path, *, step: int | None, adapter: bool = False) -> None:
    """`dapo export`: a checkpoint as a Hugging Face model directory, or its `adapter` alone as peft's."""
    run = RunDirectory.open(path)
    require_new(out_dir)
    config = resolve_auto(load_run_config(run), training=False)
    checkpoint = run.checkpoint(step) if step is not None else run.latest_checkpoint(warn=warn)
    if checkpoint is None:
        raise CheckpointError(f"{run.path} has no checkpoint yet, so there is nothing to export")
    loaded = read_model(config, "cpu")
    if adapter:
        export_adapter(checkpoint, loaded, out_dir)
    else:
        export_model(saved_weights(checkpoint, loaded.model).named_tensors(), loaded, out_dir)
    print_text(f"{out_dir}: {'adapter of ' if adapter else ''}{config.model.name} after {step_of(checkpoint)} steps")
