"""`dapo train`, `resume`, `fork` and `export`; `start/` does the work.

What imports torch is imported when a run is checked, so that wrong options are refused at once.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import Config
from dapo.config.options import STAGES
from dapo.config.run_options import MAX_RESTARTS
from dapo.config.stages import Stage
from dapo.core.errors import CheckpointError, ConfigError, DataError, RewardError
from dapo.core.model_files import DtypeName
from dapo.core.terminal import print_json, print_text, stdout_to_stderr, warn
from dapo.core.text import plural
from dapo.data.sources.rows import prompt_text
from dapo.evaluation.pairing import require_pairable
from dapo.runs.checkpoints import has_weights_only, step_of
from dapo.runs.console import SafeConsole, final_report
from dapo.runs.directory import ENDED, RunDirectory, default_run_path, require_new_run
from dapo.runs.evaluations import first_and_last_evaluation
from dapo.runs.manifest import Fork
from dapo.runs.stages import StagesFolder, has_stages, stages_around
from dapo.runs.stored_config import load_run_config, stage_config, with_start_folder
from dapo.start.check import check, read_data
from dapo.start.fork import require_same_preset
from dapo.start.rows import RunData

if TYPE_CHECKING:
    from dapo.start.export import Exported
    from dapo.start.resume import Ended

MAX_COMMAND_CHARS = 300  # of a command that is proposed; the card has a longer one
SHOWN_SAMPLES = 3  # problems whose responses before and after training the final report shows


def start_run(
    config: Config,
    *,
    run_dir: Path | None,
    config_name: str,
    max_restarts: int = MAX_RESTARTS,
    is_last: bool = True,
) -> None:
    """Train in `run_dir`, or in a new folder of `runs` named by `config_name` and time.

    Args:
        config: the configuration.
        run_dir: the directory to make; None: a new one in `runs`.
        config_name: the name of the configuration, for a directory without `run_dir`.
        max_restarts: how often a run that lost a trainer rank returns to its last checkpoint.
        is_last: no other stage follows.
    """
    path = run_dir or default_run_path(config_name, datetime.now())
    require_new_run(path)
    with check(config) as checked:
        data = read_data(checked)
        if sys.stdout.isatty():  # imports and loading take a while and print nothing
            print_text(
                f"the verifier and {config.data.train_source.label} are ready; loading"
                f" {config.model.name} ..."
            )
        from dapo.start.run import RunCallbacks, new_run, run_training

        with new_run(checked, data, path, command=sys.argv) as ready:
            run_training(ready, RunCallbacks(warn), max_restarts=max_restarts)
    report(ready.config, ready.directory, is_last=is_last)


def start_stages(stages: Mapping[str, Stage], *, run_dir: Path) -> None:
    """Train one stage after the other, each in a folder of its name in `run_dir`.

    Raises DapoError before the first one begins if the options or data of any are wrong.
    """
    # one of which no stage has begun is begun anew, as after an error while the model was loaded
    if not has_stages(run_dir) or StagesFolder.open(run_dir).begun_paths:
        require_new_run(run_dir)
    for note in check_stages(stages):
        print_text(note)
    folder = StagesFolder.create(run_dir, stages)
    with _continuation_of(folder):
        _train_stages(folder)


def check_stages(stages: Mapping[str, Stage], *, starts: bool = True) -> list[str]:
    """Check the options and read the data of all stages; `starts` is that of `check`.

    Returns what an evaluation must not count: held-out problems that an earlier stage trains on.
    Raises DapoError for the first stage with a fault.
    """
    data = dict[str, RunData]()
    for name, stage in stages.items():
        is_later_stage = stage.takes_model_from is not None
        elsewhere = stage.config.uses_ray and not starts
        with (
            errors_of_stage(name),
            check(
                stage.config, has_run=is_later_stage, starts=starts, elsewhere=elsewhere
            ) as checked,
        ):
            data[name] = read_data(checked)
            stage.config.with_steps_of_epochs(len(data[name].train))
    if starts:
        _require_lengths(stages, data)
    notes = []
    for name, stage in stages.items():
        held_out = {prompt_text(problem.prompt) for problem in data[name].held_out}
        earlier = stage.takes_model_from
        while earlier is not None:
            trained = [prompt_text(problem.prompt) for problem in data[earlier].train]
            count = sum(text in held_out for text in trained)
            if count:
                notes.append(
                    f"warning: stage {earlier} trains on {plural(count, 'problem')} that stage"
                    f" {name} holds out, and its evaluations count them; with data.eval beside"
                    " `stages`, each stage leaves them out"
                )
            earlier = stages[earlier].takes_model_from
    return notes


def _require_lengths(stages: Mapping[str, Stage], data: Mapping[str, RunData]) -> None:
    """Raise DapoError if rows do not fit the tokenizer of a stage, as the stage would later."""
    from dapo.analysis.check.lengths import describe_lengths
    from dapo.analysis.check.summary import DataFacts

    for name, stage in stages.items():
        sources = [DataFacts("train", name, data[name].train)]
        if data[name].held_out:
            sources.append(DataFacts("eval", name, data[name].held_out))
        with errors_of_stage(name):
            list(describe_lengths(stage.config, sources))


@contextmanager
def errors_of_stage(name: str) -> Iterator[None]:
    """Add the name of the stage to the block's errors."""
    try:
        yield
    except (ConfigError, DataError, RewardError) as error:
        raise type(error)(f"stage {name}: {error}") from None


@contextmanager
def _continuation_of(folder: StagesFolder) -> Iterator[None]:
    """Say how to continue after Ctrl-C outside of a run, which says it itself."""
    try:
        yield
    except KeyboardInterrupt:
        print_text(f"stopped; continue with: dapo resume {shlex.quote(str(folder.path))}")
        raise


def _train_stages(
    folder: StagesFolder, overrides: Sequence[str] = (), *, named: str | None = None
) -> None:
    """Train the stages that have not ended; `overrides` change the options of the first of them.

    Raises ConfigError if that is not the stage that is `named`, and there are overrides.
    """
    names = list(folder.stages)
    folder, overrides = change_later_stages(folder, overrides, named)
    for number, name in enumerate(names, start=1):
        is_last = number == len(names)
        path = folder.run_path(name)
        is_begun = RunDirectory.is_run(path)
        begun_later = [
            other for other in names[number:] if RunDirectory.is_run(folder.run_path(other))
        ]
        if not is_begun and begun_later:
            print_text(
                f"stage {number} of {len(names)}, {name}, is not in {folder.path}; it is not"
                f" trained again, as {begun_later[0]} has begun"
            )
            continue
        has_ended = is_begun and RunDirectory(path).exit_reason() in ENDED
        if has_ended and not is_last:
            print_text(f"stage {number} of {len(names)}, {name}, has ended: {path}")
            _complete(path)
            continue
        print_text(f"stage {number} of {len(names)}: {name}")
        changes = _changes_of(name, overrides, folder, named)
        if is_begun:
            _resume_one(path, changes, is_last=is_last)
        else:
            config = stage_config(folder, name, changes)
            require_same_preset(folder.stages[name].config, config, "a stage")
            start_run(config, run_dir=path, config_name=name, is_last=is_last)
        overrides = ()
        # stopped by a callback, for example: the next stage would train a model that is not ready
        if RunDirectory(path).exit_reason() not in ENDED:
            return


def change_later_stages(
    folder: StagesFolder, overrides: Sequence[str], named: str | None
) -> tuple[StagesFolder, list[str]]:
    """Write overrides of stages that have not begun into the folder; return the others.

    They are `stages.NAME.OPTION=VALUE`, or without the prefix where the folder of such a stage is
    `named`.
    """
    names = list(folder.stages)
    begun = [name for name in names if RunDirectory.is_run(folder.run_path(name))]
    waiting = names[names.index(begun[-1]) + 1 :] if begun else names
    # of a stage that begins now they are options of its start
    begins_now = not begun or RunDirectory(folder.run_path(begun[-1])).exit_reason() in ENDED
    later = waiting[1:] if begins_now else waiting
    rest = []
    changes: dict[str, list[str]] = {}
    for item in overrides:
        name = next((name for name in later if item.startswith(f"{STAGES}.{name}.")), None)
        if name is None and named in later and not item.startswith(f"{STAGES}."):
            name = named
        if name is None:
            rest.append(item)
        else:
            changes.setdefault(name, []).append(item.removeprefix(f"{STAGES}.{name}."))
    for name, items in changes.items():
        folder = folder.changed(name, items)
        print_text(f"stage {name} will begin with {' '.join(items)}")
    return folder, rest


def _complete(path: Path) -> None:
    """Write what a kill has kept from a stage that has ended: its curves, smaller checkpoints."""
    if RunDirectory(path).checkpoints.newest_step() is None:  # `dapo clean` has removed them
        return
    from dapo.start.resume import Ended, checked_run

    with checked_run(path, []) as run:
        if isinstance(run, Ended):
            _end(run)


def _end(run: "Ended") -> None:
    if run.is_complete:
        return
    from dapo.start.run import end_run

    end_run(run.config, run.directory, warn=warn)


def _changes_of(
    name: str, overrides: Sequence[str], folder: StagesFolder, named: str | None
) -> list[str]:
    """Return the overrides of the stage that continues. Raises ConfigError for those of another."""
    if overrides and named not in (None, name):
        command = shlex.join(["dapo", "resume", str(folder.run_path(name)), *overrides])
        raise ConfigError(
            f"stage {name} continues, and {folder.run_path(str(named))} was named: options change"
            f" the stage that continues; for {name} it is {command}"
        )
    prefix = f"{STAGES}.{name}."
    changes = [item.removeprefix(prefix) for item in overrides]
    for item in changes:
        if item.startswith(f"{STAGES}."):
            raise ConfigError(
                f"{item}: dapo resume changes the options of the stage that continues, here {name}"
            )
    return changes


def resume_run(path: Path, overrides: Sequence[str]) -> None:
    """`dapo resume`: continue from the newest complete checkpoint, with the options of the run."""
    stages = stages_around(path)
    if stages is not None:
        named = None if has_stages(path) else path.resolve().name
        with _continuation_of(stages):
            _train_stages(stages, overrides, named=named)
        return
    _resume_one(path, overrides)


def _resume_one(path: Path, overrides: Sequence[str], *, is_last: bool = True) -> None:
    from dapo.start.resume import Ended, checked_run

    with checked_run(path, overrides) as run:
        if isinstance(run, Ended):
            _end(run)
            print_text(run.advice)
            return
        from dapo.start.run import RunCallbacks, ready_to_continue, run_training

        ready = ready_to_continue(run)
        run_training(ready, RunCallbacks(warn))
    report(ready.config, ready.directory, is_last=is_last)


def report(config: Config, directory: RunDirectory, *, is_last: bool = True) -> None:
    """Print the end of a run: accuracy and responses before and after, and what comes next.

    That is the next stage unless it `is_last`.
    """
    evaluations = first_and_last_evaluation(directory, warn)
    final_report(
        SafeConsole(),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        samples=compared_responses(evaluations, SHOWN_SAMPLES),
        files=_next_commands(config, directory) if is_last else {},
        difference=_difference_of(evaluations),
    )


def _difference_of(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return how two evaluations differ in more than the model, as in a fork with other data."""
    if len(evaluations) < 2:
        return ""
    try:
        require_pairable(*evaluations)
    except DataError as error:
        return str(error)
    return ""


def _next_commands(config: Config, directory: RunDirectory) -> dict[str, str]:
    """Return the next commands by what they do; the last one only for a run that can go on."""
    run = shlex.quote(str(directory.path))
    commands = {
        "look at it": f"dapo view {run}",
        "talk to it": f"dapo chat {run}",
        "export it": f"dapo export {run} my-model",
    }
    newest = directory.checkpoints.latest(warn=warn)
    is_resumable = newest is not None and not has_weights_only(newest)
    # more steps do not help a run that is solved, or whose tokens are spent
    is_at_last_step = directory.exit_reason() == "finished" and config.train.token_budget is None
    if is_resumable and is_at_last_step:
        more = 2 * config.train.num_steps
        commands["train it further"] = f"dapo resume {run} train.num_steps={more}"
    return commands


def compared_responses(evaluations: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Pair responses before and after training, one of each source first."""
    if len(evaluations) < 2:
        return []
    first = evaluations[0]["table"]
    last = evaluations[-1]["table"]
    by_source: dict[str, list[int]] = {}
    for i, (row, counterpart) in enumerate(zip(first, last, strict=False)):
        if row["id"] != counterpart["id"]:  # one of the files is of other problems
            continue
        by_source.setdefault(row["source"], []).append(i)
    picked = [row for rank in zip_longest(*by_source.values()) for row in rank if row is not None][
        :count
    ]
    pairs = [(first[i], first[i]["responses"][0], last[i]["responses"][0]) for i in picked]
    return [
        {"question": problem["question"], "answer": problem["answer"]}
        | {"before": old["text"], "before_correct": old.get("correct")}
        | {"after": new["text"], "after_correct": new.get("correct")}
        for problem, old, new in pairs
    ]


def export_run(
    path: Path,
    out_dir: Path,
    *,
    step: int | None,
    adapter: bool = False,
    push: str | None = None,
    private: bool = False,
    dtype: DtypeName = "auto",
) -> dict[str, Any]:
    """Write a checkpoint as a Hugging Face model directory, and say what comes next.

    Args:
        path: the run.
        out_dir: the directory to make.
        step: the step of the checkpoint; None: the newest one.
        adapter: write only the adapter, in peft's format.
        push: the repository on the hub to which it is uploaded; None: none.
        private: make that repository private.
        dtype: the type of the weights; `auto`: that of the run.

    Returns JSON values: model, run, step, base, whether it is an adapter, and the address.
    """
    from dapo.start.export import export_model_of

    exported = export_model_of(
        path,
        out_dir,
        step=step,
        warn=warn,
        adapter=adapter,
        push=push,
        private=private,
        dtype=dtype,
    )
    kind = "adapter of " if adapter else ""
    print_text(
        f"{out_dir}: {kind}{exported.config.model.name} after {exported.step} steps, with a model"
        " card (README.md)"
    )
    if exported.address is not None:
        print_text(f"published: {exported.address}")
    print_text()
    commands = _commands_of_export(out_dir, exported)
    for label, command in commands.items():
        print_text(f"{label:{max(map(len, commands))}}  {command}")
    return {
        "model": str(out_dir),
        "run": str(path),
        "step": exported.step,
        "base": exported.config.model.name,
        "adapter": adapter,
        "address": exported.address,
    }


def _commands_of_export(out_dir: Path, exported: "Exported") -> dict[str, str]:
    """Return the next commands by what they do."""
    folder = shlex.quote(str(out_dir))
    card = shlex.quote(str(out_dir / "README.md"))
    commands = {"load it": f"the lines are in {card}"}
    if not exported.is_adapter:
        commands = {"talk to it": f"dapo chat {folder}"}
        evaluation = shlex.join(exported.evaluation or ())
        if len(evaluation) > MAX_COMMAND_CHARS or not evaluation:
            evaluation = f"the command is in {card}"
        commands["evaluate it"] = evaluation
    if exported.address is None:
        commands["publish it"] = f"hf upload {shlex.quote(out_dir.absolute().name)} {folder} ."
    return commands


def fork_run(
    path: Path,
    *,
    step: int | None,
    overrides: Sequence[str],
    times: int | None,
    run_dir: Path | None,
    trains: bool,
    as_json: bool,
) -> None:
    """Train one fork with the parent's seed, or `times` branches with seeds of their own.

    `dapo resume` continues a fork that is stopped.

    Args:
        path: the parent, a run.
        step: the step of the checkpoint that the forks start from; None: the newest one.
        overrides: options that differ from the parent's, `key=value`.
        times: the number of branches; None: one fork with the parent's seed.
        run_dir: the directory of the fork; None: one next to the parent.
        trains: train the forks; False: only make them.
        as_json: print JSON, and all other lines to stderr.
    """
    from dapo.start.fork import create_fork, default_fork_path, plan_fork

    parent = RunDirectory.open(path)
    if step is None:
        newest = parent.checkpoints.latest(warn=warn)
        if newest is None:
            raise CheckpointError(f"{path} has no checkpoint to fork yet")
        step = step_of(newest)
        with stdout_to_stderr(as_json):
            print_text(f"the newest checkpoint of {path} is that of step {step} (--step chooses)")
    base = run_dir or default_fork_path(parent, step, datetime.now())
    branches: dict[Path, int | None] = {base: None}
    if times is not None:
        branches = {base.with_name(f"{base.name}-{i + 1}"): i + 1 for i in range(times)}
    plans = {
        target: plan_fork(parent, step, overrides, branch=branch)
        for target, branch in branches.items()
    }
    for target in plans:
        require_new_run(target)
    first = next(iter(plans.values()))
    with stdout_to_stderr(as_json):
        with (
            with_start_folder(parent),
            check(load_run_config(parent, overrides), elsewhere=not trains),
        ):
            forks = [create_fork(plan, target, sys.argv) for target, plan in plans.items()]
        for fork, plan in zip(forks, plans.values(), strict=True):
            print_text(f"{fork.path} begins with {plan.fork.describe()}")
        for note in first.notes:
            print_text(note)
        for number, fork in enumerate(forks if trains else (), start=1):
            if len(forks) > 1:
                print_text(f"\nbranch {number} of {len(forks)}: {fork.path}")
            resume_run(fork.path, [])
    if as_json:
        print_json(
            {
                "parent": first.fork.parent,
                "step": step,
                "forks": [_fork_json(fork) for fork in forks],
            }
        )
    elif not trains:
        print_text(
            "train it with:"
            f" {'; '.join(f'dapo resume {shlex.quote(str(fork.path))}' for fork in forks)}"
        )


def _fork_json(run: RunDirectory) -> dict[str, Any]:
    fork = Fork.of(run)
    assert fork is not None
    changed = {name: {"parent": old, "fork": new} for name, (old, new) in fork.changed.items()}
    return {
        "run": str(run.path),
        "branch": fork.branch,
        "changed": changed,
        "exit_reason": run.exit_reason(),
    }
