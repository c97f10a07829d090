"""`dapo train`, `dapo resume` and `dapo export`: what they print; what they do is in `api/lifecycle/execute.py`."""

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dapo.api.lifecycle.execute import (
    MAX_RESTARTS,
    Finished,
    Frontend,
    continued_run,
    draw_curves,
    export_model_of,
    new_run,
    run_training,
)
from dapo.config import Config
from dapo.core.terminal import print_text, warn
from dapo.rewards.workers.pool import VerifierPool
from dapo.runs.console import SafeConsole, final_report
from dapo.runs.directory import RunDirectory, default_run_path
from dapo.runs.evaluations import first_and_last_evaluation

SHOWN_SAMPLES = 3  # responses that the final report shows from before and after training


def start_run(
    config: Config,
    *,
    run_dir: Path | None,
    config_name: str,
    max_restarts: int = MAX_RESTARTS,
    judge: VerifierPool | None = None,
) -> None:
    """`dapo train`.

    Args:
        config: the options of the run.
        run_dir: the directory to make; None: one in `runs` with name and time.
        config_name: the name for it.
        max_restarts: times that the run goes back to its last checkpoint by itself when a trainer rank is lost.
        judge: of `open_judge` for this configuration and directory; None: it is opened here.
    """
    path = run_dir or default_run_path(config_name, datetime.now())
    with new_run(config, path, command=sys.argv, judge=judge) as ready:
        run_training(ready, Frontend(warn), max_restarts=max_restarts)
    report(ready.config, ready.directory)


def resume_run(path: Path, overrides: Sequence[str]) -> None:
    """`dapo resume`: continue from the newest complete checkpoint, with the options of the run."""
    with continued_run(path, overrides) as run:
        if isinstance(run, Finished):
            draw_curves(run.config, run.directory, warn=warn)
        else:
            run_training(run, Frontend(warn))
    report(run.config, run.directory)
    if isinstance(run, Finished):
        train = run.config.train
        at, more = f"{run.step} of {train.num_steps}", f"train.num_steps={2 * run.step}"
        if run.step < train.num_steps:  # it ended by its tokens
            at, more = f"{at}, with train.token_budget spent", f"train.token_budget={2 * (train.token_budget or 0)}"
        print_text(f"\nalready at step {at}; to train on: dapo resume {shlex.quote(str(path))} {more}")


def report(config: Config, directory: RunDirectory) -> None:
    """The end of a run, for a person: before and after, responses, curves, where everything lies."""
    evaluations = first_and_last_evaluation(directory, warn)
    newest = directory.checkpoints.latest(warn=warn)
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
            **({} if config.log.rollouts == "none" else {"judged responses": directory.rollouts_folder}),
            **({"evaluations": directory.evaluations_folder} if evaluations else {}),
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


def export_run(path: Path, out_dir: Path, *, step: int | None, adapter: bool = False) -> dict[str, Any]:
    """`dapo export`: a checkpoint as a Hugging Face model directory, or its `adapter` alone as peft's.

    Returns what was written, as JSON values: model, run, step, base, and whether it is an adapter.
    """
    config, step = export_model_of(path, out_dir, step=step, adapter=adapter, warn=warn)
    return {"model": str(out_dir), "run": str(path), "step": step, "base": config.model.name, "adapter": adapter}
