"""Selects the problems to sample (`dynamic_sampling.predict`), by the predicted chance that a group
carries a signal.

The history gives each problem a posterior over the probability p that its responses are correct:

    Beta(a_s + c, b_s + w)    c, w:      its right and wrong responses, each times 2^(-age in steps / HALF_LIFE_STEPS)
                              a_s, b_s:  fitted to the problems seen of its source (`fit_beta`); 1 and 1 without any

    chance = E[1 - p^G - (1-p)^G]        that a group carries a signal (Eq. 11); the largest is 1 - 2^(1-G), at p = 1/2
    q      = CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * max(FLOOR, r)    the probability that the problem is sampled
    r      = P(1 - p^G - (1-p)^G >= (1 - 2^(1-G)) / 2)                  of a p sampled from the posterior

Each position of the stream has two keyed random numbers: u selects it by prediction, and v puts it
into the calibration sample, which is generated regardless of predictions and shows whether they
hold. A posterior includes the steps that had finished when the sampling began, so the selection
does not depend on an engine's speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum
from typing import Any

from dapo.algo.chance import UNIFORM, Beta, beta_cdf, expected_chance, fit_beta, likely_interval
from dapo.config.rollout_options import DynamicSamplingConfig
from dapo.core.errors import RewardError
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.sampling.problem_stats import OutcomeHistory, ProblemStats, discount
from dapo.types import Group, Problem

# smallest probability of selecting a problem: policies change, and a prediction may be wrong
FLOOR = 0.05
CALIBRATION_SHARE = 0.02  # fraction of the stream that is sampled regardless of predictions


@dataclass(frozen=True)
class Decision:
    """The decision on one position of the stream."""

    position: int
    chance: float  # the predicted chance that a group carries a signal
    is_sampled: bool
    is_calibration: bool  # whether the position belongs to the calibration sample


@dataclass(frozen=True)
class Prediction:
    """The effect of the selection on one step's batch."""

    skipped: int = 0  # number of problems that were skipped
    skipped_chance: float = 0.0  # sum of the skipped problems' predicted chances
    calibration: tuple[tuple[float, bool], ...] = ()
    """Predicted chance of each group of the calibration sample, and whether it carried a signal."""

    def state(self) -> dict[str, Any]:
        """Return the prediction as exact JSON values."""
        return {
            "skipped": self.skipped,
            "skipped_chance": self.skipped_chance,
            "calibration": [list(entry) for entry in self.calibration],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Prediction":
        """Restore a prediction from its `state`."""
        calibration = tuple((chance, had_signal) for chance, had_signal in state["calibration"])
        return cls(state["skipped"], state["skipped_chance"], calibration)


class ProblemSelector:
    """Selects the problems of one step; it does not change while the step is sampled."""

    def __init__(self, history: OutcomeHistory, *, step: int, group_size: int, seed: int) -> None:
        """Fit each source's distribution to the history of the finished steps, to sample `step`.

        `group_size` is G, and `seed` the run's.
        """
        self._history = history
        self._step = step
        self._group_size = group_size
        self._seed = seed
        self._interval = likely_interval(group_size)
        # problems that were never seen share their source's
        self._of_posterior = cache(self._admission)
        weights = discount(step - history.last_step)
        self._of_source = {
            name: fit_beta(history.correct[rows], history.wrong[rows], weights[rows])
            for name, number in history.sources.items()
            for rows in [history.source == number]
        }

    def decide(self, position: int, problem: Problem) -> Decision:
        """Decide whether to sample the problem at a position of the stream."""
        chance, admitted = self._of_posterior(self.posterior(problem))
        # the key is part of what a run reproduces
        u, v = keyed_uniforms(keyed_seed(self._seed, "ask", position), 2)
        return Decision(
            position,
            chance,
            is_sampled=bool(u < admitted or v < CALIBRATION_SHARE),
            is_calibration=bool(v < CALIBRATION_SHARE),
        )

    def summarize(self, decisions: Sequence[Decision], judged: Sequence[Group]) -> Prediction:
        """Summarize the decisions on a batch's problems and the calibration of its predictions.

        `judged` are the batch's decided groups.
        """
        carried = {
            group.id: group.is_informative for group in judged if group.size - group.num_errors >= 2
        }
        skipped = [decision.chance for decision in decisions if not decision.is_sampled]
        calibration = [
            decision
            for decision in decisions
            if decision.is_calibration and decision.position in carried
        ]
        return Prediction(
            skipped=len(skipped),
            skipped_chance=fsum(skipped),
            calibration=tuple(
                (decision.chance, carried[decision.position]) for decision in calibration
            ),
        )

    def require_binary(self, group: Group) -> None:
        """Raise RewardError for a score that is neither correct nor wrong, which has no chance."""
        if any(verdict.error is None and verdict.correct is None for verdict in group.verdicts):
            raise RewardError(
                "dynamic_sampling.predict=true needs a reward that decides correct or wrong, and"
                f" problem {group.problem.id} got a score alone; set"
                " dynamic_sampling.predict=false, or reward.threshold"
            )

    def posterior(self, problem: Problem) -> Beta:
        """Return the posterior over the probability that a response to a problem is correct."""
        prior = self._of_source.get(problem.source, UNIFORM)
        row = self._history.rows.get(problem.id)
        if row is None or row >= len(self._history.correct):
            return prior
        weight = discount(self._step - int(self._history.last_step[row]))
        correct = float(self._history.correct[row])
        wrong = float(self._history.wrong[row])
        return Beta(prior.a + weight * correct, prior.b + weight * wrong)

    def _admission(self, posterior: Beta) -> tuple[float, float]:
        """Return the chance of a signal and the probability of being selected by prediction."""
        chance = expected_chance(posterior, self._group_size)
        low, high = self._interval
        # a sample by inversion is within the interval exactly where a uniform number is between
        # these two
        return chance, max(FLOOR, beta_cdf(high, posterior) - beta_cdf(low, posterior))


def make_selector(
    options: DynamicSamplingConfig, stats: ProblemStats, *, step: int, group_size: int, seed: int
) -> ProblemSelector | None:
    """Make the selector of a step; None where every problem is sampled."""
    if not options.predict:
        return None
    return ProblemSelector(stats.history(), step=step, group_size=group_size, seed=seed)
