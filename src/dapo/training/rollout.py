"""Collects one training batch: exactly the groups wanted, and counts of everything else that was generated."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dapo.config import RolloutConfig
from dapo.core.errors import DapoError, RewardError
from dapo.core.rng import keyed_seed
from dapo.data.prompts import Encoder
from dapo.data.stream import ProblemStream
from dapo.engines.engine import RolloutEngine, episode_problem
from dapo.rewards.combine import Judge
from dapo.runs.outcomes import OUTCOMES, Outcome, count_dropped
from dapo.training.dynamic_sampling import DynamicSampler
from dapo.training.selection import Decision, Prediction, ProblemSelector
from dapo.types import Generation, GenerationRequest, Group, Problem, Verdict

VERDICT_LAG_POLLS = 2
"""Polls from a group's last token to its decision: the engine works while verifiers do, and no clock is read."""
TOP_P = 1.0  # training samples from the whole distribution, which the trainer's log-probabilities describe


@dataclass(frozen=True)
class SamplingPlan:
    """How responses are sampled: the same for every request of a run."""

    group_size: int
    max_response_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int
    min_response_tokens: int = 0


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
    judged: tuple[tuple[Group, Outcome], ...]  # every group whose responses were all generated, in the stream's order
    group_counts: Mapping[Outcome, int]
    token_counts: Mapping[Outcome, int]
    shortfall: int  # groups missing from a full batch; above 0 only where `max_groups_per_step` was reached
    epoch: int = 0  # the epoch of the problem after the batch's last one
    prediction: Prediction | None = None
    """The skipped problems and the calibration of predictions, with `dynamic_sampling.predict`."""

    @property
    def weights(self) -> Mapping[int, float]:
        """The loss weight of each group that trains, by its id; a group that is missing weighs 1."""
        return {} if self.prediction is None else self.prediction.weights

    @property
    def decided(self) -> list[tuple[Group, Outcome]]:
        """The judged groups without the excess; they do not depend on the number of groups in flight."""
        return [(group, outcome) for group, outcome in self.judged if outcome != "excess"]

    @property
    def num_generated_tokens(self) -> int:
        """Sampled response tokens of every outcome."""
        return sum(self.token_counts.values())


@dataclass
class _Pending:
    """A submitted group whose outcome is not decided yet."""

    position: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    generations: list[Generation | None]
    missing: int
    texts: tuple[str, ...] = ()
    verdicts: "Future[tuple[Verdict, ...]] | None" = None
    due_poll: int = 0

    def group(self, reward: Callable[[Generation, Verdict], float | None]) -> Group:
        """Wait for the verifier, and return the finished group with its verdicts and rewards."""
        assert self.verdicts is not None
        generations = tuple(g for g in self.generations if g is not None)
        verdicts = self.verdicts.result()
        rewards = tuple(reward(g, v) for g, v in zip(generations, verdicts, strict=True))
        return Group(
            self.problem, self.prompt_ids, generations, verdicts, id=self.position, texts=self.texts, rewards=rewards
        )


@dataclass
class Sampling:
    """The parts that sample a training batch."""

    stream: ProblemStream
    engine: RolloutEngine
    judge: Judge
    sampler: DynamicSampler
    encoder: Encoder
    plan: SamplingPlan
    reward: Callable[[Generation, Verdict], float | None] = lambda generation, verdict: (
        verdict.score if verdict.error is None else None
    )
    """Computes the shaped reward of a response; None where its verdict is an error."""
    selector: ProblemSelector | None = None
    """The selection of problems, set before each step is sampled; None: every problem is sampled."""
    start: "SamplingStart | None" = None  # the state before the newest batch; None once the batch is kept for later
    judge_wait_s: float = 0.0
    """Seconds since the last reported step in which verdicts were outstanding and nothing was left to generate."""

    tokens_since_start: int = 0  # tokens generated for the newest batch, whether it is complete or has failed
    tokens_discarded: int = 0  # tokens generated for batches that were undone

    def roll_back(self, *, finished_steps: int) -> None:
        """Undo the newest batch if its step is not finished: requeue its problems, and restore the keep rate."""
        if self.start is not None and self.start.step > finished_steps:
            self.restart_at(self.start, discarding=self.tokens_since_start)

    def restart_at(self, start: "SamplingStart", *, discarding: int) -> None:
        """Return stream and sampler to the start of a batch, whose generated tokens are discarded."""
        self.tokens_discarded += discarding
        if self.stream.position != start.position:
            self.stream.rewind(start.position)
        self.sampler.load_state_dict(start.sampler)
        self.start = None


class SamplingStart(NamedTuple):
    """The state of stream and sampler before a batch was sampled."""

    step: int  # the step that trains on the batch
    position: int  # the position of the stream
    sampler: Mapping[str, Any]  # the state of the dynamic sampler


def collect(
    sampling: Sampling,
    *,
    step: int,
    on_progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    check: Callable[[], None] = lambda: None,
) -> Batch:
    """Algorithm 1, lines 4 to 8: sample until the batch holds exactly `prompts_per_step` groups that Eq. 11 keeps.

    Groups are accepted in the order in which they were submitted, whichever finishes first. When the batch closes, the
    stream is at the position after the last decided group: later groups are dropped, counted, and sampled again in the
    next step. At `max_groups_per_step` the batch is short.

    The step is a part of every random key. `sampling.start` is set, so that `roll_back` can undo a step that fails.
    `on_progress` gets the number of accepted groups, the number wanted, and the outcomes so far as text. `check` is
    called before each poll of the engine; its error ends the sampling. Raises EngineError if the engine breaks its
    contract, and VerifierFailed if too many responses have no verdict.
    """
    sampling.start = SamplingStart(step, sampling.stream.position, sampling.sampler.state_dict())
    return _Collector(sampling, step, on_progress, check).run()


@dataclass
class _Collector:
    sampling: Sampling
    step: int
    on_progress: Callable[[int, int, str], None]
    check: Callable[[], None]
    undecided: "deque[_Pending]" = field(default_factory=deque)
    by_request: dict[str, tuple[_Pending, int]] = field(default_factory=dict)
    judged: list[tuple[Group, Outcome]] = field(default_factory=list)
    accepted: list[Group] = field(default_factory=list)
    submitted: int = 0
    polls: int = 0
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    decisions: list[Decision] = field(default_factory=list)

    def run(self) -> Batch:
        try:
            batch = self.sample()
        except BaseException as error:
            if isinstance(error, RewardError):  # the engine is intact, and will sample again
                self.abort_all()
            received = (g for pending in self.undecided for g in pending.generations if g is not None)
            self.sampling.tokens_since_start = sum(self.tokens.values()) + sum(g.num_sampled for g in received)
            raise
        self.sampling.tokens_since_start = batch.num_generated_tokens
        return batch

    def sample(self) -> Batch:
        while self.shortfall > 0:
            self.refill()
            if not self.undecided:
                break
            if self.by_request:
                self.check_or_abort()
                self.receive(self.sampling.engine.poll())
                self.polls += 1
            self.classify()
        self.abort_excess()
        return Batch(
            tuple(self.accepted),
            tuple(self.judged),
            self.counts,
            self.tokens,
            shortfall=self.shortfall,
            epoch=self.sampling.stream.epoch,
            prediction=self.prediction(),
        )

    def prediction(self) -> Prediction | None:
        """The decisions on the problems up to the last decided group; later ones come again."""
        if self.sampling.selector is None:
            return None
        final = [each for each in self.decisions if each.position < self.sampling.stream.position]
        judged = [group for group, outcome in self.judged if outcome != "excess"]
        found = self.sampling.selector.summarize(final, judged, self.accepted, scale=self.sampling.sampler.weight_scale)
        self.sampling.sampler.count_selection([(each.probability, each.chance) for each in final])
        return found

    def check_or_abort(self) -> None:
        try:
            self.check()
        except BaseException:
            with suppress(DapoError):  # the error of the check ends the sampling, not this one
                self.abort_all()
            raise

    @property
    def shortfall(self) -> int:
        return self.sampling.sampler.prompts_per_step - len(self.accepted)

    def refill(self) -> None:
        wanted = self.sampling.sampler.in_flight_target(self.shortfall) - len(self.undecided)
        for _ in range(min(wanted, self.sampling.sampler.max_groups_per_step - self.submitted)):
            self.submit_group()

    def next_problem(self) -> tuple[int, Problem]:
        """Take problems from the stream up to one to sample; return its position and the problem."""
        while True:
            position, problem = self.sampling.stream.take()
            if self.sampling.selector is None:
                return position, problem
            self.decisions.append(self.sampling.selector.decide(position, problem))
            if self.decisions[-1].is_sampled:
                return position, problem

    def submit_group(self) -> None:
        plan = self.sampling.plan
        position, problem = self.next_problem()
        prompt_ids = self.sampling.encoder.encode(problem)
        size, task = plan.group_size, episode_problem(self.sampling.engine, problem)
        pending = _Pending(position, problem, prompt_ids, [None] * size, missing=size)
        requests = [
            GenerationRequest(
                id=f"{self.step}/{position}/{i}",
                prompt_ids=prompt_ids,
                max_new_tokens=plan.max_response_tokens,
                temperature=plan.temperature,
                top_p=TOP_P,
                seed=keyed_seed(plan.seed, "token", self.step, position, i),
                stop_ids=plan.stop_ids,
                min_new_tokens=plan.min_response_tokens,
                problem=task,
            )
            for i in range(size)
        ]
        self.sampling.engine.submit(requests)
        self.by_request.update((request.id, (pending, i)) for i, request in enumerate(requests))
        self.undecided.append(pending)
        self.submitted += 1

    def receive(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            pending, i = self.by_request.pop(generation.request_id)
            pending.generations[i] = generation
            pending.missing -= 1
            if pending.missing:
                continue
            responses = [each for each in pending.generations if each is not None]
            ids = [each.token_ids for each in responses]
            pending.texts = tuple(each.text(self.sampling.encoder.decode) for each in responses)
            pending.verdicts = self.sampling.judge.submit(pending.problem, pending.texts, ids)
            pending.due_poll = self.polls + VERDICT_LAG_POLLS

    def classify(self) -> None:
        """Decide groups from the head of the queue; wait for verdicts where nothing is left to generate."""
        while self.undecided and self.shortfall > 0:
            head = self.undecided[0]
            if head.missing or (self.by_request and head.due_poll > self.polls):
                return
            self.undecided.popleft()
            started = time.perf_counter()
            group = head.group(self.sampling.reward)
            if not self.by_request:
                self.sampling.judge_wait_s += time.perf_counter() - started
            if self.sampling.selector is not None:
                self.sampling.selector.require_binary(group)
            outcome = self.sampling.sampler.outcome(group)
            if outcome == "trained":
                self.accepted.append(group)
            self.count_group(group, outcome)
            dropped = count_dropped(self.counts)
            note = f"{len(self.judged)} judged: {dropped}" if dropped else ""
            self.on_progress(len(self.accepted), self.sampling.sampler.prompts_per_step, note)

    def abort_excess(self) -> None:
        """Close the batch right after its last decided group: drop and count later groups, and rewind the stream.

        A problem that was skipped beyond that group is decided again, whether a group was in flight beyond it or not:
        otherwise the end of the batch would depend on the speed of the engine.
        """
        self.sampling.stream.rewind(self.judged[-1][0].id + 1)
        if not self.undecided:
            return
        self.abort_all()
        for pending in self.undecided:
            if pending.missing == 0:
                self.count_group(pending.group(self.sampling.reward), "excess")
            elif tokens := sum(g.num_sampled for g in pending.generations if g is not None):
                self.counts["aborted"] += 1
                self.tokens["aborted"] += tokens

    def abort_all(self) -> None:
        for generation in self.sampling.engine.abort(list(self.by_request)):
            pending, i = self.by_request.pop(generation.request_id)
            pending.generations[i] = generation

    def count_group(self, group: Group, outcome: Outcome) -> None:
        self.judged.append((group, outcome))
        self.counts[outcome] += 1
        self.tokens[outcome] += group.num_tokens


def sampling_plan(rollout: RolloutConfig, stop_ids: Sequence[int], *, seed: int) -> SamplingPlan:
    """Make the plan by which a training run samples."""
    limits = rollout.group_size, rollout.max_response_tokens, rollout.temperature
    return SamplingPlan(*limits, stop_ids=tuple(stop_ids), seed=seed)
