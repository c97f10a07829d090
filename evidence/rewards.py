"""Verifiers that err by a known amount, for `when.yaml`: verdicts flipped at a rate, and a judge of
noisy grades.

What they get wrong is a function of the seed, the problem and the response's text. So a run can be
repeated, runs of one seed are paired, and the same response to the same problem is always judged
the same, as by a rule that errs. Only training problems are misjudged: held-out questions get the
true verdict, so that an evaluation measures accuracy.
"""

from dataclasses import dataclass
from statistics import NormalDist

from dapo.core.rng import keyed_seed
from dapo.data.sources.builtin import REQUEST, TASKS, is_held_out
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.rewards.verifiers.exact import ExactVerifier
from dapo.types import Problem, Verdict

TRUE_VERDICT = ExactVerifier(extract="answer_line")
"""The verifier of `base.yaml`."""


@dataclass(frozen=True)
class FlippedVerdicts:
    """Right and wrong, exchanged for a fraction of the responses to training problems."""

    rate: float
    """The fraction, from 0 to 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a rate that is no fraction."""
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must be from 0 to 1, got {self.rate}")

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """The true verdict, or its opposite."""
        verdict, is_final = _true_verdict(problem, response)
        if is_final:
            return verdict
        is_flipped = _uniform(self.seed, "flip", problem.id, response) < self.rate
        return binary_verdict(verdict.correct is not is_flipped, verdict.answer)


@dataclass(frozen=True)
class NoisyGrades:
    """A judge's grades without right or wrong: the quality of a response to a training problem,
    plus Gaussian noise.
    """

    noise: float
    """The standard deviation of the noise; quality goes from 0 to 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a negative standard deviation."""
        if not self.noise >= 0:
            raise ValueError(f"noise must be at least 0, got {self.noise}")

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """A grade, or the true verdict on a held-out question."""
        verdict, is_final = _true_verdict(problem, response)
        if is_final:
            return verdict
        error = self.noise * NormalDist().inv_cdf(
            _uniform(self.seed, "grade", problem.id, response)
        )
        grade = 1.0 if verdict.correct else quality(verdict.answer or "", problem.answer)
        return Verdict(None, grade + error, answer=verdict.answer)


def quality(answer: str, reference: str) -> float:
    """The fraction of characters that agree, compared from the end as digits are: 42 for 142 has
    two of three.

    White space does not count: it agrees in all answers of several digits.
    """
    ours, right = ("".join(text.split()) for text in (answer, reference))
    agreeing = sum(
        one == other for one, other in zip(reversed(ours), reversed(right), strict=False)
    )
    return agreeing / max(len(ours), len(right), 1)


def _true_verdict(problem: Problem, response: str) -> tuple[Verdict, bool]:
    """The true verdict, and whether it is final: an error, or on a question that is held out from
    training.
    """
    if problem.source not in TASKS or not isinstance(problem.prompt, str):
        reason = (
            f"problem {problem.id} is from {problem.source!r}, and only builtin: problems say which"
            " are held out"
        )
        return error_verdict(reason), True
    verdict = TRUE_VERDICT(problem, response)
    is_evaluated = is_held_out(problem.source, problem.prompt.removesuffix(f" {REQUEST}"))
    return verdict, is_evaluated or verdict.correct is None


def _uniform(*key: int | str) -> float:
    """A number above 0 and below 1, of 52 random bits."""
    return ((keyed_seed(*key) >> 11) + 0.5) / 2**52
