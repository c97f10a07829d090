"""Starts and continues runs, without printing."""

import gc
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dapo.config import Config, ReferenceConfig, dump_config
from dapo.config.run_options import MAX_RESTARTS
from dapo.core.errors import CheckpointError, DataError, TrainerLost
from dapo.core.secrets import mask_text
from dapo.core.waiting import Interrupted
from dapo.policy.checkpoint import copy_weights
from dapo.policy.hf_io import appearing_directory, config_of, quiet_transformers
from dapo.policy.model import LoadedModel
from dapo.runs.checkpoints import step_of
from dapo.runs.console import ProgressDisplay, progress
from dapo.runs.console_log import ConsoleLog, LoggedDisplay
from dapo.runs.curves import marks_of, plot_curves
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import first_and_last_evaluation
from dapo.runs.manifest import (
    WRITTEN,
    Fork,
    make_manifest,
    provenance,
    provenance_diff,
    written_options,
)
from dapo.runs.metrics_file import read_metrics
from dapo.runs.sinks import Display
from dapo.runs.status import end_state
from dapo.runs.stored_config import keep_overrides, load_run_config, with_start_folder
from dapo.start.build import build
from dapo.start.check import Checked
from dapo.start.export import exported_run
from dapo.start.ignored_options import ignored_options
from dapo.start.read import Inputs, read
from dapo.start.resolve import Resolved, resolve
from dapo.start.resume import CheckedRun, Ended, checked_run
from dapo.start.rows import RunData
from dapo.training import asynchronous
from dapo.training.checkpoint_writer import describe, os_errors_as_dapo_errors
from dapo.training.checkpointing import restore
from dapo.training.saved_state import is_logged
from dapo.training.signals import (
    END_AT_ONCE,
    INTERRUPT_MESSAGE,
    InterruptHandler,
    StepListener,
    StoppedByCallback,
    signals_as_requests,
)
from dapo.training.state import Run
from dapo.training.train import train


@dataclass(frozen=True)
class RunCallbacks:
    """The display of a run, its warnings, and calls after each step."""

    warn: Callable[[str], None]
    open_display: Callable[..., Display] = ProgressDisplay
    """Opens the display of progress, with the arguments of ProgressDisplay."""
    on_step: Sequence[Callable[[int, Mapping[str, float]], None]] = ()
    on_open: Callable[[Run], None] = lambda run: None
    """Called with the run once its parts are built, and again after each restart."""
    on_second_interrupt: InterruptHandler = END_AT_ONCE
    interrupt_message: str = INTERRUPT_MESSAGE
    """Printed at the first signal; empty: nothing."""
    names_continuation: bool = True
    """Whether a signal's message says how to continue; False: the caller does."""


@dataclass(frozen=True)
class ReadyRun:
    """A run whose inputs are read and whose directory is locked, before its next step."""

    inputs: Inputs
    directory: RunDirectory
    overrides: Sequence[str] = ()
    """Changes of the options of a run that is continued, not written yet."""

    @property
    def config(self) -> Config:
        return self.inputs.config


@contextmanager
def new_run(
    checked: Checked,
    data: RunData,
    path: Path,
    *,
    command: Sequence[str],
    prepared: Collection[str] = (),
    module_folders: Sequence[str] = (),
    set_to_fit: Collection[str] = (),
) -> Iterator[ReadyRun]:
    """Read the model, then make the run directory and lock it in the block.

    Args:
        checked: the options, and the open verifiers.
        data: the problems.
        path: the directory to make.
        command: the command line, for the manifest.
        prepared: entries that the caller has written into the directory.
        module_folders: the folders of modules that options name, for the manifest.
        set_to_fit: options in the command that were computed, for the manifest.
    """
    started = datetime.now(UTC)
    resolved = resolve(with_exported_runs(checked))
    # of the engine that `auto` became
    unused = [f"without effect: {line}" for line in ignored_options(resolved.config)]
    inputs = _read(replace(resolved, notes=[*unused, *resolved.notes]), data)
    _try_environment(inputs)
    config = inputs.config
    manifest = make_manifest(
        command,
        seed=config.train.seed,
        started=started,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        run_dir=path,
        module_folders=module_folders,
        template_time=config.data.template_time,
    )
    manifest[WRITTEN] = written_options(command, set_to_fit)
    save = partial(save_tokenizer, loaded=inputs.loaded)
    directory = RunDirectory.create(
        path, dump_config(config), manifest, prepared=prepared, write_first=save
    )
    with os_errors_as_dapo_errors(), directory.lock(config.train.num_steps):
        yield ReadyRun(inputs, directory)


def with_exported_runs(checked: Checked) -> Checked:
    """Replace runs as `model` or `loss.reference.model` by their exported checkpoints.

    Later checkpoints of that run thus change nothing. Raises CheckpointError if it has none.
    """
    config = checked.config
    notes = list(checked.notes)
    if RunDirectory.is_run(Path(config.model.name).expanduser()):
        exported = exported_run("model.name", config.model.name, notes.append)
        config = config.changed("model", name=exported)
    teacher = config.loss.teacher
    if teacher is not None and RunDirectory.is_run(Path(teacher).expanduser()):
        exported = exported_run("loss.reference.model", teacher, notes.append)
        config = config.changed("loss", reference=ReferenceConfig(model=exported))
    return Checked(config, checked.code, notes, checked.has_trained)


def save_tokenizer(directory: RunDirectory, *, loaded: LoadedModel) -> None:
    """Write `tokenizer/`, unless the run has it: the page colours tokens by it, on any machine."""
    if directory.tokenizer.exists():
        return
    with appearing_directory(directory.tokenizer) as folder, quiet_transformers():
        config_of(loaded.model).save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


@contextmanager
def continued_run(path: Path, overrides: Sequence[str]) -> Iterator[ReadyRun | Ended]:
    """Lock the directory of a run in the block and read its inputs, unless the run has ended.

    `overrides` change options of the run, from its checkpoint on. Raises DapoError if it cannot
    continue, or if no step is left for the change.
    """
    with checked_run(path, overrides) as run:
        yield run if isinstance(run, Ended) else ready_to_continue(run)


def ready_to_continue(run: CheckedRun) -> ReadyRun:
    """Read the inputs of a run whose options and data are checked. Raises DapoError."""
    with os_errors_as_dapo_errors(), with_start_folder(run.directory):
        # a changed option may name a run as the teacher
        inputs = _read(resolve(with_exported_runs(run.checked)), run.data)
        if inputs.config.environment != load_run_config(run.directory).environment:
            _try_environment(inputs)
        save_tokenizer(run.directory, loaded=inputs.loaded)
    return ReadyRun(inputs, run.directory, run.overrides)


def _read(resolved: Resolved, data: RunData) -> Inputs:
    with progress("prepare prompts", unit="prompts", after_s=1) as update_progress:
        return read(resolved, data, on_progress=update_progress)


def _try_environment(inputs: Inputs) -> None:
    """Play the environment with nonsense, and note its faults. Raises ConfigError if it fails."""
    if inputs.episodes is not None and not inputs.config.is_supervised:
        inputs.notes.extend(inputs.episodes.try_out(inputs.train))


def run_training(
    ready: ReadyRun, callbacks: RunCallbacks, *, max_restarts: int = MAX_RESTARTS
) -> None:
    """Train to the end, or until a callback stops the run, and draw curves.

    If a trainer rank is lost, restart.

    What the console shows is also kept in the run's `logs/console.log`.
    """
    log = ConsoleLog(ready.directory.console_log, callbacks.warn)
    callbacks = logged(callbacks, log)
    with _end_logged(log):
        for restarts in count():
            try:
                with open_run(ready, callbacks) as run:
                    train(run)
                break
            except StoppedByCallback:  # the summary has its reason
                break
            except TrainerLost as error:
                if restarts == max_restarts:
                    path = shlex.quote(str(ready.directory.path))
                    raise TrainerLost(
                        f"{error}; the run has gone back to its last checkpoint {restarts} times "
                        f"(at most {max_restarts}); continue it with: dapo resume {path}"
                    ) from error
                again = f"time {restarts + 1} of {max_restarts}"
                callbacks.warn(
                    f"{error}; the run goes back to its last checkpoint by itself, {again}"
                )
    end_run(ready.config, ready.directory, warn=callbacks.warn)


@contextmanager
def _end_logged(log: ConsoleLog) -> Iterator[None]:
    """Append why a run has ended to its log, if an exception ends it."""
    try:
        yield
    except BaseException as error:
        log.line(f"ended: {_describe_end(error)}")
        raise


def logged(callbacks: RunCallbacks, log: ConsoleLog) -> RunCallbacks:
    """Return callbacks whose lines and warnings are also appended to a log."""

    def open_display(num_steps: int, **options: Any) -> Display:
        shown = callbacks.open_display(num_steps, **options)
        return LoggedDisplay(shown, log, num_steps, **options)

    return replace(callbacks, warn=log.warned, open_display=open_display)


def end_run(config: Config, directory: RunDirectory, *, warn: Callable[[str], None]) -> None:
    """Make the curves and files that follow the summary of a finished run.

    Each act can be repeated, so that `resume` of a finished run completes what a kill has
    prevented.
    """
    for act in (draw_curves, reduce_checkpoints):
        act(config, directory, warn=warn)


def reduce_checkpoints(
    config: Config, directory: RunDirectory, *, warn: Callable[[str], None]
) -> None:
    """Remove optimizer states of older checkpoints; warn if this fails."""
    num_kept = config.train.keep_checkpoints
    try:
        directory.checkpoints.clear_leftovers()
        old = directory.checkpoints.with_optimizer_state(
            but_newest=1 if num_kept is None else num_kept
        )
        keep_weights_only(directory, config, old)
    except (CheckpointError, OSError) as error:
        warn(f"a checkpoint keeps its optimizer state: {error}")


def keep_weights_only(directory: RunDirectory, config: Config, checkpoints: Sequence[Path]) -> None:
    """Remove the optimizer states, and store weights in the type of the forward pass."""
    for path in checkpoints:
        directory.checkpoints.keep_weights(
            path, partial(copy_weights, dtype=getattr(torch, config.model.dtype))
        )


@contextmanager
def open_run(ready: ReadyRun, callbacks: RunCallbacks) -> Iterator[Run]:
    """Open a run at its newest checkpoint or its start, and write a summary at the end."""
    inputs = ready.inputs
    config = inputs.config
    directory = ready.directory
    checkpoint = truncate_after_checkpoint(config, directory, callbacks.warn)
    step = step_of(checkpoint) if checkpoint else 0
    steps = config.train.num_steps
    tokens = config.train.token_budget
    display = callbacks.open_display(steps, first_step=step + 1, token_budget=tokens)
    with ExitStack() as stack:
        stop = stack.enter_context(
            signals_as_requests(
                callbacks.interrupt_message, on_second=callbacks.on_second_interrupt
            )
        )
        listeners = [StepListener(stop, call) for call in callbacks.on_step]
        run = stack.enter_context(
            build(inputs, directory, display, first_step=step + 1, listeners=listeners)
        )
        run.stop = stop
        run.names_continuation = callbacks.names_continuation
        run.provenance = provenance(config, inputs.train, inputs.held_out)
        writing = (
            f"writing to {directory.path}; to look at it: dapo view"
            f" {shlex.quote(str(directory.path))}"
        )
        for note in [*inputs.notes, writing]:
            run.tracker.message(note)
        opened = stack.enter_context(ExitStack())
        opened.callback(run.tracker.close)
        if checkpoint:
            restore(run, checkpoint)
            fork = Fork.of(directory)
            expected = fork.changed if fork is not None and fork.step == step else ()
            lines = provenance_diff(checkpoint, run.provenance, step=step, expected=expected)
            # before the first step nothing was trained that could differ
            for line in lines if step > 0 else ():
                run.tracker.message(line)
            display.recall(read_metrics(directory.metrics) if directory.metrics.exists() else [])
        keep_overrides(directory, ready.overrides, after=step)
        if not config.samples_ahead:  # a prefetched batch of an earlier schedule is stale
            asynchronous.requeue(run)
        opened.pop_all()
        callbacks.on_open(run)
        with summary_written(run, callbacks.warn):
            yield run


@contextmanager
def summary_written(run: Run, warn: Callable[[str], None]) -> Iterator[None]:
    """Close the trackers and write the summary with the exit reason, however the block ends."""
    started = time.perf_counter()
    seconds_before = run.state.wall_s
    reason = "failed"
    gc.freeze()  # full collections would visit all modules each time, for 0.3 s or more
    try:
        yield
        # a failure in the last step, after which no step checks; a stop there changes nothing
        with suppress(StoppedByCallback):
            run.stop.check_listeners()
        reason = "solved" if run.is_solved else "finished"
    except KeyboardInterrupt:  # the second one
        reason = "interrupted: stopped at once, at the last checkpoint"
        raise
    except Exception as error:
        reason = _describe_end(error)
        raise
    finally:
        gc.unfreeze()
        close_run(run, reason, wall_s=seconds_before + time.perf_counter() - started, warn=warn)


def _describe_end(error: BaseException) -> str:
    """Return the exit reason of a run that an error has ended."""
    if isinstance(error, Interrupted):
        kind = "interrupted"
    elif isinstance(error, StoppedByCallback):
        kind = "stopped"
    else:
        kind = type(error).__name__
    return f"{kind}: {mask_text(str(error))}"


def truncate_after_checkpoint(
    config: Config, directory: RunDirectory, warn: Callable[[str], None]
) -> Path | None:
    """Find the newest checkpoint and remove everything later from the run directory."""
    directory.checkpoints.clear_leftovers()
    checkpoint = directory.checkpoints.latest(warn=warn)
    if checkpoint is None:
        directory.truncate_after(-1)
        return None
    step = step_of(checkpoint)
    logged = step if is_logged(checkpoint) else step - 1
    if gaps := directory.missing_metrics(logged):
        lost = f"{len(gaps)} of the steps 1 to {logged}, the first is {gaps[0]}"
        warn(f"{directory.metrics} has no line for {lost}; they are not computed again")
    directory.truncate_after(step, is_logged=logged == step)
    # a kill may have prevented this
    directory.checkpoints.drop_old(step, config.train.kept_in_training)
    return checkpoint


def close_run(run: Run, reason: str, *, wall_s: float, warn: Callable[[str], None]) -> None:
    """Close the trackers and write summary.json; a full disk only causes a warning.

    `tokens_generated` and `wall_s` include the unfinished step, whose work is lost.
    """
    evaluations: list[dict[str, Any]] = [
        {name: value for name, value in evaluation.items() if name != "table"}
        for evaluation in first_and_last_evaluation(run.directory)  # the report warns
    ]
    try:
        run.keep_verifier_output()
        run.tracker.end(end_state(reason))
        run.tracker.close()
        run.directory.write_summary(
            {
                "steps": run.state.step,
                "num_steps": run.config.train.num_steps,
                "wall_s": round(wall_s, 3),
                "tokens_generated": run.state.tokens_generated + run.sampling.tokens_discarded,
                "tokens_discarded": run.sampling.tokens_discarded,
                "tokens_trained": run.state.tokens_trained,
                "eval_first": evaluations[0] if evaluations else None,
                "eval_last": evaluations[-1] if evaluations else None,
                "exit_reason": reason,
                **({} if (fork := Fork.of(run.directory)) is None else {"fork": asdict(fork)}),
            }
        )
    except OSError as error:
        warn(f"the summary could not be written: {describe(error)}")


def title_of(config: Config) -> str:
    """Return the title of a run's figure."""
    return f"{config.model.name}, {config.preset} on {config.data.train_source.label}"


def draw_curves(config: Config, directory: RunDirectory, *, warn: Callable[[str], None]) -> None:
    """Write curves.png, or warn that there are no metrics."""
    try:
        marks = marks_of(directory)
        plot_curves(directory.metrics, directory.curves, title=title_of(config), marks=marks)
    except DataError as error:  # someone has removed the metrics
        warn(str(error))
