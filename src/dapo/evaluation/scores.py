"""Scores of a model from k judged responses per problem: avg@k, pass@j and cons@k, each with a 95 %
interval.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import comb
from statistics import fmean
from typing import Any

from dapo.core.errors import DataError
from dapo.libs.sample_intervals import mean_interval
from dapo.types import Finish, Problem

CORRECT = None  # the vote of a correct response; a wrong response votes for its answer, a text

NO_INTERVAL = "no interval: fewer than two problems, or all of them with the same score"
NOTHING_JUDGED = "nothing judged: no response has a verdict"
_OPTIONAL = {"warning", "interval_note", "complete_problems"}  # absent from older files
# the fraction of responses without a verdict above which an evaluation warns
WARN_ERROR_FRACTION = 0.01


@dataclass(frozen=True)
class EvaluationPlan:
    """The settings of an evaluation.

    The paper: 32 samples per problem, temperature 1.0, top_p 0.7.
    """

    name: str
    samples_per_problem: int
    temperature: float
    top_p: float
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    # RewardConfig.judging; empty if it is not known
    judged_by: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JudgedResponse:
    """One response with its verdict."""

    text: str
    correct: bool | None
    score: float
    error: str | None  # the reason for no response or no verdict
    answer: str | None  # the normalized answer, as in `Verdict`; it counts for cons@k
    tokens: int
    finish: Finish | None

    @property
    def accuracy(self) -> float:
        """1 if correct, 0 if wrong; the score if the verifier does not decide correct or wrong."""
        return float(self.correct) if self.correct is not None else self.score


@dataclass(frozen=True)
class JudgedProblem:
    """A problem with its k responses."""

    problem: Problem
    responses: tuple[JudgedResponse, ...]

    @property
    def valid(self) -> list[JudgedResponse]:
        return [response for response in self.responses if response.error is None]

    @property
    def accuracies(self) -> list[float]:
        return [response.accuracy for response in self.valid]

    @property
    def consensus(self) -> float:
        """cons@k: 1 if the correct answer is the most frequent, 1/n in a tie of n, else 0.

        All correct responses vote for one answer, in any form. A wrong response votes for its
        normalized answer, if it has one.
        """
        votes = count_votes((response.correct, response.answer) for response in self.valid)
        most_frequent = [vote for vote, count in votes.items() if count == max(votes.values())]
        return 1 / len(most_frequent) if CORRECT in most_frequent else 0.0

    def row(self) -> dict[str, Any]:
        return {
            "id": self.problem.id,
            "source": self.problem.source,
            "question": self.problem.question,
            "answer": self.problem.answer,
            "accuracy": fmean(self.accuracies) if self.accuracies else None,
            "responses": [asdict(response) for response in self.responses],
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    plan: EvaluationPlan
    problems: tuple[JudgedProblem, ...]

    @property
    def judged(self) -> list[JudgedProblem]:
        """Problems with at least one valid verdict."""
        return [problem for problem in self.problems if problem.accuracies]

    @property
    def complete(self) -> list[JudgedProblem]:
        """Problems all of whose k responses have a verdict."""
        return [
            problem
            for problem in self.problems
            if len(problem.valid) == self.plan.samples_per_problem
        ]

    def summary(self) -> dict[str, Any]:
        """Return all figures as JSON values: `accuracy` is avg@k with its 95 % interval.

        `binary` is false where the verifier does not decide correct or wrong: `accuracy` is then a
        mean score. `accuracy` is None without any verdict, `low` and `high` without an interval;
        `interval_note` is the reason. `intervals` has the intervals of `pass@j` and `cons@k`;
        `pass@j` is the mean over `complete_problems`. `no_answer_fraction` is the fraction of
        judged responses without an answer, None if the verifier does not extract answers.
        """
        k = self.plan.samples_per_problem
        means = [fmean(problem.accuracies) for problem in self.judged]
        responses = [response for problem in self.problems for response in problem.responses]
        sampled = [response for response in responses if response.finish is not None]
        valid = [response for response in responses if response.error is None]
        errors = [response.error for response in responses if response.error is not None]
        binary = all(response.correct is not None for response in valid)
        estimates = self._estimates() if binary else {}
        interval = mean_interval(means, proportions=binary) if means else None
        interval_note = None
        if interval is None:
            interval_note = NO_INTERVAL if means else NOTHING_JUDGED
        with_extraction = [response for response in valid if response.answer is not None]
        return {
            "name": self.plan.name,
            "accuracy": fmean(means) if means else None,
            "low": None if interval is None else interval[0],
            "high": None if interval is None else interval[1],
            "interval_note": interval_note,
            "problems": len(self.problems),
            "complete_problems": len(self.complete),
            "samples_per_problem": k,
            "binary": binary,
            **{name: fmean(values) for name, values in estimates.items()},
            "intervals": {name: mean_interval(values) for name, values in estimates.items()},
            "response_tokens_mean": fmean([r.tokens for r in sampled]) if sampled else 0.0,
            "truncated_fraction": (
                fmean([r.finish == "length" for r in sampled]) if sampled else 0.0
            ),
            "no_answer_fraction": (
                fmean([r.answer == "" for r in with_extraction]) if with_extraction else None
            ),
            "warning": _warning(len(errors), len(responses)),
            "verifier_errors": len(errors),
            "most_frequent_error": max(sorted(set(errors)), key=errors.count) if errors else None,
            "by_source": self._by_source(),
            **{
                name: getattr(self.plan, name)
                for name in ("temperature", "top_p", "max_response_tokens", "seed")
            },
            **self.plan.judged_by,
        }

    def metrics(self) -> dict[str, float]:
        summary = self.summary()
        prefix = f"eval/{self.plan.name}"
        names = ("accuracy", "low", "high", "response_tokens_mean", "truncated_fraction")
        figures = {key: summary[key] for key in names} | {
            f"avg@{summary['samples_per_problem']}": summary["accuracy"]
        }
        if not summary["binary"]:
            figures["score_mean"] = summary["accuracy"]
        metrics = {f"{prefix}/{key}": value for key, value in figures.items() if value is not None}
        if len(summary["by_source"]) > 1:
            for source, row in summary["by_source"].items():
                metrics[f"eval/{source}/accuracy"] = row["accuracy"]
                if not summary["binary"]:
                    metrics[f"eval/{source}/score_mean"] = row["accuracy"]
        return metrics

    def table(self) -> list[dict[str, Any]]:
        return [problem.row() for problem in self.problems]

    def _estimates(self) -> dict[str, list[float]]:
        """Estimate `pass@j` of complete problems, j powers of two, and `cons@k` of judged ones."""
        k = self.plan.samples_per_problem
        correct = [round(sum(problem.accuracies)) for problem in self.complete]
        estimates = {}
        if correct:
            estimates = {
                f"pass@{j}": [pass_at_k(k, c, j) for c in correct]
                for j in (2**i for i in range(k.bit_length()))
            }
        if k > 1 and any(
            response.answer is not None for problem in self.judged for response in problem.valid
        ):
            estimates[f"cons@{k}"] = [problem.consensus for problem in self.judged]
        return estimates

    def _by_source(self) -> dict[str, dict[str, float]]:
        rows: dict[str, list[float]] = {}
        for problem in self.judged:
            rows.setdefault(problem.problem.source, []).append(fmean(problem.accuracies))
        return {
            source: {"accuracy": fmean(means), "problems": len(means)}
            for source, means in sorted(rows.items())
        }


def require_summary(stored_summary: Any, where: str) -> dict[str, Any]:
    """Check that a stored evaluation is complete, and return it.

    Raises DataError if something is missing.
    """
    blank = EvaluationPlan("", 1, 1.0, 1.0, 1, (), 0)
    if not isinstance(stored_summary, dict):
        raise DataError(f"{where} holds a {type(stored_summary).__name__}, not an evaluation")
    required = (Evaluation(blank, ()).summary().keys() | {"table"}) - _OPTIONAL
    if absent := sorted(required - stored_summary.keys()):
        raise DataError(
            f"{where} was not written by `dapo eval --output` or a run: it lacks"
            f" {', '.join(absent[:3])}"
        )
    rows = stored_summary["table"]
    if not isinstance(rows, list) or any(
        not isinstance(r, dict) or {"id", "accuracy"} - r.keys() for r in rows
    ):
        raise DataError(f"{where} is damaged: each row of its table must have id and accuracy")
    if all(row["accuracy"] is None for row in rows):  # older files say an accuracy of 0
        stored_summary |= {
            "accuracy": None,
            "low": None,
            "high": None,
            "interval_note": NOTHING_JUDGED,
        }
    return stored_summary


def _warning(errors: int, responses: int) -> str | None:
    if errors <= WARN_ERROR_FRACTION * responses:
        return None
    return (
        f"{errors} of {responses} responses have no verdict ({errors / responses:.1%}): metrics of"
        " the others only"
    )


def count_votes(answers: Iterable[tuple[bool | None, str | None]]) -> "Counter[str | None]":
    """Count votes for `JudgedProblem.consensus`, from pairs (correct, normalized answer)."""
    return Counter(
        CORRECT if correct else answer for correct, answer in answers if correct or answer
    )


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate P(at least one of k is correct) without bias (Chen et al. 2021)."""
    if not 0 <= correct <= samples or not 0 < k <= samples:
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 0 < k <= samples, got {correct},"
            f" {samples}, {k}"
        )
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
