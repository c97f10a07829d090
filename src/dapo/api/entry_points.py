"""`dapo.train`, `dapo.resume` and `dapo.load`: runs from a script or a notebook."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.api.callbacks import OnStep, StepSink, translate_errors
from dapo.api.code_writer import CodeWriter, WrittenModule
from dapo.api.in_memory_data import HELD_OUT_FILE, TRAIN_FILE, Data, is_source, write_rows
from dapo.api.keywords import as_overrides, nested, options_from, sized_to_fit
from dapo.api.rewards import Reward, verifier_of, weighted_rewards
from dapo.config import Config, build_config
from dapo.config.load import merge_options, read_options
from dapo.config.shipped import find_config
from dapo.core.errors import ConfigError, RewardError
from dapo.core.terminal import print_text
from dapo.runs.directory import RunDirectory, default_run_path, require_new_run
from dapo.runs.stored_config import CODE_FOLDER, DATA_FOLDER

if TYPE_CHECKING:
    from dapo.api.run import Run


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
) -> "Run":
    """Train a model, as `dapo train` does, and return the run.

    Ctrl-C stops the run with its state saved and raises TrainingInterrupted, which has the run; a second one stops at
    once. Calling it again makes a new run directory.

    Args:
        model: an alias, a Hugging Face id or a model directory.
        data: rows (a list of dicts, a DataFrame, a datasets.Dataset), which are written into the run directory, or a
            data source: a path, `hub:NAME`, `builtin:TASKS`, `gym:TASKS`, a mapping.
        reward: a verifier's name, `module:function`, or a function, which is written into the run directory with what
            it uses, so that `dapo resume` finds it in another process; a list of them, of which the scores are added,
            or a mapping of them to weights. None: what suits the data (`reward.verifier: auto`).
        eval_data: held-out problems, as `data`.
        config: a YAML file, the name of a shipped configuration (`quickstart`), or a mapping; `options` and the
            arguments above are laid over it.
        run_dir: the directory to write; None: one in `runs`, with the time in its name.
        on_step: called as `on_step(run, metrics)` after each step, one function or several. Where one raises, the run
            ends with its state saved, and the exception reaches the caller.
        sinks: objects with `write(step, metrics)`, and names of trackers: `tensorboard`, `wandb`, `trackio`.
        **options: options by their names in the configuration without the section where only one ends so
            (`prompts_per_step`, `group_size`, `lr`; `steps` is `train.num_steps`), by whole names otherwise:
            `**{"loss.clip_high": 0.3}`. `loss` may be a loss of one's own (docs/losses.md), written into the run
            directory as a reward is. Those that are sized for the paper's run and that a smaller one cannot have
            (`train.minibatch_groups`, `overlong.buffer_tokens`, `optim.warmup_steps`) follow the others unless set.

    Returns:
        The run, with its curves, rollouts and evaluations.

    Raises:
        ConfigError: an option is unknown, ambiguous or impossible.
        DataError: the rows cannot be read.
        RewardError: a reward does not exist, or uses what cannot be written.
        DapoError: the run has ended before its last step; its state is saved.

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
    request = _Request(model, data, reward, eval_data, config, options, sinks)
    path = Path(run_dir) if run_dir is not None else _new_path(request.title)
    require_new_run(path)
    return request.start(path, on_step)


class _Request:
    """The arguments of one call of `train`, settled as far as they can be before anything is written."""

    def __init__(
        self,
        model: str | Path | None,
        data: Data,
        reward: Reward,
        eval_data: Data,
        config: str | Path | Mapping[str, Any] | None,
        options: Mapping[str, Any],
        sinks: Sequence[StepSink | str],
    ) -> None:
        self._base, self._arguments, self.title = base_of(config)
        self._rows = {
            name: rows
            for name, rows in (("data.train", data), ("data.eval", eval_data))
            if rows is not None and not is_source(rows)
        }
        given: dict[str, Any] = {"model.name": None if model is None else str(model)}
        given |= {"data.train": data, "data.eval": eval_data}
        given = {name: value for name, value in given.items() if value is not None and name not in self._rows}
        self._sinks = [sink for sink in sinks if not isinstance(sink, str)]
        if names := [sink for sink in sinks if isinstance(sink, str)]:
            given["log.sinks"] = names
        writers: tuple[CodeWriter, ...]
        writers = code, loss_code = CodeWriter("reward"), CodeWriter("loss")
        if reward is not None:
            given |= _reward_options(reward, code)
        if "loss" in options:
            given |= _loss_options(options["loss"], loss_code)
        rest = {name: value for name, value in options.items() if name != "loss"}
        for name in [name for name, value in rest.items() if callable(value)]:
            writers = (*writers, writer := CodeWriter(name.rpartition(".")[2]))
            rest[name] = _whole(writer.add(rest[name]), writer)
        keywords = options_from(rest)
        if twice := sorted(given.keys() & keywords.keys()):
            raise ConfigError(f"{twice[0]} is set twice in one call")
        self._options = options_from(given) | keywords
        self._modules = [writer.module() for writer in writers if not writer.is_empty]
        self.folders = sorted({folder for writer in writers for folder in writer.folders})

    def start(self, path: Path, on_step: OnStep | Sequence[OnStep]) -> "Run":
        """Write what the run needs into its directory, and train."""
        files = {
            name: path / DATA_FOLDER / (TRAIN_FILE if name == "data.train" else HELD_OUT_FILE) for name in self._rows
        }
        options = self._options | {name: str(file) for name, file in files.items()}
        raw = laid_over(self._base, options)
        fitting = sized_to_fit(raw)
        options |= fitting
        built = build_config(laid_over(raw, fitting), where="dapo.train")
        from dapo.api.lifecycle.execute import new_run, run_training
        from dapo.api.run import Run

        if fitting:
            print_text(f"set to fit: {', '.join(as_overrides(fitting))}")
        command = ["dapo", "train", *self._arguments, *as_overrides(options), "--run-dir", str(path)]
        run = Run(path)
        with (
            _prepared(path, self._rows, files, self._modules) as names,
            new_run(built, path, command=command, prepared=names, module_folders=self.folders) as ready,
            translate_errors(run),
        ):
            run_training(ready, run.frontend(on_step, self._sinks))
        return run


def resume(
    path: "str | Path | Run",
    *,
    on_step: OnStep | Sequence[OnStep] = (),
    sinks: Sequence[StepSink] = (),
    **options: Any,
) -> "Run":
    """Go on with a run from its newest checkpoint, as `dapo resume` does, and return it.

    Args:
        path: the run directory, or the run.
        on_step: as for `train`.
        sinks: as for `train`, objects only.
        **options: options that are to be others from here on, named as for `train`: `steps=40`.

    Returns:
        The run.

    Raises:
        DapoError: the run cannot go on, or has ended before its last step.
    """
    from dapo.api.lifecycle.execute import Finished, continued_run, run_training
    from dapo.api.run import Run

    run = path if isinstance(path, Run) else Run(path)
    with continued_run(run.path, as_overrides(options_from(options))) as ready:
        if not isinstance(ready, Finished):
            with translate_errors(run):
                run_training(ready, run.frontend(on_step, sinks))
    return run


def load(path: str | Path) -> "Run":
    """Open a run: one that has finished, was stopped, or is running in another process.

    Args:
        path: the run directory.

    Raises:
        CheckpointError: there is no run.
    """
    from dapo.api.run import Run

    RunDirectory.open(path)
    return Run(path)


@contextmanager
def _prepared(
    path: Path, rows: Mapping[str, Data], files: Mapping[str, Path], modules: Sequence[WrittenModule]
) -> Iterator[list[str]]:
    """Write rows and code into the directory of a run; they are removed again if no run comes of it."""
    is_new = not path.exists()
    names = [DATA_FOLDER] * bool(rows) + [CODE_FOLDER] * bool(modules)
    try:
        for name, file in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_rows(file, rows[name])
        for module in modules:
            module.write(path / CODE_FOLDER)
        if modules:
            sys.path.append(str((path / CODE_FOLDER).absolute()))
        yield names
    except BaseException:
        if not RunDirectory(path).config.exists():
            for name in names:
                shutil.rmtree(path / name, ignore_errors=True)
            if is_new and path.is_dir() and not os.listdir(path):
                path.rmdir()
        raise


def base_of(config: str | Path | Mapping[str, Any] | None) -> tuple[Mapping[str, Any], list[str], str]:
    """The options of a configuration, the arguments that name it on the command line, and a name for its runs."""
    if config is None:
        return {}, [], "run"
    if isinstance(config, Mapping):
        return config, as_overrides(_flat(config)), "run"
    found = find_config(config)
    return read_options(found), [str(config)], found.stem


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration as options by dotted names; data sources and options of verifiers stay whole."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        is_section = isinstance(value, Mapping) and name in Config.model_fields and not prefix
        found |= _flat(value, f"{name}.") if is_section else {f"{prefix}{name}": value}
    return found


def laid_over(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with options by dotted names laid over it."""
    return merge_options(base, nested(options))


def _reward_options(reward: Reward, code: CodeWriter) -> dict[str, Any]:
    """`reward.verifier` for what a caller hands over; functions are added to `code`."""
    names: dict[str, float] = {}
    for each, weight in weighted_rewards(reward):
        name = each if isinstance(each, str) else code.add(each)
        if name in names:
            raise RewardError(f"reward: {name.removeprefix(':')} is there twice; give it once, with a weight")
        names[name] = weight
    return {"reward.verifier": verifier_of({_whole(name, code): weight for name, weight in names.items()})}


def _loss_options(loss: Any, code: CodeWriter) -> dict[str, Any]:
    """`loss.function` for what a caller hands over, or options of the section; a function is added to `code`."""
    if isinstance(loss, Mapping):
        return {f"loss.{name}": value for name, value in loss.items()}
    if not isinstance(loss, str) and not callable(loss):
        raise ConfigError(f"loss: expected a function, module:function or options of the loss, got {loss!r}")
    return {"loss.function": loss if isinstance(loss, str) else _whole(code.add(loss), code)}


def _whole(name: str, code: CodeWriter) -> str:
    """`module:function` of what `CodeWriter.add` has returned."""
    return f"{code.module().name}{name}" if name.startswith(":") else name


def _new_path(title: str) -> Path:
    """A directory in `runs` that does not exist: a cell that is run again makes a new run."""
    first = default_run_path(title, datetime.now())
    candidates = (first.with_name(f"{first.name}-{number}") if number > 1 else first for number in range(1, 10_000))
    return next(path for path in candidates if not path.exists())
