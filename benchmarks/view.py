"""How long `dapo view` takes on a long run: opening, filters and text search over generated
responses.

    python -m benchmarks.view [--steps 1000] [--groups 512] [--browser]

makes a run of `steps` tables of `groups` x 16 responses in a temporary folder, serves it, and asks
what the page asks. Each request is made five times, each for another page; the median and the
largest count.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo.core.files import atomic_write_json
from dapo.core.terminal import print_text, to_json
from dapo.runs.metric_table import METRICS
from dapo.runs.outcomes import OUTCOMES
from dapo.runs.rollout_table import _DICTIONARIES, ROLLOUT_SCHEMA, ROWS_PER_CHUNK

GROUP_SIZE = 16
PROBLEMS = 17_000
TEXTS = 4096
TOKENS = 4
REPEATS = 5
WORDS = (
    "the",
    "answer",
    "is",
    "sum",
    "of",
    "first",
    "second",
    "number",
    "then",
    "carry",
    "so",
    "trainer_idle",
    "check",
    "therefore",
)


def make_run(path: Path, *, steps: int, groups: int, seed: int = 0) -> None:
    """A run directory with generated metrics, and tables of short texts: 4 tokens of ids a
    response.
    """
    rng = np.random.default_rng(seed)
    (path / "rollouts").mkdir(parents=True)
    texts = [" ".join(rng.choice(WORDS, rng.integers(4, 14))) + f" {i}" for i in range(TEXTS)]
    with open(path / "metrics.jsonl", "w") as lines:
        for step in range(1, steps + 1):
            lines.write(to_json({"step": step, **_metrics(rng, step, steps)}) + "\n")
    for step in range(1, steps + 1):
        table = _table(rng, step, groups, texts)
        name = path / "rollouts" / f"step_{step:06d}.parquet"
        with pq.ParquetWriter(
            name, ROLLOUT_SCHEMA, compression="zstd", use_dictionary=_DICTIONARIES
        ) as writer:
            for start in range(0, len(table), ROWS_PER_CHUNK):
                writer.write_table(table.slice(start, ROWS_PER_CHUNK))
    atomic_write_json(path / "manifest.json", {"started": "2026-01-01T00:00:00+00:00"})
    atomic_write_json(path / "summary.json", {"exit_reason": "finished"})
    options = "model: {name: generated}\ndata: {train: generated.jsonl}\n"
    (path / "config.yaml").write_text(
        f"{options}train: {{num_steps: {steps}}}\nlog: {{rollouts: all}}\n"
    )


def _metrics(rng: np.random.Generator, step: int, steps: int) -> dict[str, float]:
    """A value for every metric of the table whose name has no placeholder, and the tokens by
    outcome.
    """
    names = [metric.name for metric in METRICS if "{" not in metric.name]
    values = {name: float(step / steps + 0.1 * rng.random()) for name in names}
    return values | {
        f"rollout/tokens_{outcome}": int(rng.integers(1, 10_000)) for outcome in OUTCOMES
    }


def _table(rng: np.random.Generator, step: int, groups: int, texts: list[str]) -> pa.Table:
    rows = groups * GROUP_SIZE
    group = np.repeat(np.arange(groups), GROUP_SIZE)
    rate = rng.beta(0.6, 0.6, groups)
    correct = rng.random(rows) < rate[group]
    solved = correct.reshape(groups, GROUP_SIZE).mean(1)
    outcome = np.where(solved == 1, "all_correct", np.where(solved == 0, "all_wrong", "trained"))[
        group
    ]
    problem = rng.integers(0, PROBLEMS, groups)[group]
    score = np.where(correct, 1.0, -1.0)
    trained = outcome == "trained"
    lengths = rng.integers(1, 20_000, rows)
    ids = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32) * TOKENS),
        pa.array(np.zeros(rows * TOKENS, np.int32)),
    )
    logprobs = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32) * TOKENS),
        pa.array(np.full(rows * TOKENS, -0.1, np.float32)),
    )
    pool = pa.array(texts)
    columns = {
        "step": pa.array(np.full(rows, step)),
        "group_id": pa.array(group + step * groups),
        "problem_id": pa.array([f"{number:016x}" for number in problem]),
        "source": pa.array(np.where(problem % 2, "even", "odd")),
        "sample": pa.array(np.tile(np.arange(GROUP_SIZE, dtype=np.int32), groups)),
        "prompt": pa.array([f"What is {number} + {number}?" for number in problem]),
        "response": pool.take(pa.array(rng.integers(0, len(texts), rows))),
        "answer": pa.array([str(2 * number) for number in problem]),
        "correct": pa.array(correct),
        "score": pa.array(score),
        "reward": pa.array(score),
        "advantage": pa.array(score, mask=~trained),
        "prompt_tokens": pa.array(np.full(rows, 12, np.int32)),
        "response_tokens": pa.array(lengths.astype(np.int32)),
        "finish": pa.array(np.where(lengths > 19_000, "length", "stop")),
        "outcome": pa.array(outcome),
        "response_ids": ids,
        "engine_logprobs": logprobs,
        "version": pa.array(np.full(rows, step - 1)),
    }
    arrays = [
        columns.get(field.name, pa.nulls(rows, field.type)).cast(field.type)
        for field in ROLLOUT_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=ROLLOUT_SCHEMA)


@contextmanager
def served(run: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of `dapo view RUN`, and its process."""
    command = [sys.executable, "-m", "dapo", "view", str(run), "--json", "--port", "0"]
    environment = {**os.environ, "DAPO_CACHE": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, path: str, **parameters: object) -> Any:
    """One answer of the server."""
    with urllib.request.urlopen(
        f"{url}api/{path}?{urlencode({'run': 'run', **parameters})}", timeout=120
    ) as answer:
        return json.load(answer)


def timed(url: str, label: str, path: str, **parameters: object) -> None:
    """Ask five times, each for another page, so that no answer is a repetition."""
    seconds = []
    for repeat in range(REPEATS):
        began = time.perf_counter()
        found = ask(url, path, **{"offset": 50 * repeat, **parameters})
        seconds.append(time.perf_counter() - began)
    total = found.get("total", "")
    print_text(
        f"{label:58} {statistics.median(seconds):7.3f} s, largest {max(seconds):7.3f} s; found"
        f" {total}"
    )


FILTERS: dict[str, dict[str, object]] = {
    "no filter, newest first": {},
    "outcome": {"outcomes": "all_wrong"},
    "outcome, verdict and steps": {
        "outcomes": "trained",
        "verdicts": "wrong",
        "first_step": 200,
        "last_step": 700,
    },
    "length range, longest first": {"min_tokens": 5000, "max_tokens": 15_000, "sort": "longest"},
    "lowest reward": {"sort": "worst"},
    "one problem": {"problem": f"{77:016x}"},
    "nothing passes": {"outcomes": "filtered"},
    "text, frequent": {"text": "therefore"},
}


def measure(run: Path, cache: Path, *, steps: int, browser: bool) -> None:
    """Open without an index, wait for it, open with it, and filter."""
    for label in ("without an index", "with the index"):
        began = time.perf_counter()
        with served(run, cache) as (url, process):
            show(f"{label}: the server listens", time.perf_counter() - began)
            if browser:
                in_browser(url, label)
            began = time.perf_counter()
            ask(url, "overview")
            ask(url, "metrics")
            show(f"{label}: values of the overview", time.perf_counter() - began)
            began = time.perf_counter()
            found = ask(url, "rollouts")
            show(f"{label}: first page of responses", time.perf_counter() - began)
            while (state := found["index"])["indexed"] < state["steps"]:
                time.sleep(0.5)
                found = ask(url, "rollouts")
            show(
                f"{label}: all {state['responses']:,} responses indexed",
                time.perf_counter() - began,
            )
            if label == "with the index":
                filters(url, steps)
            peak = Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]
            print_text(f"{label}: largest memory of the server {int(peak) / 2**20:.2f} GiB")
    print_text(
        "index on disk:"
        f" {sum(f.stat().st_size for f in cache.rglob('*') if f.is_file()) / 2**20:.0f} MiB"
    )


def filters(url: str, steps: int) -> None:
    """Every filter, the problems, a search that finds nothing, and a group."""
    for name, parameters in FILTERS.items():
        timed(url, name, "rollouts", **parameters)
    timed(url, "problems, most visits", "problems")
    timed(url, "problems, never solved", "problems", kind="never")
    timed(
        url,
        "text that is nowhere, each answer",
        "rollouts",
        text="no model wrote this",
        verdicts="correct",
    )
    group = ask(url, "rollouts")["rows"][0]["group_id"]
    timed(url, "a group", "group", step=steps, group=group)


def show(label: str, seconds: float) -> None:
    """One figure as a line."""
    print_text(f"{label:58} {seconds:7.3f} s")


SHOWN_CHARTS = """
const cards = [...document.querySelectorAll('[data-chart]')];
const shown = cards.filter((card) => card.getBoundingClientRect().top < innerHeight);
return cards.length > 0 && shown.every((card) => card.querySelector('.chart .drag'));
"""


def in_browser(url: str, label: str) -> None:
    """Seconds until Chromium has drawn the charts of the overview that fit its window, and the
    first responses.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.browser import open_browser

    with open_browser() as browser:
        for page, done in (
            ("overview", SHOWN_CHARTS),
            ("rollouts", "return document.querySelectorAll('tbody tr').length === 50"),
        ):
            began = time.perf_counter()
            browser.get(f"{url}#/{page}?run=run")
            while not browser.execute_script(done):
                time.sleep(0.02)
            show(f"{label}: Chromium shows the {page}", time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument(
        "--browser",
        action="store_true",
        help="also measure in headless Chromium (tests on PYTHONPATH)",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.perf_counter()
        make_run(run, steps=arguments.steps, groups=arguments.groups)
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 2**20
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print_text(
            f"{arguments.steps:,} steps x {arguments.groups * GROUP_SIZE:,} responses: {size:,.0f}"
            f" MiB, made in {time.perf_counter() - began:.0f} s with {memory:.1f} GiB"
        )
        measure(run, Path(folder) / "cache", steps=arguments.steps, browser=arguments.browser)


if __name__ == "__main__":
    main()
