"""Which problems are asked (`dynamic_sampling.predict`): by the chance, predicted from the history, of a signal.

The history gives each problem a posterior of the probability p that its responses are correct:

    Beta(a_s + c, b_s + w)    c, w:      its right and wrong responses, each times 2^(-age in steps / HALF_LIFE_STEPS)
                              a_s, b_s:  fitted to the problems seen of its source (`fit_beta`); 1 and 1 without any

    chance = E[1 - p^G - (1-p)^G]        that a group carries a signal (Eq. 11); the largest is 1 - 2^(1-G), at p = 1/2
    q      = RECHECKED + (1 - RECHECKED) * max(FLOOR, r)                the probability with which the problem is asked
    r      = chance / (1 - 2^(1-G))                                     thin
    r      = P(1 - p^G - (1-p)^G >= (1 - 2^(1-G)) / 2)                  thompson: p is sampled from the posterior

A position of the stream has two keyed numbers: u decides whether it is asked by prediction, v whether it is one of the
RECHECKED that are asked whatever is predicted, and whose outcomes calibrate. A posterior is that of the finished steps
(`schedule: one_step_off`: of those finished when the sampling began), so what is asked depends on no engine's speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import fsum
from typing import Any

from dapo.algo.chance import (
    UNIFORM,
    Beta,
    beta_cdf,
    expected_chance,
    fit_beta,
    largest_chance,
    likely_interval,
)
from dapo.config import Config
from dapo.core.errors import RewardError
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.training.problem_stats import History, ProblemStats, discount
from dapo.types import Group, Problem

FLOOR = 0.05
"""The least probability with which a problem is asked by prediction: policies change, and a prediction may be wrong."""
RECHECKED = 0.02
"""The part of the stream that is asked whatever is predicted."""


@dataclass(frozen=True)
class Decision:
    """What was decided about one position of the stream."""

    position: int
    chance: float
    """The predicted chance that a group carries a signal."""
    probability: float
    """q: the probability with which the problem was asked."""
    is_asked: bool
    is_recheck: bool
    """It was asked, or would have been, whatever was predicted."""


@dataclass(frozen=True)
class Prediction:
    """What predictions did to one step's batch."""

    skipped: int = 0
    """Problems of the stream that were not asked."""
    skipped_chance: float = 0.0
    """The sum of the chances that they were given."""
    rechecks: tuple[tuple[float, bool], ...] = ()
    """The predicted chance of each problem that was asked whatever it was, and whether its group carried a signal."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """The loss weight of each group that trains, by its id; empty where all weigh the same."""

    def state(self) -> dict[str, Any]:
        """JSON values, exact."""
        return {
            "skipped": self.skipped,
            "skipped_chance": self.skipped_chance,
            "rechecks": [list(each) for each in self.rechecks],
            "weights": [list(each) for each in self.weights.items()],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Prediction":
        """What `state` was made of."""
        rechecks = tuple((chance, had_signal) for chance, had_signal in state["rechecks"])
        return cls(state["skipped"], state["skipped_chance"], rechecks, dict(state["weights"]))


class Forecast:
    """Decides for one step which problems of the stream are asked; it does not change while the step is sampled."""

    def __init__(
        self, history: History, *, step: int, predict: str, group_size: int, seed: int, weights: str = "none"
    ) -> None:
        """Fit each source's distribution to the history.

        Args:
            history: The problems seen in finished steps.
            step: The step that is to be sampled.
            predict: `thin` or `thompson`.
            group_size: G, responses per problem.
            seed: The run's.
            weights: `none` or `inverse`.
        """
        self._history, self._step, self._predict = history, step, predict
        self._group_size, self._seed, self._is_weighted = group_size, seed, weights == "inverse"
        self._largest, self._interval = largest_chance(group_size), likely_interval(group_size)
        self._of_posterior = cache(self._admission)  # problems that were never seen share their source's
        kept = discount(step - history.last_step)
        self._of_source = {
            name: fit_beta(history.correct[rows], history.wrong[rows], kept[rows])
            for name, number in history.sources.items()
            for rows in [history.source == number]
        }

    def decide(self, position: int, problem: Problem) -> Decision:
        """Whether the problem at a position of the stream is asked: a function of both and of the history."""
        chance, admitted = self._of_posterior(self.posterior(problem))
        u, v = keyed_uniforms(keyed_seed(self._seed, "ask", position), 2)
        return Decision(
            position,
            chance,
            probability=RECHECKED + (1 - RECHECKED) * admitted,
            is_asked=bool(u < admitted or v < RECHECKED),
            is_recheck=bool(v < RECHECKED),
        )

    def account(self, decisions: Sequence[Decision], judged: Sequence[Group], trained: Sequence[Group]) -> Prediction:
        """What was decided about the problems of a batch, and how the rechecked ones turned out.

        With `dynamic_sampling.weights: inverse` the weight of a group is K / q, where K = sum q chance / sum chance
        over all these decisions: where predictions hold, the mean weight of groups that train is 1.

        Args:
            decisions: About every problem of the stream from the batch's first to its last.
            judged: The groups that were decided.
            trained: Those of them that train.
        """
        carried = {group.id: group.is_informative for group in judged if group.size - group.num_errors >= 2}
        skipped = [each.chance for each in decisions if not each.is_asked]
        rechecks = [each for each in decisions if each.is_recheck and each.position in carried]
        weights: dict[int, float] = {}
        if self._is_weighted:
            total = fsum(each.chance for each in decisions)
            scale = fsum(each.probability * each.chance for each in decisions) / total
            asked_with = {each.position: each.probability for each in decisions}
            weights = {group.id: scale / asked_with[group.id] for group in trained}
        return Prediction(
            skipped=len(skipped),
            skipped_chance=fsum(skipped),
            rechecks=tuple((each.chance, carried[each.position]) for each in rechecks),
            weights=weights,
        )

    def require_binary(self, group: Group) -> None:
        """Raise RewardError for a group with a score that is neither right nor wrong: no chance can be predicted."""
        if any(verdict.error is None and verdict.correct is None for verdict in group.verdicts):
            raise RewardError(
                f"dynamic_sampling.predict={self._predict} needs a reward that decides right or wrong, and problem "
                f"{group.problem.id} got a score alone; set dynamic_sampling.predict=off, or reward.threshold"
            )

    def posterior(self, problem: Problem) -> Beta:
        """The distribution of the probability that a response to a problem is correct."""
        prior = self._of_source.get(problem.source, UNIFORM)
        row = self._history.rows.get(problem.id)
        if row is None or row >= len(self._history.correct):
            return prior
        kept = discount(self._step - int(self._history.last_step[row]))
        return Beta(prior.a + kept * self._history.correct[row], prior.b + kept * self._history.wrong[row])

    def _admission(self, posterior: Beta) -> tuple[float, float]:
        """The chance of a signal, and the probability of being asked by prediction."""
        chance = expected_chance(posterior, self._group_size)
        if self._predict == "thin":
            return chance, max(FLOOR, chance / self._largest)
        low, high = self._interval
        # a sample by inversion is within the interval exactly where a uniform number is between these two
        return chance, max(FLOOR, beta_cdf(high, posterior) - beta_cdf(low, posterior))


def make_forecast(config: Config, problem_stats: ProblemStats, *, step: int) -> Forecast | None:
    """What decides about the problems of a step; None where every problem is asked."""
    if not config.predicts_signal:
        return None
    return Forecast(
        problem_stats.history(),
        step=step,
        predict=config.dynamic_sampling.predict,
        group_size=config.rollout.group_size,
        seed=config.train.seed,
        weights=config.dynamic_sampling.weights,
    )
