"""Scores of a model from k judged responses per problem: avg@k, pass@j and cons@k, each with a 95 % interval."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from dapo.core.errors import DataError
from dapo.core.rng import keyed_seed
from dapo.types import Finish, Message, Problem

BOOTSTRAP_RESAMPLES = 2000
WARN_ERROR_FRACTION = 0.01  # above this fraction of responses without a verdict, the headline of an evaluation warns


@dataclass(frozen=True)
class EvaluationPlan:
    """How an evaluation samples. The paper: 32 samples per problem, temperature 1.0, top_p 0.7."""

    name: str
    samples_per_problem: int
    temperature: float
    top_p: float
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class JudgedResponse:
    """One response with its verdict."""

    text: str
    correct: bool | None
    score: float
    error: str | None  # why it could not be sampled, or has no verdict
    answer: str | None  # the normalized answer, as in `Verdict`; it counts for cons@k
    tokens: int
    finish: Finish | None

    @property
    def accuracy(self) -> float:
        """1 if correct, 0 if wrong; the score if the verifier does not decide."""
        return float(self.correct) if self.correct is not None else self.score


@dataclass(frozen=True)
class JudgedProblem:
    """A problem with its k responses."""

    problem: Problem
    responses: tuple[JudgedResponse, ...]

    @property
    def valid(self) -> list[JudgedResponse]:
        """The responses with a verdict."""
        return [response for response in self.responses if response.error is None]

    @property
    def accuracies(self) -> list[float]:
        """The accuracy of each valid response."""
        return [response.accuracy for response in self.valid]

    @property
    def consensus(self) -> float:
        """cons@k: 1 if the most frequent answer is correct; with ties, the fraction of the tied answers that is.

        Responses without an answer do not count; it is 0 if no response has one.
        """
        votes = Counter(response.answer for response in self.valid if response.answer)
        if not votes:
            return 0.0
        most = max(votes.values())
        right = {response.answer for response in self.valid if response.correct}
        return fmean(answer in right for answer, count in votes.items() if count == most)

    def row(self) -> dict[str, Any]:
        """The problem and every response as JSON values."""
        return {
            "id": self.problem.id,
            "source": self.problem.source,
            "question": question_text(self.problem.prompt),
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

    def summary(self) -> dict[str, Any]:
        """All reported figures as JSON values: `accuracy` is avg@k; `low` and `high` are its 95 % interval.

        `intervals` holds the intervals of `pass@j` and `cons@k`. `no_answer_fraction` is the fraction of judged
        responses without an answer, None if the verifier does not extract answers.
        """
        k = self.plan.samples_per_problem
        means = [fmean(problem.accuracies) for problem in self.judged]
        low, high = mean_interval(means, seed=self.plan.seed)
        responses = [response for problem in self.problems for response in problem.responses]
        sampled = [response for response in responses if response.finish is not None]
        valid = [response for response in responses if response.error is None]
        errors = [response.error for response in responses if response.error is not None]
        binary = all(response.correct is not None for response in valid)
        estimates = self._estimates() if binary else {}
        with_extraction = [response for response in valid if response.answer is not None]
        return {
            "name": self.plan.name,
            "accuracy": fmean(means) if means else 0.0,
            "low": low,
            "high": high,
            "problems": len(self.problems),
            "samples_per_problem": k,
            "binary": binary,
            **{name: fmean(values) for name, values in estimates.items()},
            "intervals": {name: mean_interval(values, seed=self.plan.seed) for name, values in estimates.items()},
            "response_tokens_mean": fmean([r.tokens for r in sampled]) if sampled else 0.0,
            "truncated_fraction": fmean([r.finish == "length" for r in sampled]) if sampled else 0.0,
            "no_answer_fraction": fmean([r.answer == "" for r in with_extraction]) if with_extraction else None,
            "warning": _warning(len(errors), len(responses)),
            "verifier_errors": len(errors),
            "most_frequent_error": max(sorted(set(errors)), key=errors.count) if errors else None,
            "by_source": self._by_source(),
            **{name: getattr(self.plan, name) for name in ("temperature", "top_p", "max_response_tokens", "seed")},
        }

    def metrics(self) -> dict[str, float]:
        """The metrics `eval/NAME/...`."""
        summary, prefix = self.summary(), f"eval/{self.plan.name}"
        metrics = {f"{prefix}/{key}": summary[key] for key in ("accuracy", "low", "high")}
        metrics[f"{prefix}/avg@{self.plan.samples_per_problem}"] = summary["accuracy"]
        metrics |= {f"{prefix}/{key}": summary[key] for key in ("response_tokens_mean", "truncated_fraction")}
        if len(summary["by_source"]) > 1:
            metrics.update({f"eval/{source}/accuracy": row["accuracy"] for source, row in summary["by_source"].items()})
        return metrics

    def table(self) -> list[dict[str, Any]]:
        """One row per problem, with every response."""
        return [problem.row() for problem in self.problems]

    def _estimates(self) -> dict[str, list[float]]:
        """`pass@j` for the powers of two up to k, and `cons@k`: a value per problem with enough valid responses."""
        k = self.plan.samples_per_problem
        counts = [(len(problem.accuracies), round(sum(problem.accuracies))) for problem in self.judged]
        found = {}
        for j in (2**i for i in range(k.bit_length())):
            if values := [pass_at_k(samples, correct, j) for samples, correct in counts if samples >= j]:
                found[f"pass@{j}"] = values
        if k > 1 and any(response.answer is not None for problem in self.judged for response in problem.valid):
            found[f"cons@{k}"] = [problem.consensus for problem in self.judged]
        return found

    def _by_source(self) -> dict[str, dict[str, float]]:
        rows: dict[str, list[float]] = {}
        for problem in self.judged:
            rows.setdefault(problem.problem.source, []).append(fmean(problem.accuracies))
        return {source: {"accuracy": fmean(means), "problems": len(means)} for source, means in sorted(rows.items())}


def require_summary(found: Any, where: str) -> dict[str, Any]:
    """Check that a stored evaluation is complete, and return it. Raises DataError if something is missing."""
    blank = EvaluationPlan("", 1, 1.0, 1.0, 1, (), 0)
    if not isinstance(found, dict):
        raise DataError(f"{where} holds a {type(found).__name__}, not an evaluation")
    if missing := sorted((Evaluation(blank, ()).summary().keys() | {"table"}) - {"warning"} - found.keys()):
        raise DataError(f"{where} is not what `dapo eval --output` or a run writes: it lacks {', '.join(missing[:3])}")
    rows = found["table"]
    if not isinstance(rows, list) or any(not isinstance(r, dict) or {"id", "accuracy"} - r.keys() for r in rows):
        raise DataError(f"{where} is damaged: each row of its table must have id and accuracy")
    return found


def _warning(errors: int, responses: int) -> str | None:
    if errors <= WARN_ERROR_FRACTION * responses:
        return None
    return f"{errors} of {responses} responses have no verdict ({errors / responses:.1%}): metrics of the others only"


def paired_difference(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean difference (second minus first) of two evaluations, paired by problem, with its 95 % interval.

    Pairing removes the difficulty of the problems from the interval. Raises DataError if the tables hold different
    problems.
    """
    rows = {row["id"]: row for row in first}
    if set(rows) != {row["id"] for row in second}:
        alone = len(set(rows) ^ {row["id"] for row in second})
        raise DataError(f"the two evaluations are not of the same problems: {alone} are in one of them only")
    pairs = [(rows[row["id"]]["accuracy"], row["accuracy"]) for row in second]
    judged = [(a, b) for a, b in pairs if a is not None and b is not None]
    differences = [b - a for a, b in judged]
    low, high = bootstrap_interval(differences, fmean) if differences else (float("nan"), float("nan"))
    return {
        "difference": fmean(differences) if differences else float("nan"),
        "low": low,
        "high": high,
        "problems": len(judged),
        "better": sum(difference > 0 for difference in differences),
        "worse": sum(difference < 0 for difference in differences),
        "equal": differences.count(0),
    }


def question_text(prompt: str | Sequence[Message]) -> str:
    """The question of a prompt: its text, or the content of its last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of P(at least one of k is correct) from `correct` of `samples` (Chen et al. 2021)."""
    if not 0 <= correct <= samples or not 0 < k <= samples:
        raise ValueError(f"pass@k needs 0 <= correct <= samples and 0 < k <= samples, got {correct}, {samples}, {k}")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def mean_interval(means: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean over problems, by a reproducible bootstrap.

    If all problems score 0, or all score 1, a bootstrap has no width; then it is Wilson's interval.
    """
    if not means:
        return 0.0, 1.0
    if min(means) == max(means) and means[0] in (0.0, 1.0):
        return _wilson(float(means[0]), len(means))
    return bootstrap_interval(means, np.mean, seed=seed)


def bootstrap_interval(
    values: Sequence[float], statistic: Callable[[Any], Any], *, seed: int = 0
) -> tuple[float, float]:
    """The central 95 % of `statistic` over resamples of `values`, which are a function of the seed."""
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.Generator(np.random.Philox(key=keyed_seed(seed, "bootstrap")))
    size = len(array)
    resampled = [float(statistic(array[generator.integers(0, size, size)])) for _ in range(BOOTSTRAP_RESAMPLES)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def _wilson(fraction: float, count: int) -> tuple[float, float]:
    z = 1.959964
    centre = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)
