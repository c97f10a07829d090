"""Makes runs of the testbed: several in each worker process, whose start-up is half the time of a
run this small.

A finished run is one line of JSON in the file of its experiment, and its run directory is removed.
However the command ends, another call continues with the missing runs.
"""

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any

from evidence.testbed.bases import Recipe
from evidence.testbed.plan import STORED, Job

SHARE = "share"
TOKENS = "tokens"
BETTER = "B"
WORSE = "A"
"""The strategies: the share of the better one is stored."""
FIRST_LETTERS = {"A": WORSE, "H": WORSE, "B": BETTER, **dict.fromkeys("0123456789", BETTER)}
"""The strategy of a response by its first character, that of an arithmetic one included
(`bases.WAYS`).
"""


def stored_runs(name: str, folder: Path = STORED) -> list[dict[str, Any]]:
    """The finished runs of an experiment.

    A last line without its end, of a run that was killed, is left out.

    Raises ValueError for another line that is not a run, and for two runs of one job.
    """
    file = folder / f"{name}.jsonl"
    found: dict[tuple[str, str, str, int, int], dict[str, Any]] = {}
    for number, line in enumerate(_whole_lines(file), 1):
        try:
            run = json.loads(line)
            key = key_of(run)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}: line {number} is not a run ({error}); remove it and make the run again"
            ) from None
        if key in found:
            raise ValueError(f"{file}: line {number} is a second run of {key}; remove one of them")
        found[key] = run
    return list(found.values())


def _whole_lines(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def key_of(run: dict[str, Any]) -> tuple[str, str, str, int, int]:
    """The key of a stored run, that of its job."""
    return run["arm"], run["level"], run["row"], run["base"], run["seed"]


def missing(jobs: Sequence[Job], folder: Path = STORED) -> list[Job]:
    """The jobs without a stored run."""
    done = {
        (name, *key_of(run))
        for name in {job.experiment for job in jobs}
        for run in stored_runs(name, folder)
    }
    return [job for job in jobs if (job.experiment, *job.key) not in done]


def run_all(
    jobs: Sequence[Job],
    *,
    workers: int,
    seconds: float,
    log: Callable[[str], None],
    folder: Path = STORED,
    later: Sequence[Job] = (),
) -> int:
    """Make the missing runs, some at a time, for as long as a run is expected to end in time;
    return how many are left.

    Base models come first: two runs of one would make it twice. What is logged as left counts the
    jobs of `later` too.
    """
    deadline = time.monotonic() + seconds
    waiting = missing(jobs, folder)
    if not waiting or seconds <= 0:
        return len(waiting)
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (os.getpid(),)) as pool:
        recipes = {job.recipe.name: job.recipe for job in waiting}
        took: dict[str, list[float]] = {}
        for job, found in _completed(
            pool, make_base_model, list(recipes.values()), workers, deadline, took
        ):
            log(f"base model {job.name}: {found['seconds']:.0f} s")
        if time.monotonic() > deadline:
            return len(waiting)
        left = [*waiting, *missing(later, folder)]
        took = _stored_seconds([*jobs, *later], folder)
        for job, found in _completed(pool, make_run, waiting, workers, deadline, took):
            append(job, found, folder)
            left.remove(job)
            run = f"{job.kind}, base {job.recipe.seed}, seed {job.seed}: {found['seconds']:.1f} s"
            log(f"{run}; {len(left)} left{_time_left(left, took, workers)}")
    return len(missing(jobs, folder))


def _stored_seconds(jobs: Sequence[Job], folder: Path) -> dict[str, list[float]]:
    """The seconds of the stored runs by kind."""
    found: dict[str, list[float]] = {}
    for name in {job.experiment for job in jobs}:
        for run in stored_runs(name, folder):
            found.setdefault("/".join((name, run["arm"], run["level"], run["row"])), []).append(
                run["seconds"]
            )
    return found


def _time_left(left: Sequence[Job], took: dict[str, list[float]], workers: int) -> str:
    """An estimate from the mean seconds of each kind of run, or of all runs."""
    every = fmean(seconds for each in took.values() for seconds in each)
    expected = sum(fmean(took.get(job.kind) or [every]) for job in left) / workers
    return f", about {max(1, math.ceil(expected / 60))} min" if left else ""


def _completed(
    pool: ProcessPoolExecutor,
    work: Callable[[Any], dict[str, Any]],
    items: Sequence[Any],
    workers: int,
    deadline: float,
    took: dict[str, list[float]],
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield items with what `work` returns for them, as they end; none begins that may end after
    the deadline.
    """
    waiting = deque(items)
    running = dict[Future[dict[str, Any]], Any]()
    while waiting or running:
        while waiting and len(running) < workers:
            expected = max(took.get(_kind(waiting[0]), [0.0]))
            if time.monotonic() + 1.2 * expected > deadline:
                waiting.clear()
                break
            item = waiting.popleft()
            running[pool.submit(work, item)] = item
        for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
            item = running.pop(future)
            found = future.result()
            took.setdefault(_kind(item), []).append(found["seconds"])
            yield item, found


def _kind(item: Job | Recipe) -> str:
    return item.kind if isinstance(item, Job) else "base model"


def append(job: Job, found: dict[str, Any], folder: Path) -> None:
    """Add a finished run to the file of its experiment."""
    file = folder / f"{job.experiment}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    names = dict(zip(("arm", "level", "row", "base", "seed"), job.key, strict=True))
    with file.open("ab") as lines:
        # without a line that was not ended
        lines.truncate(sum(len(line) + 1 for line in _whole_lines(file)))
        lines.write(json.dumps({**names, **found}, separators=(",", ":")).encode() + b"\n")


# --- in a worker


def _begin_worker(parent: int) -> None:
    """Interrupt this worker when the process that started it is gone, and print nothing: errors
    reach that process.
    """
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (for the life of the process)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        # the first asks the run to save its state, the second ends it; it then removes its folder
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2.0)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def make_base_model(recipe: Recipe) -> dict[str, Any]:
    """Make the model of a recipe if it is missing."""
    from evidence.base_model import base_model

    started = time.perf_counter()
    base_model(lambda text: None, recipe=recipe)
    return {"seconds": time.perf_counter() - started}


def make_run(job: Job) -> dict[str, Any]:
    """Train once, and return the curves of the run and its seconds."""
    from dapo.config import load_config
    from dapo.runs.directory import RunDirectory
    from dapo.start.check import check, read_data
    from dapo.start.run import RunCallbacks, new_run, open_run
    from dapo.training.train import train
    from evidence.base_model import model_directory

    started = time.perf_counter()
    overrides = [
        *job.options,
        f"model.name={model_directory(job.recipe)}",
        f"train.seed={job.seed}",
    ]
    config = load_config(job.recipe.config, overrides)
    with (
        tempfile.TemporaryDirectory(prefix="testbed-") as folder,
        Path(os.devnull).open("w") as nowhere,
    ):
        path = Path(folder) / "run"
        with (
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
            check(config) as checked,
            new_run(checked, read_data(checked), path, command=["evidence.testbed"]) as ready,
            open_run(ready, RunCallbacks(warn=lambda text: None)) as run,
        ):
            train(run)
        curves = curves_of(RunDirectory(path), job.metrics)
    return {"seconds": round(time.perf_counter() - started, 1), "curves": curves}


def curves_of(directory: Any, metrics: Sequence[str]) -> dict[str, list[float | None]]:
    """The value at each step of metrics, of the share of the better strategy, and of the lengths of
    both.
    """
    from dapo.runs.metrics_file import metrics_by_step
    from dapo.runs.rollout_table import iterate_rows

    steps = metrics_by_step(directory.metrics)
    curves = {name: [steps[step].get(name) for step in sorted(steps)] for name in metrics}
    curves[TOKENS] = [steps[step]["rollout/tokens_generated"] for step in sorted(steps)]
    columns = ["source", "response", "response_tokens", "engine_logprobs"]
    tables = directory.rollout_tables()
    # a step that found no group to train has rollouts and no metrics
    for number, step in enumerate(sorted(steps)):
        for name, value in measure_rollouts(list(iterate_rows(tables[step], columns))).items():
            curves.setdefault(name, [None] * len(steps))[number] = value
    return {name: [_short(value) for value in values] for name, values in curves.items()}


def measure_rollouts(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The share of the better strategy, over all prompts and by source, and the mean length of each
    strategy.

    The share is exact but for the choice of prompts: the probability that the policy gave to the
    first character of the better strategy, or 1 less that of the other strategy.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        letter = FIRST_LETTERS.get(row["response"].strip()[:1])
        if letter is None:
            continue
        p = math.exp(row["engine_logprobs"][0])
        share = p if letter == BETTER else 1 - p
        values.setdefault(SHARE, []).append(share)
        values.setdefault(f"{SHARE}/{row['source']}", []).append(share)
        values.setdefault(f"length/{letter}", []).append(row["response_tokens"])
    return {name: fmean(each) for name, each in values.items()}


def _short(value: float | None) -> float | None:
    """A number with four significant digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def log_line(text: str) -> None:
    """Print a line at once."""
    print(text, file=sys.stderr, flush=True)
