"""`dapo fork`: a new run, or several branches, from a checkpoint of another run."""

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dapo.core.terminal import print_json, print_text, stdout_to_stderr
from dapo.runs.directory import RunDirectory, require_new_run
from dapo.runs.manifest import Fork
from dapo.runs.stored_config import load_run_config
from dapo.training.fork import ForkPlan, create_fork, default_fork_path, plan_fork
from dapo.training.preflight import open_judge


def fork_run(
    path: Path,
    *,
    step: int,
    overrides: Sequence[str],
    times: int | None,
    run_dir: Path | None,
    trains: bool,
    as_json: bool,
) -> None:
    """Make the forks, and train them one after another; a fork that is stopped goes on with `dapo resume`.

    Args:
        path: The run directory of the parent.
        step: The step of one of its checkpoints.
        overrides: Options to change, as `key=value`.
        times: Make so many branches, each with a seed of its own; None: one fork with the parent's seed.
        run_dir: The directory to make, `-1`, `-2` ... behind its name for branches; None: one beside the parent.
        trains: Train them at once.
        as_json: Print one JSON object, and everything else on the standard error.
    """
    parent = RunDirectory.open(path)
    base = run_dir or default_fork_path(parent, step, datetime.now())
    numbers = [None] if times is None else list(range(1, times + 1))
    plans = {
        base if number is None else base.with_name(f"{base.name}-{number}"): plan_fork(
            parent, step, overrides, branch=number
        )
        for number in numbers
    }
    for target in plans:
        require_new_run(target)
    first = next(iter(plans.values()))
    with stdout_to_stderr(as_json):
        with open_judge(load_run_config(parent, overrides), elsewhere=not trains):  # an option may be wrong
            forks = [_create(plan, target) for target, plan in plans.items()]
        for note in first.notes:
            print_text(note)
        if trains:
            _train(forks)
    if as_json:
        print_json({"parent": first.fork.parent, "step": step, "forks": [_report(fork) for fork in forks]})
    elif not trains:
        print_text(f"train it with: {'; '.join(f'dapo resume {shlex.quote(str(fork.path))}' for fork in forks)}")


def _create(plan: ForkPlan, path: Path) -> RunDirectory:
    fork = create_fork(plan, path, sys.argv)
    print_text(f"{path} begins with {plan.fork.describe()}")
    return fork


def _train(forks: Sequence[RunDirectory]) -> None:
    from dapo.cli.train import resume_run

    for number, fork in enumerate(forks, start=1):
        if len(forks) > 1:
            print_text(f"\nbranch {number} of {len(forks)}: {fork.path}")
        resume_run(fork.path, [])


def _report(run: RunDirectory) -> dict[str, Any]:
    fork = Fork.of(run)
    assert fork is not None
    changed = {name: {"parent": old, "fork": new} for name, (old, new) in fork.changed.items()}
    return {"run": str(run.path), "branch": fork.branch, "changed": changed, "exit_reason": run.exit_reason()}
