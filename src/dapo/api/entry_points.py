"""Runs from a script or a notebook: `dapo.train`, `dapo.resume` and `dapo.load`."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from dapo.api.callbacks import Callbacks, OnEnd, OnEvaluation, OnStep, Sinks, split_sinks
from dapo.api.code_writer import WrittenModule
from dapo.api.in_memory_data import (
    Data,
    Reward,
    StoredData,
    row_errors,
    stored_arguments,
)
from dapo.api.keywords import (
    as_overrides,
    build_scaled,
    load_base,
    option_named,
    read_keywords,
)
from dapo.api.plain_values import model_name, plain_value
from dapo.api.python_errors import python_interface
from dapo.api.python_words import in_python
from dapo.api.run import Run, translate_errors
from dapo.config.load import without_repeats
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.loading import add_code_folder
from dapo.core.terminal import print_text, warn
from dapo.runs.directory import ENDED, RunDirectory, default_run_path, require_new_run
from dapo.runs.stages import unbegun_advice
from dapo.runs.stored_config import CODE_FOLDER, DATA_FOLDER, trust_module_folders


@python_interface
def train(  # noqa: PLR0913
    model: str | os.PathLike[str] | None = None,
    *,
    data: Data = None,
    reward: Reward = None,
    eval_data: Data = None,
    config: str | Path | Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    name: str | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] = (),
    on_end: OnEnd | Sequence[OnEnd] = (),
    sinks: Sinks = (),
    **options: Any,
) -> Run:
    """Train a model, as `dapo train` does, and return the run.

    Ctrl-C saves the state, stops the run and raises TrainingInterrupted; a second one stops at
    once. This error and every other that ends a run has the run as its `run`. Each call makes a new
    run directory.

    Args:
        model: an alias, a Hugging Face id, a model directory, or a run, whose newest weights are
            trained further.
        data: rows (a list of dicts, a DataFrame, a datasets.Dataset), which are copied into the run
            directory, or a data source: a path, `hub:NAME`, `builtin:TASKS`, `gym:TASKS`, a
            mapping.
        reward: a verifier's name, `module:function`, or a function, which is copied into the run
            directory with its dependencies for `dapo resume`; a list of these, whose scores are
            added, or a mapping to weights. None: chosen by the data (`reward.verifier: auto`).
        eval_data: held-out problems, in the forms of `data`; a mapping of names to rows holds
            several sets.
        config: a YAML file, the name of a shipped configuration (`quickstart`), or a mapping;
            `options` and the arguments above override it.
        run_dir: the directory to make; None: `runs/run-TIME`, or `runs/run-TIME-seed2` in a call with
            `seed=2`.
        name: the name of a directory in `runs/`, in place of `run-TIME`; a name that exists gets a
            number.
        on_step: a function or several, called as `on_step(run, metrics)` after each step. `return
            dapo.STOP` or `raise dapo.Stop("why")` in it ends the run normally, with its state
            saved: the status is `stopped`, and the run is returned. If it raises anything else, the
            state is saved, the run ends, and the exception is raised here.
        on_evaluation: the same, called as `on_evaluation(run, evaluation)` after each evaluation on
            held-out problems, from the one before the first step on.
        on_end: a function or several, called as `on_end(run)` when the run has ended: finished,
            stopped or failed, see `run.status`.
        sinks: one or several: objects with `write(step, metrics)`, and names of trackers:
            `tensorboard`, `wandb`, `trackio`, `mlflow`. An object that raises costs a warning, and
            the run goes on; with the attribute `required = True` it ends the run.
        **options: option names. Leave out the section if the last part is unique
            (`prompts_per_step`, `group_size`, `lr`; `steps` is `train.num_steps`); write
            `**{"loss.clip_high": 0.3}` otherwise. `loss` may be a custom loss function (`dapo show
            docs losses`), `environment` a class and `tools` a list of functions (`dapo show docs
            environments`), `agent` a function or class that asks an OpenAI endpoint, or a command
            as `{"command": [...]}` (`dapo show docs agents`); they are copied into the run
            directory like a reward. `teacher`, a model or a run, sets `loss.reference.model`,
            `loss.kl_coef=1`, `loss.kl_estimator=full` and, without a `reward`, `reward.coef=0`: the
            policy learns the teacher's distribution on its own responses. `demonstrations`, rows or
            a data source with prompts and responses, sets `preset=sft`: the policy imitates them,
            without `data`; with `preset="sft"` they may be `data`. Unless set, the paper's `train.minibatch_groups`,
            `overlong.buffer_tokens` and `optim.warmup_steps` are scaled down to your sizes.

    Returns:
        The run, with its curves, rollouts and evaluations.

    Raises:
        ConfigError: an option is unknown, ambiguous or impossible.
        DataError: the rows cannot be read.
        RewardError: a reward does not exist or cannot be copied.
        DapoError: the run ended before its last step; its state is saved.

    Example:
        >>> def digits(completions, **columns):
        ...     return [any(c.isdigit() for c in completion) for completion in completions]
        >>> rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
        >>> run = dapo.train("tiny-random", data=rows, reward=digits, steps=2, prompts_per_step=2, group_size=4,
        ...                  max_response_tokens=8, lr=1e-3)
        set to fit: minibatch_groups=2, buffer_tokens=1, warmup_steps=0
        writing to ...
        >>> len(run.metrics)
        2
    """
    base, arguments, title = load_base(config)
    if run_dir is None:
        path = _new_path(title, name, _seed_of(options))
    elif name is None:
        path = Path(run_dir)
    else:
        raise ConfigError("run_dir and name both name the run's directory: expected one of them")
    stored, options = stored_arguments(path / DATA_FOLDER, data, eval_data, options, base)
    trained_model = model_name(model)
    settings = {} if trained_model is None else {"model.name": trained_model}
    settings |= {
        option: each.source
        for option, each in stored.items()
        if each.source is not None and not each.rows
    }
    trackers, objects = split_sinks(sinks)
    if trackers:
        settings["log.sinks"] = trackers
    values, modules, folders = read_keywords(settings, reward, options)
    require_new_run(path)
    values |= {option: each.source for option, each in stored.items() if each.rows}
    built, scaled = build_scaled(base, values, where="dapo.train")
    from dapo.start.check import check, read_data
    from dapo.start.run import new_run, run_training

    if scaled:
        print_text(in_python(f"set to fit: {', '.join(as_overrides(scaled))}"))
    overrides = as_overrides(values | scaled)
    if isinstance(config, Mapping):  # its options are arguments, too
        overrides = without_repeats([*arguments, *overrides])
        arguments = []
    command = ["dapo", "train", *arguments, *overrides, "--run-dir", str(path)]
    run = Run(path)
    callbacks = Callbacks.of(on_step, on_evaluation, on_end, objects)
    with (
        callbacks.calls_at_end(run),
        translate_errors(run),
        _prepared(path, list(stored.values()), modules) as prepared,
        row_errors(
            {label: file for each in stored.values() for label, file in each.labels.items()}
        ),
        check(built) as checked,
        new_run(
            checked,
            read_data(checked),
            path,
            command=command,
            prepared=prepared,
            module_folders=folders,
            set_to_fit=tuple(scaled),
        ) as ready,
    ):
        run_training(ready, callbacks.of_run(run))
    return run


@python_interface
def resume(
    path: str | os.PathLike[str],
    *,
    reward: Reward = None,
    on_step: OnStep | Sequence[OnStep] = (),
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] = (),
    on_end: OnEnd | Sequence[OnEnd] = (),
    sinks: Sinks = (),
    trust: bool = False,
    **options: Any,
) -> Run:
    """Continue a run from its newest checkpoint, like `dapo resume`, and return it.

    `reward`, `on_step`, `on_evaluation`, `on_end`, `sinks` and `options`, of which `loss` may be a
    function, are as for `train`. What they change lasts: later calls keep it, and
    `run.state.changes` lists it with its step. `trust` also imports modules from the folders that
    the run's manifest.json names. Raises DapoError if the run cannot continue, or ends too early.
    """
    from dapo.start.resume import Ended
    from dapo.start.run import continued_run, end_run, run_training

    run = path if isinstance(path, Run) else Run(path)
    RunDirectory.open(run.path)
    trackers, objects = split_sinks(sinks)
    callbacks = Callbacks.of(on_step, on_evaluation, on_end, objects)
    settings = {"log.sinks": trackers} if trackers else {}
    changed, modules, _ = read_keywords(settings, reward, options)
    if trust:
        trust_module_folders(run.path)
    with (
        callbacks.calls_at_end(run),
        translate_errors(run),
        _prepared(run.path, [], modules),
        continued_run(run.path, as_overrides(changed)) as ready,
    ):
        if isinstance(ready, Ended):
            end_run(ready.config, ready.directory, warn=lambda text: warn(in_python(text)))
            print_text(in_python(ready.advice))
        else:
            run_training(ready, callbacks.of_run(run))
    advice = unbegun_advice(run.path)
    if advice and run.status in ENDED:
        print_text(in_python(f"this call continues one stage; {advice}"))
    return run


@python_interface
def load(path: str | os.PathLike[str], *, trust: bool = False) -> Run:
    """Open the run in a directory, even while it trains; `trust` is that of `resume`.

    Raises CheckpointError if there is none.
    """
    run = Run(path)
    RunDirectory.open(run.path)
    if trust:
        trust_module_folders(run.path)
    return run


@contextmanager
def _prepared(
    path: Path, data: Sequence[StoredData], modules: Sequence[WrittenModule]
) -> Iterator[list[str]]:
    """Write rows and code into a run directory; clean up if the run cannot start."""
    is_new = not path.exists()
    added = [
        file
        for module in modules
        if not (file := path / CODE_FOLDER / f"{module.name}.py").exists()
    ]
    names = [DATA_FOLDER] * any(each.rows for each in data) + [CODE_FOLDER] * bool(modules)
    if is_new and names:
        _make(path)
    try:
        for each in data:
            each.write()
        for module in modules:
            module.write(path / CODE_FOLDER)
        add_code_folder(path / CODE_FOLDER)
        yield names
    except BaseException:
        if not RunDirectory(path).config.exists():
            for name in names:
                shutil.rmtree(path / name, ignore_errors=True)
            if is_new and path.is_dir() and not os.listdir(path):
                path.rmdir()
        raise
    finally:
        config = RunDirectory(path).config
        config_text = config.read_text(encoding="utf-8") if config.exists() else ""
        for file in added:
            if file.stem not in config_text:
                file.unlink(missing_ok=True)


def _make(path: Path) -> None:
    """Make the directory of a run. Raises CheckpointError if another process has just made it.

    Its name is the time: two calls of one second would write their rows into one file.
    """
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise CheckpointError(
            f"another call has just begun a run in {path}; call again, or set name or run_dir"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot create the run directory {path}: {error.strerror}") from None


def _seed_of(options: Mapping[str, Any]) -> object:
    """Return the seed that a call sets; None if it sets none."""
    for keyword, value in options.items():
        if option_named(keyword) == "train.seed":
            return plain_value(value, keyword)
    section = options.get("train")
    return plain_value(section.get("seed"), "train") if isinstance(section, Mapping) else None


def _new_path(title: str, name: str | None, seed: object) -> Path:
    """Return a path in `runs/` that does not exist."""
    first = default_run_path(title, datetime.now())
    if name is not None:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ConfigError(
                f"name: expected the name of a directory in runs/, got {name!r}; run_dir takes a"
                " path"
            )
        first = first.with_name(name)
    elif isinstance(seed, int):
        first = first.with_name(f"{first.name}-seed{seed}")
    candidates = (
        first.with_name(f"{first.name}-{number}") if number > 1 else first
        for number in range(1, 10_000)
    )
    return next(path for path in candidates if not path.exists())
