"""Dynamic sampling (Eq. 11): the outcome of a group, how many groups to have in flight, the rate of
verifier errors.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, TypeAlias

from dapo.algo.sampling import SignalRule, is_informative
from dapo.core.errors import AgentFailed, EnvironmentFailed, RewardError, VerifierFailed
from dapo.core.loading import describe
from dapo.runs.outcomes import Outcome
from dapo.types import Group, Verdict

CONFIDENCE = 0.95
"""The largest probability with which the groups in flight shall fill the batch.

With z its normal quantile, 1 % more groups in flight make a second wave of responses
phi(z) sqrt(shortfall / (1 - keep rate)) percentage points less likely. At 95 % and a keep rate of
1/3 that is 2.9 for 512 groups and 0.7 for 32: about where 1 % of the tokens is worth 1 % of the
time. At 99 % it is 0.7 and 0.2.
"""
_LARGEST_QUANTILE = NormalDist().inv_cdf(CONFIDENCE)
REWARD_TEST = "dapo test VERIFIER --data DATA"
"""The command that tests a reward, if the run's own verifier and data are not known."""


class DynamicSampler:
    """Decides on groups by Eq. 11, and sets the groups in flight from a running keep rate."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_groups_per_step: int,
        enabled: bool = True,
        keep: Callable[[Group], bool] | None = None,
        rule: SignalRule | None = None,
        max_error_rate: float = 1.0,
        reward_test: str = REWARD_TEST,
        least_verdicts: int = 2,
    ) -> None:
        """A group with fewer than `least_verdicts` does not train.

        `reward_test` is the command that tests the run's reward; the error about missing verdicts
        names it.
        """
        self.prompts_per_step = prompts_per_step
        self.max_groups_per_step = max_groups_per_step
        self._enabled = enabled
        self._keep = keep
        self._rule = rule or SignalRule()
        self._least_verdicts = least_verdicts
        # the keep rate of about the last four batches
        self._decay = 1.0 - 1.0 / (4 * prompts_per_step)
        self._kept = self._decided = 1.0
        self._errors = RollingErrorRate(max_error_rate, reward_test)

    def outcome(self, group: Group) -> Outcome:
        """Decide the outcome of a judged group, and count it towards the keep rate.

        Raises VerifierFailed where `max_error_rate` of the last responses is exceeded.
        """
        self._errors.add(
            group.problem.id, group.texts or [""] * len(group.verdicts), group.verdicts
        )
        outcome = self._outcome_of(group)
        self._kept = self._decay * self._kept + (outcome == "trained")
        self._decided = self._decay * self._decided + 1.0
        return outcome

    def in_flight_target(self, shortfall: int) -> int:
        """Return how many undecided groups are expected to meet the shortfall."""
        return math.ceil(self._expected(shortfall))

    def sufficient_target(
        self, shortfall: int, *, oversampling: float, engine_groups: float = math.inf
    ) -> int:
        """Return how many undecided groups most likely meet the shortfall.

        The number of groups kept among n is binomial, and its rate p known from w decided groups
        only: a beta-binomial distribution with the mean n p and the variance
        n p (1 - p) (w + n) / (w + 1) (Gelman et al., Bayesian Data Analysis, 3rd ed., table A.2).
        By its normal approximation the result solves
        n p - shortfall + 1/2 = z sqrt(n p (1 - p) (w + n) / (w + 1)), a quadratic equation in n.

        z follows from the cost, as in the newsvendor problem. With sd the standard deviation of the
        groups that a batch needs, one group more in flight makes a second wave phi(z) / sd less
        likely, and takes 1 / engine_groups of the time of a wave where the engine is full. The two
        are equal at phi(z) = sd / engine_groups; z is 0 where even the first is not worth its time,
        and at most the quantile of CONFIDENCE.

        Args:
            shortfall: The number of informative groups that are missing.
            oversampling: The largest share of groups beyond the expected number, whatever z.
            engine_groups: The number of groups that the engines decode at a time.
        """
        fewest = self.in_flight_target(shortfall)
        z = self._quantile(engine_groups)
        if z == 0:
            return fewest
        limit = (1 + oversampling) * self._expected(shortfall)
        keep_rate = self._kept / self._decided
        known = self._known_groups
        # products, not powers: those are the C library's, and differ between machines
        spread = z * z * keep_rate * (1 - keep_rate) / (known + 1)
        needed = max(0.0, shortfall - 0.5)  # the continuity correction
        quadratic = keep_rate * keep_rate - spread
        if quadratic > 0:
            half_linear = keep_rate * needed + spread * known / 2
            root = math.sqrt(half_linear * half_linear - quadratic * needed * needed)
            limit = min(limit, (half_linear + root) / quadratic)
        # else the keep rate is known too badly: no number of groups suffices
        return max(fewest, math.floor(limit))

    def state_dict(self) -> dict[str, Any]:
        """Return the running keep rate and the window of verifier errors, exact in JSON."""
        return {"kept": self._kept, "decided": self._decided, "errors": self._errors.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved state."""
        self._kept = float(state["kept"])
        self._decided = float(state["decided"])
        self._errors.load(state.get("errors", ()))

    def _expected(self, shortfall: int) -> float:
        return shortfall * self._decided / max(self._kept, 0.1)

    @property
    def _known_groups(self) -> float:
        """The number of equally weighted groups whose keep rate is as uncertain as the running one.

        (sum of d^i)^2 / (sum of d^2i), with d the decay and `_decided` the first sum.
        """
        return 2 * self._decided / (2 - self._decided * (1 - self._decay))

    def _quantile(self, engine_groups: float) -> float:
        """Return z of `sufficient_target`; 0 where no group beyond the expected number pays."""
        keep_rate = self._kept / self._decided
        n = self.prompts_per_step / keep_rate
        known = self._known_groups
        variance = n * keep_rate * (1 - keep_rate) * (known + n) / (known + 1)
        density = math.sqrt(2 * math.pi * variance) / keep_rate / engine_groups
        if density >= 1:
            return 0.0
        if density == 0:
            return _LARGEST_QUANTILE
        return min(_LARGEST_QUANTILE, math.sqrt(-2 * math.log(density)))

    def _outcome_of(self, group: Group) -> Outcome:
        valid = [verdict for verdict in group.verdicts if verdict.error is None]
        if len(valid) < self._least_verdicts:
            return "invalid"
        if not self._enabled:
            return "trained"
        if self._keep is not None:
            return "trained" if self._user_keeps(group) else "filtered"
        if is_informative(group.verdicts, self._rule.metric):
            return "trained" if self._rule.is_met_by(group.verdicts) else "filtered"
        correct = {verdict.correct for verdict in valid}
        if correct == {True}:
            return "all_correct"
        if correct == {False}:
            return "all_wrong"
        return "zero_variance"

    def _user_keeps(self, group: Group) -> bool:
        assert self._keep is not None
        try:
            answer = self._keep(group)
        except Exception as error:
            raise RewardError(
                f"dynamic_sampling.filter raised {describe(error)}; it must take a Group and return"
                " a bool"
            ) from None  # the error's text may quote a response, and Python would print it as it is
        if not isinstance(answer, bool):
            raise RewardError(f"dynamic_sampling.filter must return a bool, got {answer!r}")
        return answer


WINDOW = 256  # responses over which the rate of verifier errors is taken
FIRST_RESPONSES = 32  # the fewest first responses that stop a run if none of them has a verdict
# fraction of error verdicts among the last WINDOW responses above which a run stops
MAX_ERROR_RATE = 0.5
_CAUSES = 3
_OF_ENVIRONMENT = "environment: "
_OF_AGENT = ("agent: ", "the agent")
_SHOWN_CHARS = 200
# the quoted texts and numbers in which errors of one cause differ
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
_Entry: TypeAlias = tuple[str, str, str] | None
"""Error, problem and response of a response without a verdict; None for a response with one."""


class RollingErrorRate:
    """The last WINDOW judged responses, in the order in which their groups were decided."""

    def __init__(self, max_rate: float, reward_test: str = REWARD_TEST) -> None:
        self._max_rate = max_rate
        self._reward_test = reward_test
        self._last: deque[_Entry] = deque(maxlen=WINDOW)

    def add(self, problem_id: str, responses: Sequence[str], verdicts: Sequence[Verdict]) -> None:
        """Add a group's verdicts.

        Raises VerifierFailed when a full window holds more errors than `max_rate` allows, or when
        all first responses are errors.
        """
        self._last.extend(_entries(problem_id, responses, verdicts))
        errors = [entry for entry in self._last if entry is not None]
        is_full = len(self._last) == WINDOW
        none_has_a_verdict = len(errors) == len(self._last) >= FIRST_RESPONSES
        if (is_full and len(errors) > self._max_rate * WINDOW) or (
            none_has_a_verdict and self._max_rate < 1
        ):
            if none_has_a_verdict:
                summary = f"none of the {len(errors)} responses judged last has a verdict"
            else:
                summary = (
                    f"{len(errors)} of the last {WINDOW} judged responses have no verdict, more"
                    f" than the {self._max_rate:.0%} that a run accepts"
                )
            raise failure_of(errors, summary, self._reward_test)

    def state(self) -> list[Any]:
        """Return the window as JSON values."""
        return [entry and list(entry) for entry in self._last]

    def load(self, state: Iterable[Any]) -> None:
        """Continue with a saved window."""
        self._last = deque((entry and tuple(entry) for entry in state), maxlen=WINDOW)


def _entries(
    problem_id: str, responses: Sequence[str], verdicts: Sequence[Verdict]
) -> Iterator[_Entry]:
    for response, verdict in zip(responses, verdicts, strict=True):
        excerpt = repr(response[:_SHOWN_CHARS])
        yield None if verdict.error is None else (verdict.error, problem_id, excerpt)


def errors_of(group: Group) -> list[tuple[str, str, str]]:
    """Return error, problem and response of each response of a group without a verdict."""
    texts = group.texts or [""] * len(group.verdicts)
    entries = _entries(group.problem.id, texts, group.verdicts)
    return [entry for entry in entries if entry is not None]


def failure_of(
    errors: Sequence[tuple[str, str, str]], summary: str, reward_test: str
) -> VerifierFailed:
    """Return the error about responses without a verdict, with their most frequent causes.

    Args:
        errors: the error, problem and response of each.
        summary: the beginning of the message.
        reward_test: the command that tests the run's reward.
    """
    by_cause: dict[str, list[tuple[str, str, str]]] = {}
    for entry in errors:
        by_cause.setdefault(_PARTICULAR.sub("", entry[0]), []).append(entry)
    counts = Counter({cause: len(entries) for cause, entries in by_cause.items()}).most_common(
        _CAUSES
    )
    message = "; ".join(f"{count} times: {by_cause[cause][-1][0]}" for cause, count in counts)
    most_frequent, problem, response = by_cause[counts[0][0]][-1]
    text = f"{summary}. {message}. For example problem {problem}, response {response}."
    if most_frequent.startswith(_OF_ENVIRONMENT):
        test = reward_test
        if reward_test.startswith("dapo test") and "--data" not in reward_test:
            test = reward_test.removesuffix(" --reward") + " --environment"
        return EnvironmentFailed(f"{text}\nCorrect the environment ({test} plays it), and continue")
    if most_frequent.startswith(_OF_AGENT):
        return AgentFailed(f"{text}\nCorrect the agent, and continue")
    return VerifierFailed(
        f"{text}\nCorrect the verifier or the references ({reward_test} shows its verdicts), and"
        " continue"
    )
