"""Runs of an experiment that cost nothing: commands that write what a finished run leaves, without
training.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dapo.config import dump_config, load_config
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import write_evaluation
from helpers.run_files import log_metrics

PROBLEMS = 6


class FakeCommand:
    """A `dapo train` or `dapo resume` that ends after some polls, having written a run."""

    def __init__(
        self, arguments: Sequence[str], *, polls: int, finish: Callable[[Sequence[str]], int]
    ) -> None:
        self.arguments = list(arguments)
        self.signals = list[int]()
        self._polls = polls
        self._finish = finish
        self._code = None

    def poll(self) -> int | None:
        if self._code is None and self._polls <= 0:
            self._code = self._finish(self.arguments)
        self._polls -= 1
        return self._code

    def send_signal(self, signum: int, /) -> None:
        self.signals.append(signum)

    def wait(self) -> int:
        self._code = self._code or 143
        return self._code


def path_of(arguments: Sequence[str]) -> Path:
    """The run directory of a command."""
    return Path(arguments[1] if arguments[0] == "resume" else arguments[-1])


def write_run(
    arguments: Sequence[str], *, reason: str = "finished", accuracy: float = 0.5, steps: int = 4
) -> int:
    """Write what a run leaves: options, metrics, two evaluations, its summary. The exit code."""
    path = path_of(arguments)
    if arguments[0] == "train":
        config = load_config(arguments[1], arguments[2:-2])
        run = RunDirectory.create(path, dump_config(config), {})
    else:
        run = RunDirectory.open(path)
        run.truncate_after(-1)
    seed = load_config(run.config).train.seed
    final = [min(1.0, max(0.0, accuracy + 0.05 * ((seed + i) % 3 - 1))) for i in range(PROBLEMS)]
    before = [0.25] * PROBLEMS
    rows: list[dict[str, Any]] = [{"step": 0, "eval/held/accuracy": 0.25}]
    rows += [metrics_of(step, is_last=step == steps) for step in range(1, steps + 1)]
    mean = sum(final) / PROBLEMS
    rows[-1]["eval/held/accuracy"] = mean
    log_metrics(run.metrics, rows)
    for step, values in ((0, before), (steps, final)):
        write_evaluation(run, step, *evaluation(values))
    last = {"accuracy": mean}
    facts = {
        "exit_reason": reason,
        "steps": steps,
        "wall_s": 12.5,
        "tokens_generated": 1000,
        "tokens_trained": 800,
    }
    run.write_summary(facts | {"eval_first": {"accuracy": 0.25}, "eval_last": last})
    return 0 if reason == "finished" else 1


def metrics_of(step: int, *, is_last: bool) -> dict[str, Any]:
    """A step's line in the metrics: the evaluation after the last one takes a second of its
    three.
    """
    return {
        "step": step,
        "rollout/tokens_generated": 100 * step,
        "rollout/groups_trained": 4,
        "rollout/response_tokens_mean": 10 + step,
        "rollout/truncated_fraction": 0.25,
        "rollout/entropy_estimate": 1 / step,
        "optim/skipped": int(is_last),
        "time/step_s": 3.0,
        "time/evaluate_s": float(is_last),
    }


def evaluation(values: Sequence[float]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the table of an evaluation with these accuracies."""
    plan = {"temperature": 1.0, "top_p": 0.7, "max_response_tokens": 8, "seed": 0}
    response = {
        "text": "2",
        "correct": True,
        "score": 1.0,
        "tokens": 1,
        "error": None,
        "answer": "2",
        "finish": "stop",
    }
    row = {"source": "sums", "question": "1 + 1", "answer": "2", "responses": [response]}
    table = [{"id": f"p{i}", "accuracy": value, **row} for i, value in enumerate(values)]
    summary = {
        "name": "held",
        "accuracy": sum(values) / len(values),
        "low": 0.0,
        "high": 1.0,
        "interval_note": None,
        "warning": None,
        "problems": len(values),
        "complete_problems": len(values),
        "samples_per_problem": 4,
        "binary": True,
        "intervals": {},
        "response_tokens_mean": 5.0,
        "truncated_fraction": 0.0,
        "no_answer_fraction": None,
        "verifier_errors": 0,
        "most_frequent_error": None,
        "by_source": {},
        **plan,
    }
    return summary, table
