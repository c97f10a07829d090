"""Runs from a script or a notebook: `dapo.train`, `dapo.resume` and `dapo.load`."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dapo.api.code_writer import CodeWriter, WrittenModule
from dapo.api.in_memory_data import (
    DEMONSTRATIONS_FILE,
    HELD_OUT_FILE,
    TRAIN_FILE,
    Data,
    Reward,
    is_source,
    row_errors,
    verifier_option,
    weights_by_name,
    write_rows,
)
from dapo.api.keywords import (
    as_overrides,
    build_scaled,
    load_base,
    named_functions,
    options_from,
    with_teacher,
)
from dapo.api.notebook import display_class
from dapo.api.python_errors import in_python, python_interface
from dapo.api.run import Run, translate_errors
from dapo.config.load import nested_options, require_set_once, without_repeats
from dapo.core.errors import ConfigError
from dapo.core.files import make_private_folder
from dapo.core.loading import add_code_folder
from dapo.core.terminal import print_text, warn
from dapo.runs.directory import RunDirectory, default_run_path, require_new_run
from dapo.runs.stored_config import CODE_FOLDER, DATA_FOLDER, trust_module_folders

if TYPE_CHECKING:
    from dapo.start.run import RunCallbacks
    from dapo.training.state import Run as TrainingRun

ARGUMENTS = {
    "data.train": "data",
    "data.eval": "eval_data",
    "data.demonstrations": "demonstrations",
}
"""The arguments whose rows are copied into the run directory, by option."""
OnStep: TypeAlias = Callable[[Run, dict[str, Any]], object]


class StepSink(Protocol):
    """A destination of metrics besides the run directory."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> object: ...


@python_interface
def train(
    model: str | Path | None = None,
    *,
    data: Data = None,
    reward: Reward = None,
    eval_data: Data = None,
    config: str | Path | Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
    sinks: Sequence[StepSink | str] = (),
    **options: Any,
) -> Run:
    """Train a model, as `dapo train` does, and return the run.

    Ctrl-C saves the state, stops the run and raises TrainingInterrupted, which has the run; a
    second one stops at once. Each call makes a new run directory.

    Args:
        model: an alias, a Hugging Face id or a model directory.
        data: rows (a list of dicts, a DataFrame, a datasets.Dataset), which are copied into the run
            directory, or a data source: a path, `hub:NAME`, `builtin:TASKS`, `gym:TASKS`, a
            mapping.
        reward: a verifier's name, `module:function`, or a function, which is copied into the run
            directory with its dependencies for `dapo resume`; a list of these, whose scores are
            added, or a mapping to weights. None: chosen by the data (`reward.verifier: auto`).
        eval_data: held-out problems, in the forms of `data`.
        config: a YAML file, the name of a shipped configuration (`quickstart`), or a mapping;
            `options` and the arguments above override it.
        run_dir: the directory to make; None: `runs/NAME-TIME`.
        on_step: a function or several, called as `on_step(run, metrics)` after each step. If one
            raises, the state is saved, the run ends, and the exception is raised here.
        sinks: objects with `write(step, metrics)`, and names of trackers: `tensorboard`, `wandb`,
            `trackio`.
        **options: option names. Leave out the section if the last part is unique
            (`prompts_per_step`, `group_size`, `lr`; `steps` is `train.num_steps`); write
            `**{"loss.clip_high": 0.3}` otherwise. `loss` may be a custom loss function (`dapo show
            docs losses`), `environment` a class and `tools` a list of functions (`dapo show docs
            environments`); they are copied into the run directory like a reward. `teacher`, a model
            or a run, sets `loss.reference.model`, `loss.kl_coef=1`, `loss.kl_estimator=full` and,
            without a `reward`, `reward.coef=0`: the policy learns the teacher's distribution on its
            own responses. `demonstrations`, rows or a data source with prompts and responses, sets
            `preset=sft`: the policy imitates them, without `data`. Unless set, the paper's
            `train.minibatch_groups`, `overlong.buffer_tokens` and `optim.warmup_steps` are scaled
            down to your sizes.

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
        set to fit: train.minibatch_groups=2, overlong.buffer_tokens=1, optim.warmup_steps=0
        writing to ...
        >>> len(run.metrics)
        2
    """
    base, arguments, title = load_base(config)
    path = Path(run_dir) if run_dir is not None else _new_path(title)
    sources = {"model.name": model and str(model), "data.train": data, "data.eval": eval_data}
    if (demonstrations := options.pop("demonstrations", None)) is not None:
        sources["data.demonstrations"] = demonstrations
        options = {"preset": "sft"} | options
    data_files = {
        "data.train": TRAIN_FILE,
        "data.eval": HELD_OUT_FILE,
        "data.demonstrations": DEMONSTRATIONS_FILE,
    }
    copies = {
        option: path / DATA_FOLDER / name
        for option, name in data_files.items()
        if option in sources
    }
    files = {
        name: file
        for name, file in copies.items()
        if not (sources[name] is None or is_source(sources[name]))
    }
    settings = {
        name: source for name, source in sources.items() if source is not None and name not in files
    }
    if names := [sink for sink in sinks if isinstance(sink, str)]:
        settings["log.sinks"] = names
    values, modules, folders = _read_options(settings, reward, options)
    require_new_run(path)
    values |= {name: str(file) for name, file in files.items()}
    built, scaled = build_scaled(base, values, where="dapo.train")
    from dapo.start.check import check
    from dapo.start.run import new_run, run_training

    if scaled:
        print_text(f"set to fit: {', '.join(as_overrides(scaled))}")
    overrides = as_overrides(values | scaled)
    if isinstance(config, Mapping):  # its options are arguments, too
        overrides = without_repeats([*arguments, *overrides])
        arguments = []
    command = ["dapo", "train", *arguments, *overrides, "--run-dir", str(path)]
    run = Run(path)
    with (
        translate_errors(run),
        _prepared(path, {file: sources[name] for name, file in files.items()}, modules) as prepared,
        row_errors({ARGUMENTS[name]: file for name, file in files.items()}),
        check(built) as checked,
        new_run(
            checked,
            path,
            command=command,
            prepared=prepared,
            module_folders=folders,
            set_to_fit=tuple(scaled),
        ) as ready,
    ):
        run_training(
            ready, _callbacks(run, on_step, [sink for sink in sinks if not isinstance(sink, str)])
        )
    return run


def _read_options(
    arguments: Mapping[str, Any], reward: Reward, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], list[WrittenModule], list[str]]:
    """Return a call's options by dotted names, the modules of its functions, and folders."""
    arguments = dict(arguments)
    writers = [reward_code := CodeWriter("reward")]
    if reward is not None:
        weights = weights_by_name(reward, reward_code.add)
        by_name = {reward_code.qualified(name): weight for name, weight in weights.items()}
        arguments["reward.verifier"] = verifier_option(by_name)
    loss = keywords.get("loss", "")
    if not isinstance(loss, str | Mapping) and not callable(loss):
        raise ConfigError(
            f"loss: expected a function, module:function or options of the loss, got {loss!r}"
        )
    keywords, option_writers = named_functions(
        with_teacher(keywords, has_reward=reward is not None)
    )
    writers += option_writers
    named_options = options_from(keywords)
    if twice := sorted(arguments.keys() & named_options.keys()):
        raise ConfigError(f"{twice[0]} is set twice in one call")
    both = options_from(arguments) | named_options
    require_set_once([(name, nested_options({name: value})) for name, value in both.items()])
    modules = [writer.module() for writer in writers if not writer.is_empty]
    return both, modules, sorted({folder for writer in writers for folder in writer.folders})


def _callbacks(
    run: Run, on_step: OnStep | Sequence[OnStep], sinks: Sequence[StepSink]
) -> "RunCallbacks":
    from dapo.start.run import RunCallbacks

    if wrong := [sink for sink in sinks if not hasattr(sink, "write")]:
        raise ConfigError(f"sinks: expected objects with write(step, metrics), got {wrong[0]!r}")
    calls = [on_step] if callable(on_step) else list(on_step)
    opened: list[TrainingRun] = []  # the last one trains

    def after_step(step: int, metrics: Mapping[str, float]) -> None:
        for sink in sinks:
            sink.write(step, metrics)
        # no evaluation before or after all steps
        if step and any(not name.startswith("eval/") for name in metrics):
            for call in calls:
                with run._training(opened[-1]):
                    call(run, {"step": step, **metrics})

    return RunCallbacks(
        warn=lambda text: warn(in_python(text)),
        open_display=display_class(),
        on_step=[after_step],
        on_open=opened.append,
        on_second_interrupt=signal.default_int_handler,
    )


@python_interface
def resume(
    path: str | Path | Run,
    *,
    reward: Reward = None,
    on_step: OnStep | Sequence[OnStep] = (),
    sinks: Sequence[StepSink] = (),
    trust: bool = False,
    **options: Any,
) -> Run:
    """Continue a run from its newest checkpoint, like `dapo resume`, and return it.

    `reward`, `on_step`, `sinks` (objects only) and `options`, of which `loss` may be a function,
    are as for `train`. What they change lasts: later calls keep it, and `run.state.changes` lists
    it with its step. `trust` also imports modules from the folders that the run's manifest.json
    names. Raises DapoError if the run cannot continue, or ends too early.
    """
    from dapo.start.run import Finished, continued_run, end_run, run_training

    run = path if isinstance(path, Run) else Run(path)
    RunDirectory.open(run.path)
    changed, modules, _ = _read_options({}, reward, options)
    if trust:
        trust_module_folders(run.path)
    with (
        translate_errors(run),
        _prepared(run.path, {}, modules),
        continued_run(run.path, as_overrides(changed)) as ready,
    ):
        if isinstance(ready, Finished):
            end_run(ready.config, ready.directory, warn=lambda text: warn(in_python(text)))
            print_text(in_python(ready.advice))
        else:
            run_training(ready, _callbacks(run, on_step, sinks))
    return run


@python_interface
def load(path: str | Path, *, trust: bool = False) -> Run:
    """Open the run in a directory, even while it trains; `trust` is that of `resume`.

    Raises CheckpointError if there is none.
    """
    RunDirectory.open(path)
    if trust:
        trust_module_folders(path)
    return Run(path)


@contextmanager
def _prepared(
    path: Path, rows: Mapping[Path, Data], modules: Sequence[WrittenModule]
) -> Iterator[list[str]]:
    """Write rows and code into a run directory; clean up if the run cannot start."""
    is_new = not path.exists()
    added = [
        file
        for module in modules
        if not (file := path / CODE_FOLDER / f"{module.name}.py").exists()
    ]
    names = [DATA_FOLDER] * bool(rows) + [CODE_FOLDER] * bool(modules)
    try:
        for file, data in rows.items():
            make_private_folder(file.parent)
            write_rows(file, data)
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


def _new_path(title: str) -> Path:
    first = default_run_path(title, datetime.now())
    candidates = (
        first.with_name(f"{first.name}-{number}") if number > 1 else first
        for number in range(1, 10_000)
    )
    return next(path for path in candidates if not path.exists())
