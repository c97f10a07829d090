"""Dynamic sampling: engine + verifier + stream -> exactly one batch of groups, and the account of what it cost."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from dapo.algo.sampling import ScoreThresholds, is_informative
from dapo.config import Config
from dapo.core.errors import EngineError, RewardError, ShortfallError
from dapo.core.rng import keyed_seed
from dapo.data.prompts import Encoder
from dapo.data.stream import ProblemStream
from dapo.engines.engine import RolloutEngine
from dapo.rewards.judge import Judge
from dapo.rewards.workers.error_window import RollingErrorRate
from dapo.types import Generation, GenerationRequest, Group, Problem, Verdict

Outcome: TypeAlias = Literal[
    "trained", "all_correct", "all_wrong", "zero_variance", "filtered", "invalid", "excess", "aborted"
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# A group's verdicts are looked at this many polls after its last token: the engine goes on while verifiers work, and
# what is submitted next depends on polls, never on the clock.
VERDICT_LAG_POLLS = 2


@dataclass(frozen=True)
class SamplingPlan:
    """How responses are sampled: the same for every request of a run."""

    group_size: int
    max_response_tokens: int
    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    seed: int
    min_response_tokens: int = 0


@dataclass(frozen=True)
class Batch:
    """A step's groups, and everything that was generated for them."""

    groups: tuple[Group, ...]
    """Those that train, in the order of the stream."""
    judged: tuple[tuple[Group, Outcome], ...]
    """Every group whose responses were all generated, in the order of the stream."""
    group_counts: Mapping[Outcome, int]
    token_counts: Mapping[Outcome, int]
    shortfall: int
    """Groups missing from a full batch: above 0 only where max_groups_per_step was reached."""
    reason: str = ""
    """For a short batch: why, with counts."""
    epoch: int = 0
    """Of the problem that came next when the batch closed."""

    @property
    def num_generated_groups(self) -> int:
        """Groups of which at least one token was generated."""
        return sum(self.group_counts.values())

    @property
    def num_generated_tokens(self) -> int:
        """Response tokens of every fate."""
        return sum(self.token_counts.values())


class DynamicSampler:
    """Eq. 11 as a decision on each group, and a running keep rate that says how many to have in flight."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_groups_per_step: int,
        enabled: bool = True,
        keep: Callable[[Group], bool] | None = None,
        thresholds: ScoreThresholds | None = None,
        max_error_rate: float = 1.0,
    ) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_groups_per_step = max_groups_per_step
        self._enabled = enabled
        self._keep = keep
        self._thresholds = thresholds
        self._decay = 1.0 - 1.0 / (4 * prompts_per_step)  # the keep rate of about the last four batches
        self._kept = self._decided = 1.0
        self._errors = RollingErrorRate(max_error_rate)

    def outcome(self, group: Group) -> Outcome:
        """What becomes of a judged group; counts towards the keep rate.

        Raises VerifierFailed where `max_error_rate` of the last responses is exceeded.
        """
        self._errors.add(group.problem.id, group.texts or [""] * len(group.verdicts), group.verdicts)
        outcome = self._outcome_of(group)
        self._kept = self._decay * self._kept + (outcome == "trained")
        self._decided = self._decay * self._decided + 1.0
        return outcome

    def in_flight_target(self, shortfall: int) -> int:
        """Undecided groups to have submitted so that, at the running keep rate, the shortfall is just met."""
        return math.ceil(shortfall * self._decided / max(self._kept, 0.1))

    def state_dict(self) -> dict[str, Any]:
        """The running keep rate and the window of verifier errors; JSON keeps both exactly."""
        return {"kept": self._kept, "decided": self._decided, "errors": self._errors.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved state."""
        self._kept, self._decided = float(state["kept"]), float(state["decided"])
        self._errors.load(state.get("errors", ()))

    def _outcome_of(self, group: Group) -> Outcome:
        valid = [verdict for verdict in group.verdicts if verdict.error is None]
        if len(valid) < 2:
            return "invalid"
        if not self._enabled:
            return "trained"
        if self._keep is not None:
            return "trained" if self._user_keeps(group) else "filtered"
        if is_informative(group.verdicts):
            return "trained" if self._thresholds is None or self._thresholds.is_met_by(group.verdicts) else "filtered"
        if any(verdict.correct is None for verdict in valid):
            return "zero_variance"
        return "all_correct" if valid[0].correct else "all_wrong"

    def _user_keeps(self, group: Group) -> bool:
        assert self._keep is not None
        try:
            answer = self._keep(group)
        except Exception as error:
            raise RewardError(
                f"dynamic_sampling.filter raised {type(error).__name__}: {error}; it must take a Group, return a bool"
            ) from error
        if not isinstance(answer, bool):
            raise RewardError(f"dynamic_sampling.filter must return a bool, got {answer!r}")
        return answer


@dataclass
class _Pending:
    """A submitted group that is not yet decided."""

    position: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    generations: list[Generation | None]
    missing: int
    texts: tuple[str, ...] = ()
    verdicts: "Future[tuple[Verdict, ...]] | None" = None
    due_poll: int = 0

    def group(self) -> Group:
        """The finished group with its verdicts; waits for the verifier."""
        assert self.verdicts is not None
        generations = tuple(g for g in self.generations if g is not None)
        return Group(
            self.problem, self.prompt_ids, generations, self.verdicts.result(), id=self.position, texts=self.texts
        )


def collect(
    stream: ProblemStream,
    engine: RolloutEngine,
    judge: Judge,
    sampler: DynamicSampler,
    encoder: Encoder,
    plan: SamplingPlan,
    *,
    step: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Batch:
    """Algorithm 1, lines 4 to 8: sample until the batch holds exactly `prompts_per_step` groups that Eq. 11 keeps.

    Groups are accepted in the order in which they were submitted, whichever finishes first. When the batch closes the
    stream stands right after the last decided problem: later groups are dropped, counted, and drawn again next step.
    At `max_groups_per_step` the batch is short, and `reason` says why. Raises EngineError if the engine breaks its
    contract and VerifierFailed if too many responses have no verdict.
    """
    return _Collector(stream, engine, judge, sampler, encoder, plan, step, on_progress).run()


@dataclass
class _Collector:
    stream: ProblemStream
    engine: RolloutEngine
    judge: Judge
    sampler: DynamicSampler
    encoder: Encoder
    plan: SamplingPlan
    step: int
    on_progress: Callable[[int, int], None]
    undecided: "deque[_Pending]" = field(default_factory=deque)
    by_request: dict[str, tuple[_Pending, int]] = field(default_factory=dict)
    judged: list[tuple[Group, Outcome]] = field(default_factory=list)
    accepted: list[Group] = field(default_factory=list)
    submitted: int = 0
    polls: int = 0
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))

    def run(self) -> Batch:
        while self.shortfall > 0:
            self.refill()
            if not self.undecided:
                break
            if self.by_request:
                self.receive(self.engine.poll())
                self.polls += 1
            self.classify()
        self.abort_excess()
        reason = self.explain_shortfall() if self.shortfall else ""
        return Batch(
            tuple(self.accepted),
            tuple(self.judged),
            self.counts,
            self.tokens,
            shortfall=self.shortfall,
            reason=reason,
            epoch=self.stream.epoch,
        )

    @property
    def shortfall(self) -> int:
        return self.sampler.prompts_per_step - len(self.accepted)

    def refill(self) -> None:
        wanted = self.sampler.in_flight_target(self.shortfall) - len(self.undecided)
        for _ in range(min(wanted, self.sampler.max_groups_per_step - self.submitted)):
            self.submit_group()

    def submit_group(self) -> None:
        position, problem = self.stream.take()
        prompt_ids = self.encoder.encode(problem)
        size = self.plan.group_size
        pending = _Pending(position, problem, prompt_ids, [None] * size, missing=size)
        requests = [
            GenerationRequest(
                id=f"{self.step}/{position}/{i}",
                prompt_ids=prompt_ids,
                max_new_tokens=self.plan.max_response_tokens,
                temperature=self.plan.temperature,
                top_p=self.plan.top_p,
                seed=keyed_seed(self.plan.seed, "token", self.step, position, i),
                stop_ids=self.plan.stop_ids,
                min_new_tokens=self.plan.min_response_tokens,
            )
            for i in range(size)
        ]
        self.engine.submit(requests)
        self.by_request.update((request.id, (pending, i)) for i, request in enumerate(requests))
        self.undecided.append(pending)
        self.submitted += 1

    def receive(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            if generation.request_id not in self.by_request:
                raise EngineError(
                    f"the engine answered request {generation.request_id!r}, which is not in flight (unknown, or "
                    "answered twice)"
                )
            pending, i = self.by_request.pop(generation.request_id)
            pending.generations[i] = generation
            pending.missing -= 1
            if pending.missing == 0:
                self.send_to_judge(pending)

    def send_to_judge(self, pending: _Pending) -> None:
        ids = [generation.token_ids for generation in pending.generations if generation is not None]
        pending.texts = tuple(self.encoder.decode(response) for response in ids)
        pending.verdicts = self.judge.submit(pending.problem, pending.texts, ids)
        pending.due_poll = self.polls + VERDICT_LAG_POLLS

    def classify(self) -> None:
        """Decide from the head of the queue; with nothing left to generate there is no reason to wait."""
        while self.undecided and self.shortfall > 0:
            head = self.undecided[0]
            if head.missing or (self.by_request and head.due_poll > self.polls):
                return
            self.undecided.popleft()
            group = head.group()
            outcome = self.sampler.outcome(group)
            if outcome == "trained":
                self.accepted.append(group)
            self.count_group(group, outcome)
            self.on_progress(len(self.accepted), self.sampler.prompts_per_step)

    def abort_excess(self) -> None:
        """The batch is closed: what was submitted beyond it is dropped, counted, and goes back to the stream."""
        if not self.undecided:
            return
        self.stream.rewind(self.undecided[0].position)
        for generation in self.engine.abort(list(self.by_request)):
            pending, i = self.by_request.pop(generation.request_id)
            pending.generations[i] = generation
        if self.by_request:
            raise EngineError(f"the engine did not answer the abort of {next(iter(self.by_request))!r}")
        for pending in self.undecided:
            if pending.missing == 0:
                self.count_group(pending.group(), "excess")
            elif tokens := sum(len(g.token_ids) for g in pending.generations if g is not None):
                self.counts["aborted"] += 1
                self.tokens["aborted"] += tokens

    def count_group(self, group: Group, outcome: Outcome) -> None:
        self.judged.append((group, outcome))
        self.counts[outcome] += 1
        self.tokens[outcome] += group.num_tokens

    def explain_shortfall(self) -> str:
        decided = [group for group, outcome in self.judged if outcome != "excess"]
        causes = {
            "all wrong": self.counts["all_wrong"],
            "all correct": self.counts["all_correct"],
            "scores without spread": self.counts["zero_variance"],
            "refused by dynamic_sampling.filter": self.counts["filtered"],
            "with fewer than two valid verdicts": self.counts["invalid"],
        }
        message = ", ".join(f"{count} {cause}" for cause, count in causes.items() if count)
        errors = [v.error for group in decided for v in group.verdicts if v.error is not None]
        if errors:
            message += f"; {len(errors)} verifier errors, most often: {Counter(errors).most_common(1)[0][0]}"
        return (
            f"{len(decided)} groups were judged (dynamic_sampling.max_groups_per_step) and {len(self.accepted)} of the "
            f"{self.sampler.prompts_per_step} wanted carry a signal: {message}"
        )


def require_groups(batch: Batch) -> None:
    """Raise ShortfallError where there is no group to train on; a short batch trains."""
    if not batch.groups:
        raise ShortfallError(
            f"{batch.reason}. Choose problems nearer to what the model can do, raise rollout.group_size or "
            "dynamic_sampling.max_groups_per_step, or look at the responses in rollouts/"
        )


def sampling_plan(config: Config, stop_ids: Sequence[int]) -> SamplingPlan:
    """How a training run samples."""
    return SamplingPlan(
        group_size=config.rollout.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        top_p=1.0,
        stop_ids=tuple(stop_ids),
        seed=config.train.seed,
        min_response_tokens=config.rollout.min_response_tokens,
    )
