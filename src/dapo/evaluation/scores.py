"""Scores of a model from k judged responses per problem: avg@k, pass@j and cons@k, each with a 95 %
interval.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from statistics import fmean
from typing import Any

from dapo.config import Config
from dapo.core.errors import DataError
from dapo.core.text import with_interval
from dapo.libs.sample_intervals import mean_interval
from dapo.types import Finish, Problem

CORRECT = None  # the vote of a correct response; a wrong response votes for its answer, a text

NO_INTERVAL = "no interval: fewer than two problems, or all of them with the same score"
NOTHING_JUDGED = "nothing judged: no response has a verdict"
# absent from older files, or from those of evaluations that were not stopped
_OPTIONAL = {"warning", "interval_note", "complete_problems", "until_width", "all_problems"}
MIN_PROBLEMS = 20
"""The fewest problems whose interval may end an evaluation."""
_POINTS = 100
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


def evaluation_plan(config: Config, stop_ids: tuple[int, ...]) -> EvaluationPlan:
    """Make the plan by which held-out problems are sampled and judged."""
    source = config.data.eval_source
    assert source is not None
    return EvaluationPlan(
        name=source.label,
        samples_per_problem=config.eval.samples_per_problem,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_response_tokens=config.eval.max_response_tokens or config.rollout.max_response_tokens,
        stop_ids=stop_ids,
        seed=config.train.seed,
        judged_by=config.reward.judging,
    )


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
        if self.correct is None:
            return self.score
        return float(self.correct)


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
        most_votes = max(votes.values(), default=0)
        most_frequent = [vote for vote, count in votes.items() if count == most_votes]
        # a tie is broken at random: this is its expectation
        return 1 / len(most_frequent) if CORRECT in most_frequent else 0.0

    def row(self) -> dict[str, Any]:
        """Return the problem and its responses as JSON values."""
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
    num_all: int | None = None  # with the problems that were not evaluated; None: there are none
    until_width: float | None = None  # the width of the interval, in points, that ended it

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
        responses: list[JudgedResponse] = []
        for problem in self.problems:
            responses += problem.responses
        valid = [response for response in responses if response.error is None]
        errors = [response.error for response in responses if response.error is not None]
        binary = all(response.correct is not None for response in valid)
        estimates = self._estimates() if binary else {}
        stopped = {}
        if self.until_width is not None:
            stopped = {"until_width": self.until_width, "all_problems": self.num_all}
        return {
            "name": self.plan.name,
            **self._mean_accuracy(proportions=binary),
            "problems": len(self.problems),
            **stopped,
            "complete_problems": len(self.complete),
            "samples_per_problem": self.plan.samples_per_problem,
            "binary": binary,
            **{name: fmean(values) for name, values in estimates.items()},
            "intervals": {name: mean_interval(values) for name, values in estimates.items()},
            **_lengths(responses),
            "no_answer_fraction": _no_answer_fraction(valid),
            "warning": _warning(len(errors), len(responses)),
            "verifier_errors": len(errors),
            # sorted: of equally frequent ones the same in each run
            "most_frequent_error": max(sorted(set(errors)), key=errors.count, default=None),
            "by_source": self._by_source(),
            "temperature": self.plan.temperature,
            "top_p": self.plan.top_p,
            "max_response_tokens": self.plan.max_response_tokens,
            "seed": self.plan.seed,
            **self.plan.judged_by,
        }

    def _mean_accuracy(self, *, proportions: bool) -> dict[str, Any]:
        """Return avg@k, its interval, and the reason if there is none."""
        means = [fmean(problem.accuracies) for problem in self.judged]
        if not means:
            return {
                "accuracy": None,
                "low": None,
                "high": None,
                "interval_note": NOTHING_JUDGED,
            }
        low, high = mean_interval(means, proportions=proportions) or (None, None)
        return {
            "accuracy": fmean(means),
            "low": low,
            "high": high,
            "interval_note": NO_INTERVAL if low is None else None,
        }

    def metrics(self) -> dict[str, float]:
        """Return the metrics `eval/*` of a training step."""
        summary = self.summary()
        prefix = f"eval/{self.plan.name}"
        names = ("accuracy", "low", "high", "response_tokens_mean", "truncated_fraction")
        figures = {name: summary[name] for name in names}
        figures[f"avg@{summary['samples_per_problem']}"] = summary["accuracy"]
        if not summary["binary"]:
            figures["score_mean"] = summary["accuracy"]
        metrics = {f"{prefix}/{key}": value for key, value in figures.items() if value is not None}
        # of one source it would be the accuracy again
        if len(summary["by_source"]) > 1:
            for source, row in summary["by_source"].items():
                # its metrics would replace those of all problems
                if source == self.plan.name:
                    continue
                metrics[f"eval/{source}/accuracy"] = row["accuracy"]
                if not summary["binary"]:
                    metrics[f"eval/{source}/score_mean"] = row["accuracy"]
        return metrics

    def table(self) -> list[dict[str, Any]]:
        """Return a row per problem as JSON values."""
        return [problem.row() for problem in self.problems]

    def _estimates(self) -> dict[str, list[float]]:
        """Estimate `pass@j` of complete problems, j powers of two, and `cons@k` of judged ones."""
        k = self.plan.samples_per_problem
        num_correct = [round(sum(problem.accuracies)) for problem in self.complete]
        estimates = {}
        if num_correct:
            for exponent in range(k.bit_length()):
                j = 2**exponent
                estimates[f"pass@{j}"] = [pass_at_k(k, correct, j) for correct in num_correct]
        has_answers = any(
            response.answer is not None for problem in self.judged for response in problem.valid
        )
        # wrong responses vote by their answers, which not every verifier extracts
        if k > 1 and has_answers:
            estimates[f"cons@{k}"] = [problem.consensus for problem in self.judged]
        return estimates

    def _by_source(self) -> dict[str, dict[str, float]]:
        """Return the mean accuracy and the number of judged problems by their source."""
        means_by_source: dict[str, list[float]] = {}
        for problem in self.judged:
            means = means_by_source.setdefault(problem.problem.source, [])
            means.append(fmean(problem.accuracies))
        rows = {}
        for source, means in sorted(means_by_source.items()):
            rows[source] = {"accuracy": fmean(means), "problems": len(means)}
        return rows


class Beginning:
    """The problems at the beginning of an order that are judged, and their mean accuracy.

    Those that are judged out of turn have shorter responses than others, so their mean would be
    another one.
    """

    def __init__(self, order: Sequence[int], until_width: float | None = None) -> None:
        """`order` has the indices of problems; an interval of `until_width` points suffices."""
        self._order = order
        self._until_width = until_width
        self._means: list[float] = []
        self._is_binary = True
        self.num_problems = 0
        self.suffices = False

    def extend(self, judged: Mapping[int, JudgedProblem]) -> None:
        """Take the next problems of the order as far as they are judged and do not suffice yet."""
        while not self.suffices and self.num_problems < len(self._order):
            problem = judged.get(self._order[self.num_problems])
            if problem is None:
                break
            self.num_problems += 1
            if problem.accuracies:
                self._means.append(fmean(problem.accuracies))
                self._is_binary &= all(response.correct is not None for response in problem.valid)
            self.suffices = self._is_narrow()

    @property
    def estimate(self) -> str:
        """The accuracy with its interval; empty without a problem."""
        if not self._means:
            return ""
        style = ".1%" if self._is_binary else ".4f"
        return with_interval(fmean(self._means), self._interval(), style, " (no interval)")

    def _interval(self) -> tuple[float, float] | tuple[None, None]:
        return mean_interval(self._means, proportions=self._is_binary) or (None, None)

    def _is_narrow(self) -> bool:
        if self._until_width is None or len(self._means) < MIN_PROBLEMS:
            return False
        low, high = self._interval()
        if low is None or high is None:
            return False
        return _POINTS * (high - low) <= self._until_width


def _lengths(responses: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return the mean length of the sampled responses, and the fraction that the limit cut."""
    tokens = []
    is_cut = []
    for response in responses:
        # a response that could not be sampled has no length
        if response.finish is not None:
            tokens.append(response.tokens)
            is_cut.append(response.finish == "length")
    return {
        "response_tokens_mean": fmean(tokens) if tokens else 0.0,
        "truncated_fraction": fmean(is_cut) if is_cut else 0.0,
    }


def _no_answer_fraction(responses: Sequence[JudgedResponse]) -> float | None:
    """Return the fraction without an answer; None if the verifier does not extract answers."""
    is_missing = [response.answer == "" for response in responses if response.answer is not None]
    return fmean(is_missing) if is_missing else None


def require_summary(stored_summary: Any, where: str) -> dict[str, Any]:
    """Check that a stored evaluation is complete, and return it.

    Args:
        stored_summary: the JSON value.
        where: its file, for messages.

    Raises:
        DataError: something is missing.
    """
    blank = EvaluationPlan("", 1, 1.0, 1.0, 1, (), 0)
    if not isinstance(stored_summary, dict):
        raise DataError(f"{where} holds a {type(stored_summary).__name__}, not an evaluation")
    required = (Evaluation(blank, ()).summary().keys() | {"table"}) - _OPTIONAL
    absent = sorted(required - stored_summary.keys())
    if absent:
        raise DataError(
            f"{where} was not written by `dapo eval --output` or a run: it lacks"
            f" {', '.join(absent[:3])}"
        )
    rows = stored_summary["table"]
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise DataError(f"{where} is damaged: each row of its table must have id and accuracy")
    if all(row["accuracy"] is None for row in rows):  # older files say an accuracy of 0
        stored_summary |= {
            "accuracy": None,
            "low": None,
            "high": None,
            "interval_note": NOTHING_JUDGED,
        }
    return stored_summary


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and {"id", "accuracy"} <= value.keys()


def _warning(errors: int, responses: int) -> str | None:
    """Return a warning if so many verdicts are missing that they may bias the others."""
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
    """Estimate P(at least one of k is correct) without bias (Chen et al. 2021).

    The estimate is 1 - C(n - c, k) / C(n, k), for c correct ones among n samples.
    """
    if not 0 <= correct <= samples or not 0 < k <= samples:
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 0 < k <= samples, got {correct},"
            f" {samples}, {k}"
        )
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
