"""The groups of a batch in the order of the stream: Eq. 11, and counts of everything generated.

Groups are decided in the order in which they were submitted, whichever finishes first: taking the
first to finish would favour short responses. The batch is full with the `prompts_per_step`-th
informative group. Nothing here knows an engine or a verifier.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from dapo.runs.outcomes import COUNTED, Outcome, count_dropped
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.sampling.selection import Prediction
from dapo.types import Generation, Group, Problem, Verdict


@dataclass(frozen=True)
class Batch:
    """A step's groups, and counts of everything that was generated for them.

    Example: two groups wanted, of 4 responses each. Group 5 was all correct. When the batch closed,
    group 8 was finished and group 9 was still being generated:

        Batch(groups=(g6, g7),
              judged=((g5, "all_correct"), (g6, "trained"), (g7, "trained"), (g8, "excess")),
              group_counts={"trained": 2, "all_correct": 1, "excess": 1, "aborted": 1, ...}, shortfall=0)

    The next step samples problems 8 and 9 again.
    """

    groups: tuple[Group, ...]  # the groups that train, in the order of the stream
    # every group whose responses were all generated, in the stream's order
    judged: tuple[tuple[Group, Outcome], ...]
    group_counts: Mapping[Outcome, int]
    token_counts: Mapping[Outcome, int]
    # groups missing from a full batch; above 0 only where `max_groups_per_step` was reached
    shortfall: int
    epoch: int = 0  # the epoch of the problem after the batch's last one
    prediction: Prediction | None = None
    """The skipped problems and the calibration of predictions, with `dynamic_sampling.predict`."""
    recomputed_tokens: int = 0
    """Tokens of suspended responses, with their prompts, that were read again to go on with new
    weights.
    """

    @property
    def decided(self) -> list[tuple[Group, Outcome]]:
        """Return the judged groups without excess, whatever the number of groups in flight."""
        return [(group, outcome) for group, outcome in self.judged if outcome != "excess"]

    @property
    def num_generated_tokens(self) -> int:
        """Sampled response tokens of every outcome."""
        return sum(self.token_counts.values())


@dataclass
class UndecidedGroup:
    """A submitted group whose outcome is not decided yet."""

    step: int  # the step in whose batch it was begun, a part of its random keys
    position: int  # its problem's position in the stream
    problem: Problem
    prompt_ids: tuple[int, ...]
    responses: list[Generation | None]  # None: the engine has not returned it
    # of a group whose responses are all there
    texts: tuple[str, ...] = ()
    verdicts: "Future[tuple[Verdict, ...]] | None" = None
    due_poll: int = 0  # the poll of the engine from which its verdicts count

    @property
    def is_generated(self) -> bool:
        """True if the engine has finished its responses, which are then at the verifier."""
        return self.verdicts is not None

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens of the responses that are there."""
        return sum(response.num_sampled for response in self.responses if response is not None)

    def judged(self, reward: Callable[[Generation, Verdict], float | None]) -> Group:
        """Wait for the verifier, and return the generated group with its verdicts and rewards."""
        assert self.verdicts is not None
        responses = tuple(response for response in self.responses if response is not None)
        verdicts = self.verdicts.result()
        rewards = tuple(
            reward(response, verdict) for response, verdict in zip(responses, verdicts, strict=True)
        )
        return Group(
            self.problem,
            self.prompt_ids,
            responses,
            verdicts,
            id=self.position,
            texts=self.texts,
            rewards=rewards,
        )


class GroupQueue:
    """The groups of one batch, from their submission to their outcome."""

    def __init__(self, sampler: DynamicSampler) -> None:
        self.undecided: deque[UndecidedGroup] = deque()  # in the order of the stream
        self._sampler = sampler
        self._num_submitted = 0
        self._accepted: list[Group] = []
        self._judged: list[tuple[Group, Outcome]] = []
        self._groups: dict[Outcome, int] = dict.fromkeys(COUNTED, 0)
        self._tokens: dict[Outcome, int] = dict.fromkeys(COUNTED, 0)

    @property
    def shortfall(self) -> int:
        """The number of informative groups that the batch still needs."""
        return self._sampler.prompts_per_step - len(self._accepted)

    @property
    def is_open(self) -> bool:
        """True if the batch needs and may have another group."""
        return self.shortfall > 0 and len(self._judged) < self._sampler.max_groups_per_step

    @property
    def end(self) -> int:
        """The position of the stream after the last decided group."""
        return self._judged[-1][0].id + 1

    @property
    def num_accepted(self) -> int:
        """The number of groups that train."""
        return len(self._accepted)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens, in decided groups and in undecided ones."""
        return sum(self._tokens.values()) + sum(group.num_tokens for group in self.undecided)

    @property
    def decided(self) -> list[Group]:
        """The decided groups, without excess."""
        return [group for group, outcome in self._judged if outcome != "excess"]

    @property
    def progress_note(self) -> str:
        """The outcomes of dropped groups as text; empty if none was dropped."""
        dropped = count_dropped(self._groups)
        return f"{len(self._judged)} judged: {dropped}" if dropped else ""

    def num_to_submit(
        self,
        *,
        oversampling: float = 0.0,
        engine_groups: float = math.inf,
        free_groups: float = math.inf,
        lookahead: int = 0,
    ) -> int:
        """Return how many groups more to have in flight.

        These are as many as are expected to fill the batch, and beyond them, in free slots only, as
        many as will most likely fill it: a batch that falls short waits for another longest
        response. Where the engines are full, a group that may be in vain would take the time of one
        that is needed.

        Args:
            oversampling: The largest share of groups beyond the expected number.
            engine_groups: The number of groups that the engines decode at a time.
            free_groups: The number of groups for which the engines have free slots.
            lookahead: The number of later batches whose groups are begun as well.
        """
        sampler = self._sampler
        num_undecided = len(self.undecided)
        wanted = self.shortfall + lookahead * sampler.prompts_per_step
        expected = sampler.in_flight_target(wanted) - num_undecided
        target = sampler.sufficient_target(
            self.shortfall, oversampling=oversampling, engine_groups=engine_groups
        )
        sufficient = target - num_undecided
        limit = (1 + lookahead) * sampler.max_groups_per_step - self._num_submitted
        return int(min(max(expected, min(sufficient, free_groups)), limit))

    def add(self, group: UndecidedGroup) -> None:
        """Add a group behind all others."""
        self.undecided.append(group)
        self._num_submitted += 1

    def decide(self, group: Group) -> None:
        """Decide the first undecided group by Eq. 11; `group` is it with its verdicts.

        Raises VerifierFailed if too many of the last responses have no verdict.
        """
        outcome = self._sampler.outcome(group)
        self.undecided.popleft()
        if outcome == "trained":
            self._accepted.append(group)
        self._count_judged(group, outcome)

    def drop_undecided(self, judged: Callable[[UndecidedGroup], Group]) -> None:
        """Count the undecided groups as excess, or as aborted if they are not complete.

        `judged` waits for the verdicts of a complete group.
        """
        while self.undecided:
            group = self.undecided[0]
            if group.is_generated:
                self._count_judged(judged(group), "excess")
            elif group.num_tokens:
                self.count_tokens("aborted", group.num_tokens)
            self.undecided.popleft()

    def count_tokens(self, outcome: Outcome, tokens: int) -> None:
        """Count a group of so many tokens that was not judged."""
        self._groups[outcome] = self._groups.get(outcome, 0) + 1
        self._tokens[outcome] = self._tokens.get(outcome, 0) + tokens

    def batch(self, *, epoch: int, prediction: Prediction | None) -> Batch:
        """Return the closed batch."""
        return Batch(
            tuple(self._accepted),
            tuple(self._judged),
            self._groups,
            self._tokens,
            shortfall=self.shortfall,
            epoch=epoch,
            prediction=prediction,
        )

    def _count_judged(self, group: Group, outcome: Outcome) -> None:
        self._judged.append((group, outcome))
        self._groups[outcome] += 1
        self._tokens[outcome] += group.num_tokens
