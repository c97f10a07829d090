"""Samples one training batch: exactly the groups wanted, and counts of everything else that was
generated. What is in flight when the batch closes is aborted, and comes again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dapo.config import RolloutConfig
from dapo.core.errors import DapoError, RewardError
from dapo.core.rng import keyed_seed
from dapo.data.prompts import Encoder
from dapo.data.stream import ProblemStream
from dapo.engines.engine import SuspendableEngine, WeightSource, episode_problem
from dapo.rewards.combine import Judge
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.sampling.queue import Batch, GroupQueue, UndecidedGroup
from dapo.sampling.selection import Decision, Prediction, ProblemSelector
from dapo.types import Generation, GenerationRequest, Problem, Verdict

VERDICT_LAG_POLLS = 2
"""Polls from a group's last token to its decision (`rollout.clock: history`): the engine works
while verifiers do.
"""
# training samples from the whole distribution, which the trainer's log-probabilities describe
TOP_P = 1.0


@dataclass(frozen=True)
class SamplingPlan:
    """How responses are sampled: the same for every request of a run."""

    group_size: int
    max_response_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int
    min_response_tokens: int = 0


def sampling_plan(rollout: RolloutConfig, stop_ids: Sequence[int], *, seed: int) -> SamplingPlan:
    """Make the plan by which a training run samples."""
    return SamplingPlan(
        rollout.group_size,
        rollout.max_response_tokens,
        rollout.temperature,
        stop_ids=tuple(stop_ids),
        seed=seed,
    )


class SamplingStart(NamedTuple):
    """The state of stream and sampler before a batch was sampled."""

    step: int  # the step that trains on the batch
    position: int  # the position of the stream
    sampler: Mapping[str, Any]  # the state of the dynamic sampler


class WeightOwner(Protocol):
    """The method of a policy that gives its weights to an engine."""

    def weights(self, *, version: int) -> WeightSource: ...


@dataclass
class Sampling:
    """The parts that sample training batches, and what is known of the newest batch."""

    stream: ProblemStream
    engine: SuspendableEngine
    judge: Judge
    sampler: DynamicSampler
    encoder: Encoder
    plan: SamplingPlan
    reward: Callable[[Generation, Verdict], float | None] = lambda generation, verdict: (
        verdict.score if verdict.error is None else None
    )
    """Computes the shaped reward of a response; None where its verdict is an error."""
    by_load: bool = False
    """Whether verdicts take effect as soon as they are there (`rollout.clock: load`)."""
    oversampling: float = 0.0
    """The largest share of groups in flight beyond the expected number."""
    slots: int | None = None
    """The sequences that the engines decode at a time; None: all that are in flight."""

    engine_version: int | None = None  # version of the engine's weights; None: load them
    start: SamplingStart | None = None  # the state before the newest batch
    # tokens generated for the newest batch, whether it is complete or has failed
    tokens_since_start: int = 0
    tokens_discarded: int = 0  # tokens generated for batches that were undone
    judge_wait_s: float = 0.0
    """Seconds since the last reported step in which verdicts were outstanding and nothing was left
    to generate.
    """

    def sync_weights(self, policy: WeightOwner, *, version: int) -> None:
        """Load the policy's weights into the engine, unless it has them."""
        if self.engine_version != version:
            self.engine.load_weights(policy.weights(version=version), version=version)
            self.engine_version = version

    def drop_weights(self) -> None:
        """Free the engine's weights while the policy updates; the next step loads new ones."""
        self.engine.drop_weights()
        self.engine_version = None

    def pop_judge_wait_s(self) -> float:
        """Return the seconds in `judge_wait_s`, and count from 0."""
        seconds = self.judge_wait_s
        self.judge_wait_s = 0.0
        return seconds

    def begin(self, step: int) -> None:
        """Note the state before the batch of a step, to which `roll_back` returns."""
        self.start = SamplingStart(step, self.stream.position, self.sampler.state_dict())

    def collector(
        self,
        step: int,
        selector: ProblemSelector | None,
        on_progress: Callable[[int, int, str], None],
        check: Callable[[], None],
    ) -> "BatchCollector":
        """Return what samples the batch of a step."""
        return BatchCollector(self, step, selector, on_progress, check)

    def roll_back(self, *, finished_steps: int) -> None:
        """Undo the batch of an unfinished step: requeue its problems, and restore the keep rate."""
        if self.start is not None and self.start.step > finished_steps:
            self.undo(self.start)

    def undo(self, start: SamplingStart) -> None:
        """Return to the state before the newest batch, and discard its tokens."""
        self.restart_at(start, discarding=self.tokens_since_start)

    def restart_at(self, start: SamplingStart, *, discarding: int) -> None:
        """Reset stream and sampler to the start of a batch, and count its tokens as discarded."""
        self.tokens_discarded += discarding
        self.stream.seek(start.position)
        self.sampler.load_state_dict(start.sampler)
        self.start = None

    def request(
        self, step: int, position: int, i: int, problem: Problem, prompt_ids: tuple[int, ...]
    ) -> GenerationRequest:
        """Return the request for response `i` of a group that is begun in the batch of a step."""
        plan = self.plan
        return GenerationRequest(
            id=f"{step}/{position}/{i}",
            prompt_ids=prompt_ids,
            max_new_tokens=plan.max_response_tokens,
            temperature=plan.temperature,
            top_p=TOP_P,
            seed=keyed_seed(plan.seed, "token", step, position, i),
            stop_ids=plan.stop_ids,
            min_new_tokens=plan.min_response_tokens,
            problem=episode_problem(self.engine, problem),
        )


def collect(
    sampling: Sampling,
    *,
    step: int,
    selector: ProblemSelector | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    check: Callable[[], None] = lambda: None,
) -> Batch:
    """Algorithm 1, lines 4 to 8: sample until Eq. 11 has kept `prompts_per_step` groups.

    Groups are accepted in the order in which they were submitted, whichever finishes first. When
    the batch closes, the stream is at the position after the last decided group: later groups are
    dropped, counted, and sampled again in the next step; a `ContinuousSampling` keeps them instead.
    At `max_groups_per_step` the batch is short.

    Args:
        sampling: The parts. `sampling.roll_back` can undo the batch, whether it failed or not.
        step: The step that trains on the batch, a part of every random key.
        selector: Selects the problems; None: every problem is sampled.
        on_progress: Gets the number of accepted groups, the number wanted, and the outcomes so far
            as text.
        check: Is called before each poll of the engine; its error ends the sampling.

    Raises EngineError if the engine breaks its contract, and VerifierFailed if too many responses
    have no verdict.
    """
    sampling.begin(step)
    return sampling.collector(step, selector, on_progress, check).run()


@dataclass
class BatchCollector:
    """Samples one batch: refills the engine, polls it, and decides groups in the stream's order."""

    sampling: Sampling
    step: int
    selector: ProblemSelector | None
    on_progress: Callable[[int, int, str], None]
    check: Callable[[], None]
    queue: GroupQueue = field(init=False)
    # by the id of each request in flight: its group, and its index in it
    in_flight: dict[str, tuple[UndecidedGroup, int]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    polls: int = 0

    def __post_init__(self) -> None:
        self.queue = GroupQueue(self.sampling.sampler)

    def run(self) -> Batch:
        """Return the batch; what fails counts its tokens in `sampling.tokens_since_start`."""
        try:
            self.sample()
            return self.close()
        except RewardError:  # the engine is intact, and will sample again
            self.abort_all()
            raise
        finally:
            self.sampling.tokens_since_start = self.num_new_tokens

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens that were generated for this batch."""
        return self.queue.num_tokens

    def sample(self) -> None:
        """Sample until the batch is full, or has had `max_groups_per_step` groups."""
        while self.queue.is_open:
            self.refill()
            if not self.queue.undecided:
                return
            if self.in_flight:
                self.poll()
            self.decide()

    def close(self) -> Batch:
        """Close the batch after its last decided group."""
        end = self.queue.end
        self.leave_undecided(end)
        epoch = end // len(self.sampling.stream)
        return self.queue.batch(epoch=epoch, prediction=self.prediction(end))

    def leave_undecided(self, end: int) -> None:
        """Drop the undecided groups, and rewind the stream to the end of the batch.

        A problem that was skipped beyond that is decided again, whether a group was in flight
        beyond it or not: otherwise the end of the batch would depend on the speed of the engine.
        """
        self.sampling.stream.rewind(end)
        if self.queue.undecided:
            self.abort_all()
            self.queue.drop_undecided(lambda group: group.judged(self.sampling.reward))

    def prediction(self, end: int) -> Prediction | None:
        """Return the decisions on the problems up to the last decided group."""
        if self.selector is None:
            return None
        final = [decision for decision in self.decisions if decision.position < end]
        return self.selector.summarize(final, self.queue.decided)

    def refill(self) -> None:
        """Submit groups until as many are in flight as the batch will most likely need."""
        for _ in range(self.num_to_submit(lookahead=0)):
            self.submit_next()

    def num_to_submit(self, *, lookahead: int) -> int:
        """Return how many groups to begin, of this batch and of `lookahead` later ones."""
        slots = math.inf if self.sampling.slots is None else self.sampling.slots
        size = self.sampling.plan.group_size
        return self.queue.num_to_submit(
            oversampling=self.sampling.oversampling,
            engine_groups=slots / size,
            free_groups=(slots - len(self.in_flight)) / size,
            lookahead=lookahead,
        )

    def submit_next(self) -> None:
        position, problem = self.next_problem()
        self.submit(position, problem, self.sampling.encoder.encode(problem))

    def next_problem(self) -> tuple[int, Problem]:
        """Take problems from the stream up to one to sample; return position and problem."""
        while True:
            position, problem = self.sampling.stream.take()
            if self.selector is None:
                return position, problem
            self.decisions.append(self.selector.decide(position, problem))
            if self.decisions[-1].is_sampled:
                return position, problem

    def submit(self, position: int, problem: Problem, prompt_ids: tuple[int, ...]) -> None:
        """Submit the requests of a new group."""
        size = self.sampling.plan.group_size
        group = UndecidedGroup(self.step, position, problem, prompt_ids, [None] * size)
        self.queue.add(group)
        requests = [
            self.sampling.request(self.step, position, i, problem, prompt_ids) for i in range(size)
        ]
        self.sampling.engine.submit(requests)
        self.in_flight.update((request.id, (group, i)) for i, request in enumerate(requests))

    def poll(self) -> None:
        """Advance the engine, unless `check` ends the sampling."""
        self.check_or_abort()
        self.advance()

    def advance(self) -> None:
        """Advance the engine, and receive what it has finished."""
        self.receive(self.sampling.engine.poll())
        self.polls += 1

    def check_or_abort(self) -> None:
        try:
            self.check()
        except BaseException:
            with suppress(DapoError):  # the error of the check ends the sampling, not this one
                self.abort_all()
            raise

    def receive(self, generations: Sequence[Generation]) -> None:
        """Receive finished responses; those of a complete group go to the verifier."""
        for generation in generations:
            group, i = self.in_flight.pop(generation.request_id)
            group.responses[i] = generation
            responses = [response for response in group.responses if response is not None]
            if len(responses) == len(group.responses):
                group.texts = tuple(
                    response.text(self.sampling.encoder.decode) for response in responses
                )
                ids = [response.token_ids for response in responses]
                group.verdicts = self.sampling.judge.submit(group.problem, group.texts, ids)
                group.due_poll = self.polls + VERDICT_LAG_POLLS

    def decide(self) -> None:
        """Decide groups from the head of the queue; wait for verdicts if nothing is generated."""
        while self.queue.undecided and self.queue.is_open:
            head = self.queue.undecided[0]
            if head.verdicts is None or (self.in_flight and not self.is_due(head, head.verdicts)):
                return
            started = time.perf_counter()
            group = head.judged(self.sampling.reward)
            if not self.in_flight:
                self.sampling.judge_wait_s += time.perf_counter() - started
            if self.selector is not None:
                self.selector.require_binary(group)
            self.queue.decide(group)
            self.on_progress(
                self.queue.num_accepted,
                self.sampling.sampler.prompts_per_step,
                self.queue.progress_note,
            )

    def is_due(self, head: UndecidedGroup, verdicts: "Future[tuple[Verdict, ...]]") -> bool:
        """Return True if the verdicts of a generated group count at this poll."""
        return verdicts.done() if self.sampling.by_load else head.due_poll <= self.polls

    def abort_all(self) -> None:
        """Abort the requests in flight, whose groups get the tokens so far."""
        for generation in self.sampling.engine.abort(list(self.in_flight)):
            group, i = self.in_flight.pop(generation.request_id)
            group.responses[i] = generation
