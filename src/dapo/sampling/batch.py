"""Collects one training batch: exactly the groups wanted, and counts of everything else that was
generated.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple, cast

from dapo.config import RolloutConfig
from dapo.core.errors import DapoError, RewardError
from dapo.core.rng import keyed_seed
from dapo.data.prompts import Encoder
from dapo.data.stream import ProblemStream
from dapo.engines.continuation import SuspendableEngine, Unfinished
from dapo.engines.engine import RolloutEngine, episode_problem
from dapo.rewards.combine import Judge
from dapo.runs.outcomes import COUNTED, Outcome, count_dropped
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.sampling.selection import Decision, Prediction, ProblemSelector
from dapo.types import Generation, GenerationRequest, Group, Problem, Verdict

VERDICT_LAG_POLLS = 2
"""Polls from a group's last token to its decision (`rollout.clock: history`): the engine works
while verifiers do.
"""
_CHECK_INTERVAL_S = 0.5
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


@dataclass(frozen=True)
class KeptGroup:
    """A group that was undecided when a batch closed, and goes on in the next one."""

    step: int  # the step in whose batch it was begun, a part of its random keys
    position: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    responses: tuple[Generation | Unfinished, ...] = ()
    """The finished and the suspended responses; empty: it begins again, because its first token was
    too old.
    """
    version: int | None = None  # of the weights that sampled its first token; None: it has none
    texts: tuple[str, ...] = ()  # of a complete group
    verdicts: "Future[tuple[Verdict, ...]] | None" = None
    lag: int = 0  # polls until its verdicts count

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(generation_of(response).num_sampled for response in self.responses)

    def close(self) -> None:
        """Give up its suspended responses."""
        for response in self.responses:
            if isinstance(response, Unfinished):
                response.close()


def generation_of(response: Generation | Unfinished) -> Generation:
    """Return the tokens of a response so far."""
    return response.generation if isinstance(response, Unfinished) else response


@dataclass(frozen=True)
class Kept:
    """Undecided groups that continue in the next batch, and the decisions on their problems."""

    groups: tuple[KeptGroup, ...] = ()
    decisions: tuple[Decision, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(group.num_tokens for group in self.groups)


@dataclass
class _Pending:
    """A submitted group whose outcome is not decided yet."""

    step: int
    position: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    generations: list[Generation | None]
    missing: int
    texts: tuple[str, ...] = ()
    verdicts: "Future[tuple[Verdict, ...]] | None" = None
    due_poll: int = 0
    suspended: dict[int, Unfinished] = field(default_factory=dict)

    def group(self, reward: Callable[[Generation, Verdict], float | None]) -> Group:
        """Wait for the verifier, and return the finished group with its verdicts and rewards."""
        assert self.verdicts is not None
        generations = tuple(g for g in self.generations if g is not None)
        verdicts = self.verdicts.result()
        rewards = tuple(reward(g, v) for g, v in zip(generations, verdicts, strict=True))
        return Group(
            self.problem,
            self.prompt_ids,
            generations,
            verdicts,
            id=self.position,
            texts=self.texts,
            rewards=rewards,
        )


class NewWeights:
    """Weights that updates make while a thread samples; the engine takes them inside a batch."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.exist = Event()
        self.wanted: Future[None] = Future()
        """Has a result once nothing is in flight: the trainer's thread may load the weights."""
        self.are_loaded = Event()

    def take(self, check: Callable[[], None]) -> None:
        """Let the trainer's thread load them, and wait; `check` may end the wait by an error."""
        self.wanted.set_result(None)
        while not self.are_loaded.wait(_CHECK_INTERVAL_S):
            check()


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
    """The selection of problems, set before each step is sampled; None: every problem is sampled.
    """
    # the state before the newest batch; None once the batch is kept for later
    start: "SamplingStart | None" = None
    max_staleness: int = 0
    """The largest age in steps of the weights that sampled a trained token, from 2 on with a
    SuspendableEngine.
    """
    lookahead: int = 0
    """Number of batches after the present one whose groups are begun already, set before each step
    is sampled.
    """
    kept: Kept = Kept()
    """The groups that were undecided when the last batch closed."""
    by_load: bool = False
    """Whether verdicts and new weights take effect as soon as they are there (`rollout.clock:
    load`).
    """
    new_weights: NewWeights | None = None
    """The weights that the engine takes in the middle of the batch; None: it keeps its weights."""
    has_suspended: bool = False
    """Whether the engine has suspended responses since its weights were loaded."""
    judge_wait_s: float = 0.0
    """Seconds since the last reported step in which verdicts were outstanding and nothing was left
    to generate.
    """

    # tokens generated for the newest batch, whether it is complete or has failed
    tokens_since_start: int = 0
    tokens_discarded: int = 0  # tokens generated for batches that were undone

    def roll_back(self, *, finished_steps: int) -> None:
        """Undo the batch of an unfinished step: requeue its problems, and restore the keep rate."""
        if self.start is not None and self.start.step > finished_steps:
            self.restart_at(self.start, discarding=self.tokens_since_start)

    def restart_at(self, start: "SamplingStart", *, discarding: int) -> None:
        """Reset stream and sampler to the start of a batch, and discard its tokens."""
        self.tokens_discarded += discarding
        self.stream.seek(start.position)
        self.sampler.load_state_dict(start.sampler)
        self.kept = start.kept
        self.start = None

    def discard_kept(self) -> None:
        """Give up the kept groups; their problems come again."""
        if self.kept.groups:
            self.tokens_discarded += self.kept.num_tokens
            self.stream.rewind(self.kept.groups[0].position)
            for group in self.kept.groups:
                group.close()
            self.kept = Kept()

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


class SamplingStart(NamedTuple):
    """The state of stream and sampler before a batch was sampled."""

    step: int  # the step that trains on the batch
    position: int  # the position of the stream
    sampler: Mapping[str, Any]  # the state of the dynamic sampler
    kept: Kept = Kept()

    @property
    def without_kept(self) -> "SamplingStart":
        """Return the state with kept groups restarted: the stream at the first undecided one."""
        first = self.kept.groups[0].position if self.kept.groups else self.position
        return self._replace(position=first, kept=Kept())


def collect(
    sampling: Sampling,
    *,
    step: int,
    on_progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    check: Callable[[], None] = lambda: None,
) -> Batch:
    """Algorithm 1, lines 4 to 8: sample until Eq. 11 has kept `prompts_per_step` groups.

    Groups are accepted in the order in which they were submitted, whichever finishes first. When
    the batch closes, the stream is at the position after the last decided group: later groups are
    dropped, counted, and sampled again in the next step. At `max_groups_per_step` the batch is
    short.

    With `sampling.lookahead` later groups are kept instead, in `sampling.kept`: the engine suspends
    what runs, and the next call goes on with it. Let the batch of step b close: a group is kept
    whose first token was sampled by theta_v with b - v <= `sampling.max_staleness`, and an older
    one begins again in its place.

    The step is a part of every random key. `sampling.start` is set, so that `roll_back` can undo a
    step that fails. `on_progress` gets the number of accepted groups, the number wanted, and the
    outcomes so far as text. `check` is called before each poll of the engine; its error ends the
    sampling. Raises EngineError if the engine breaks its contract, and VerifierFailed if too many
    responses have no verdict.
    """
    sampling.start = SamplingStart(
        step, sampling.stream.position, sampling.sampler.state_dict(), sampling.kept
    )
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
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    tokens: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    decisions: list[Decision] = field(default_factory=list)
    recomputed_tokens: int = 0
    polls: int = 0

    def run(self) -> Batch:
        try:
            batch = self.sample()
        except BaseException as error:
            if isinstance(error, RewardError):  # the engine is intact, and will sample again
                self.abort_all()
            received = (
                g for pending in self.undecided for g in pending.generations if g is not None
            )
            self.count_since_start(sum(self.tokens.values()) + sum(g.num_sampled for g in received))
            raise
        self.count_since_start(batch.num_generated_tokens + self.sampling.kept.num_tokens)
        return batch

    def count_since_start(self, tokens: int) -> None:
        assert self.sampling.start is not None
        self.sampling.tokens_since_start = max(0, tokens - self.sampling.start.kept.num_tokens)

    def sample(self) -> Batch:
        self.go_on()
        while self.is_open:
            self.refill()
            if not self.undecided:
                break
            if self.by_request:
                self.check_or_abort()
                self.take_new_weights()
                self.receive(self.sampling.engine.poll())
                self.polls += 1
            self.classify()
        self.sample_until_the_update_ends()
        shortfall = self.shortfall
        end = self.judged[-1][0].id + 1
        if self.sampling.lookahead:
            self.keep(end)
        else:
            self.abort_excess(end)
        return Batch(
            tuple(self.accepted),
            tuple(self.judged),
            self.counts,
            self.tokens,
            shortfall=shortfall,
            epoch=end // len(self.sampling.stream),
            prediction=self.prediction(end),
            recomputed_tokens=self.recomputed_tokens,
        )

    def prediction(self, end: int) -> Prediction | None:
        """Return the decisions on the problems up to the last decided group."""
        if self.sampling.selector is None:
            return None
        final = [decision for decision in self.decisions if decision.position < end]
        judged = [group for group, outcome in self.judged if outcome != "excess"]
        return self.sampling.selector.summarize(final, judged)

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

    @property
    def is_open(self) -> bool:
        """True if the batch needs and may have another group."""
        return self.shortfall > 0 and len(self.judged) < self.sampling.sampler.max_groups_per_step

    def refill(self) -> None:
        sampler = self.sampling.sampler
        lookahead = self.sampling.lookahead
        target = sampler.in_flight_target(self.shortfall + lookahead * sampler.prompts_per_step)
        most = (1 + lookahead) * sampler.max_groups_per_step - self.submitted
        for _ in range(min(target - len(self.undecided), most)):
            position, problem = self.next_problem()
            self.submit_group(position, problem, self.sampling.encoder.encode(problem))

    def sample_until_the_update_ends(self) -> None:
        """Go on with the groups of later batches while the step still updates; decide none of them.

        Only with `rollout.clock: load`, because the update's end is no matter of history.
        """
        new = self.sampling.new_weights
        while self.sampling.lookahead and new is not None and not self.is_open:
            self.refill()
            if not self.by_request or new.exist.is_set():
                return
            self.check_or_abort()
            self.receive(self.sampling.engine.poll())
            self.polls += 1

    def take_new_weights(self) -> None:
        """Continue with the weights that the trainer has made since, if this poll has any."""
        new = self.sampling.new_weights
        if new is None or not new.exist.is_set():
            return
        self.sampling.new_weights = None
        parts = self.suspend()
        try:
            new.take(self.check)
        except BaseException:
            for part in parts:  # the engine knows none of them
                pending, i = self.by_request.pop(part.generation.request_id)
                pending.generations[i] = part.generation
                part.close()
            raise
        self.resume(parts)

    def suspend(self) -> list[Unfinished]:
        """Stop all requests, receive the responses that have just ended, and return the rest."""
        responses = self.engine.suspend(list(self.by_request))
        self.receive([response for response in responses if not isinstance(response, Unfinished)])
        return [response for response in responses if isinstance(response, Unfinished)]

    def resume(self, parts: Sequence[Unfinished]) -> None:
        """Resume suspended responses of groups in `by_request`, whose tokens are read again."""
        requests = []
        prompts = {}
        for part in parts:
            pending, i = self.by_request[part.generation.request_id]
            prompt_ids = pending.prompt_ids
            requests.append(
                self.sampling.request(
                    pending.step, pending.position, i, pending.problem, prompt_ids
                )
            )
            if tokens := len(part.generation.token_ids):
                self.recomputed_tokens += tokens
                prompts[pending.position] = len(prompt_ids)
        self.recomputed_tokens += sum(prompts.values())
        if requests:
            self.engine.resume(requests, parts)

    def go_on(self) -> None:
        """Resume the kept groups, and restart those that are too old or do not fit the options."""
        suspended = self.sampling.kept
        self.sampling.kept = Kept()
        self.decisions.extend(suspended.decisions)
        parts: list[Unfinished] = []
        for group in suspended.groups:
            if not self.can_go_on(group):
                self.count_stale(group)
                self.submit_group(group.position, group.problem, group.prompt_ids)
                continue
            pending = self.add(
                _Pending(group.step, group.position, group.problem, group.prompt_ids, [], missing=0)
            )
            pending.texts = group.texts
            pending.verdicts = group.verdicts
            pending.due_poll = group.lag
            for i, response in enumerate(group.responses):
                pending.generations.append(None if isinstance(response, Unfinished) else response)
                if isinstance(response, Unfinished):
                    self.by_request[response.generation.request_id] = pending, i
                    pending.missing += 1
                    parts.append(response)
        self.resume(parts)

    def can_go_on(self, group: KeptGroup) -> bool:
        """Return True if a kept group fits the staleness and sizes, which may have changed."""
        parts = [
            response.generation for response in group.responses if isinstance(response, Unfinished)
        ]
        has_room = all(part.num_sampled < self.sampling.plan.max_response_tokens for part in parts)
        return has_room and self.is_fresh(group.version, self.step - 1) and bool(group.responses)

    def is_fresh(self, version: int | None, closed: int) -> bool:
        """Return True if a group may train after step `closed`, by its first token's version."""
        return version is None or closed - version <= self.sampling.max_staleness

    @property
    def engine(self) -> SuspendableEngine:
        return cast(SuspendableEngine, self.sampling.engine)

    def add(self, pending: _Pending) -> _Pending:
        self.undecided.append(pending)
        self.submitted += 1
        return pending

    def next_problem(self) -> tuple[int, Problem]:
        """Take problems from the stream up to one to sample; return position and problem."""
        while True:
            position, problem = self.sampling.stream.take()
            if self.sampling.selector is None:
                return position, problem
            self.decisions.append(self.sampling.selector.decide(position, problem))
            if self.decisions[-1].is_sampled:
                return position, problem

    def submit_group(self, position: int, problem: Problem, prompt_ids: tuple[int, ...]) -> None:
        size = self.sampling.plan.group_size
        pending = self.add(
            _Pending(self.step, position, problem, prompt_ids, [None] * size, missing=size)
        )
        requests = [
            self.sampling.request(self.step, position, i, problem, prompt_ids) for i in range(size)
        ]
        self.sampling.engine.submit(requests)
        self.by_request.update((request.id, (pending, i)) for i, request in enumerate(requests))

    def receive(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            pending, i = self.by_request.pop(generation.request_id)
            pending.generations[i] = generation
            pending.missing -= 1
            if pending.missing:
                continue
            responses = [generation for generation in pending.generations if generation is not None]
            ids = [response.token_ids for response in responses]
            pending.texts = tuple(
                response.text(self.sampling.encoder.decode) for response in responses
            )
            pending.verdicts = self.sampling.judge.submit(pending.problem, pending.texts, ids)
            pending.due_poll = self.polls + VERDICT_LAG_POLLS

    def classify(self) -> None:
        """Decide groups from the head of the queue; wait for verdicts if nothing is generated."""
        while self.undecided and self.is_open:
            head = self.undecided[0]
            if head.missing or (self.by_request and not self.is_due(head)):
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

    def is_due(self, head: _Pending) -> bool:
        """Return True if the verdicts of a finished group count at this poll."""
        if not self.sampling.by_load:
            return head.due_poll <= self.polls
        assert head.verdicts is not None
        return head.verdicts.done()

    def keep(self, end: int) -> None:
        """Suspend undecided groups for the next batch; those with too old a token restart there."""
        for response in self.suspend():
            pending, i = self.by_request.pop(response.generation.request_id)
            pending.suspended[i] = response
        groups = []
        for group in map(self.kept_group, self.undecided):
            if self.is_fresh(group.version, self.step):
                groups.append(group)
            else:
                self.count_stale(group)
                groups.append(KeptGroup(self.step, group.position, group.problem, group.prompt_ids))
        decisions = [decision for decision in self.decisions if decision.position >= end]
        self.sampling.kept = Kept(tuple(groups), tuple(decisions))
        self.sampling.has_suspended = True

    def kept_group(self, pending: _Pending) -> KeptGroup:
        responses = tuple(
            generation if generation is not None else pending.suspended[i]
            for i, generation in enumerate(pending.generations)
        )
        versions = [
            generation_of(response).version
            for response in responses
            if generation_of(response).token_ids
        ]
        return KeptGroup(
            pending.step,
            pending.position,
            pending.problem,
            pending.prompt_ids,
            responses,
            min(versions, default=None),
            pending.texts,
            pending.verdicts,
            max(0, pending.due_poll - self.polls),
        )

    def count_stale(self, group: KeptGroup) -> None:
        """Count what is given up of a group that begins again."""
        group.close()
        if group.num_tokens:
            self.counts["stale"] = self.counts.get("stale", 0) + 1
            self.tokens["stale"] = self.tokens.get("stale", 0) + group.num_tokens

    def abort_excess(self, end: int) -> None:
        """Close the batch after its last decided group: drop later groups, rewind the stream.

        A problem that was skipped beyond that group is decided again, whether a group was in flight
        beyond it or not: otherwise the end of the batch would depend on the speed of the engine.
        """
        self.sampling.stream.rewind(end)
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
