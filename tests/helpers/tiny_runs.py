"""Whole runs of the tiny model for tests, and what of them must not depend on the machine or the
moment.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo.config import Config, dump_config, load_config
from dapo.config.load import resolve_auto_verifier
from dapo.environments.pool import EnvironmentPool
from dapo.rewards.combine import InlineJudge
from dapo.rewards.pool import VerifierPool
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.start.build import build
from dapo.start.check import Checked, check, load_functions, read_data
from dapo.start.read import Inputs, read
from dapo.start.resolve import resolve
from dapo.training.state import Run
from helpers.paths import CONFIGS

# dynamic sampling with excess, aborted groups and short batches, several updates a step, an epoch
# of eleven problems, evaluations between
EVENTFUL = (
    "train.minibatch_groups=1",
    "train.eval_every=3",
    "data.train={builtin: {sums: {}}, size: 11, seed: 1}",
    "rollout.native.slots=8",
    "rollout.max_response_tokens=6",
    "overlong.buffer_tokens=2",
    "rollout.prompts_per_step=5",
    "dynamic_sampling.max_groups_per_step=7",
    "optim.lr=0.0005",
)


@contextmanager
def new_run(config: Config, path: Path) -> Iterator[Run]:
    """A new run in `path`, parts of which a test may replace before it trains."""
    with check(config) as checked:
        inputs = read(resolve(checked), read_data(checked))
        directory = RunDirectory.create(path, dump_config(inputs.config), {})
        display = ProgressDisplay(config.train.num_steps)
        with directory.lock(), build(inputs, directory, display, first_step=1) as run:
            try:
                yield run
            finally:
                run.tracker.close()


def inputs_of(
    config: Config, audit: VerifierPool | None = None, environment: EnvironmentPool | None = None
) -> Inputs:
    """The inputs of a run whose verifiers judge in this process."""
    config = resolve_auto_verifier(config)
    reward = config.reward
    judge = InlineJudge(reward.verifier, options=reward.options, threshold=reward.threshold)
    code = replace(load_functions(config), judge=judge, audit=audit, environment=environment)
    checked = Checked(config, code)
    return read(resolve(checked), read_data(checked))


def tiny(*overrides: str) -> Config:
    return load_config(CONFIGS / "tiny.yaml", ["train.threads=1", *overrides])


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    ]


def logged_names(run: Path) -> set[str]:
    """Every name in the metrics of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row} - {"step"}


def contents(run: Path, *, checkpoints: str = "*") -> dict[str, Any]:
    """Metrics, rollouts, evaluations, and the checkpoints whose name matches; with all of them, the
    history too.
    """
    files = {
        path.relative_to(run).as_posix(): path.read_bytes()
        for pattern in (
            "rollouts/*",
            "eval/*",
            f"checkpoints/{checkpoints}/*",
            f"checkpoints/{checkpoints}/critic/*",
            *(["problems.parquet"] if checkpoints == "*" else []),
        )
        for path in run.glob(pattern)
        # the wall time of a run stands in its state, and so in the checkpoint's list of checksums;
        # its options may name another way to the same bytes
        if path.is_file() and path.name not in ("state.json", "manifest.json", "provenance.json")
    }
    states = {
        path.parent.name: json.loads(path.read_text())
        for path in run.glob(f"checkpoints/{checkpoints}/state.json")
    }
    for state in states.values():
        state["train_state"].pop("wall_s")
    return {"files": files, "states": states, "metrics": metrics(run)}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not equal, by name: two runs printed side by side would fill screens."""
    names = [
        (kind, name)
        for kind in ("files", "states")
        for name in sorted(found[kind].keys() | expected[kind].keys())
    ]
    differing = [name for kind, name in names if found[kind].get(name) != expected[kind].get(name)]
    if found["metrics"] != expected["metrics"]:
        differing.append("metrics.jsonl")
    return differing


def saved_steps(run: Path) -> list[str]:
    """The names of a run's checkpoints, and whatever else lies there."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())
