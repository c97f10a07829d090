"""Samples batches ahead of the updates (`schedule: async`): groups that are undecided when a batch
closes go on in the next one, and new weights can come in the middle of a batch.

Let the batch of step b close. A group is kept whose first token was sampled by theta_v with
b - v <= `max_staleness`; an older one begins again in its place. The engine suspends the responses
of kept groups, and resumes them with the weights that it then has. With a `lookahead` of 0 nothing
is kept, and a batch is sampled as in `batch.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from threading import Event

from dapo.engines.engine import Unfinished
from dapo.sampling.batch import BatchCollector, Sampling, SamplingStart
from dapo.sampling.queue import Batch, UndecidedGroup
from dapo.sampling.selection import Decision, ProblemSelector
from dapo.types import Generation, Problem, Verdict

_CHECK_INTERVAL_S = 0.5


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
    texts: tuple[str, ...] = ()  # of a complete group
    verdicts: "Future[tuple[Verdict, ...]] | None" = None
    lag: int = 0  # polls until its verdicts count

    @property
    def version(self) -> int | None:
        """The version of the weights that sampled its first token; None: it has none."""
        generations = map(generation_of, self.responses)
        return min((part.version for part in generations if part.token_ids), default=None)

    @property
    def unfinished(self) -> list[Unfinished]:
        """The suspended responses."""
        return [response for response in self.responses if isinstance(response, Unfinished)]

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(generation_of(response).num_sampled for response in self.responses)

    def close(self) -> None:
        """Give up its suspended responses."""
        for response in self.unfinished:
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


@dataclass(frozen=True)
class PrefetchedBatch:
    """The next step's batch, and the state of stream and sampler before it was sampled."""

    batch: Batch
    start: SamplingStart


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
class ContinuousSampling(Sampling):
    """A sampling whose undecided groups continue in the next batch."""

    max_staleness: int = 1
    """The largest age in steps of the weights that sampled a trained token, from 2 on with kept
    groups.
    """
    lookahead: Callable[[int], int] = lambda step: 0
    """Returns how many batches after that of a step have groups in flight during it."""
    kept: Kept = Kept()
    """The groups that were undecided when the last batch closed."""
    kept_at_start: Kept = Kept()
    """Those with which the newest batch began."""
    new_weights: NewWeights | None = None
    """The weights that the engine takes in the middle of the batch; None: it keeps its weights."""

    @classmethod
    def of(
        cls, sampling: Sampling, *, max_staleness: int, lookahead: Callable[[int], int]
    ) -> "ContinuousSampling":
        """Make one of the parts of a sampling."""
        parts = {part.name: getattr(sampling, part.name) for part in fields(sampling)}
        return cls(**parts, max_staleness=max_staleness, lookahead=lookahead)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.kept_at_start = self.kept

    def collector(
        self,
        step: int,
        selector: ProblemSelector | None,
        on_progress: Callable[[int, int, str], None],
        check: Callable[[], None],
    ) -> BatchCollector:
        return ContinuousCollector(self, step, selector, on_progress, check)

    def undo(self, start: SamplingStart) -> None:
        super().undo(start)
        self.kept = self.kept_at_start

    def prefetched(self, batch: Batch) -> PrefetchedBatch:
        """Return the newest batch to keep for later, which `roll_back` no longer undoes.

        To sample it again is to begin its kept groups again: its start is at the first of them.
        """
        assert self.start is not None
        start = self.start
        if self.kept_at_start.groups:
            start = start._replace(position=self.kept_at_start.groups[0].position)
        self.start = None
        return PrefetchedBatch(batch, start)

    def expect_weights(self, version: int) -> NewWeights | None:
        """Return the weights that the next batch takes as soon as they exist, or None.

        Only with `rollout.clock: load`, because the update's end is not part of a run's history.
        """
        self.new_weights = NewWeights(version) if self.by_load else None
        return self.new_weights

    def discard_kept(self) -> None:
        """Give up the kept groups; their problems come again."""
        requeue_kept(self, self.kept)
        self.kept = Kept()


def restore_kept(sampling: Sampling, kept: Kept) -> None:
    """Continue with the kept groups of a checkpoint; where the options keep none, requeue them."""
    if isinstance(sampling, ContinuousSampling) and sampling.max_staleness > 1:
        sampling.kept = kept
    else:
        requeue_kept(sampling, kept)


def requeue_kept(sampling: Sampling, kept: Kept) -> None:
    """Return the problems of kept groups to the stream, and count their tokens as discarded."""
    if kept.groups:
        sampling.tokens_discarded += kept.num_tokens
        sampling.stream.rewind(kept.groups[0].position)
        for group in kept.groups:
            group.close()


@dataclass
class ContinuousCollector(BatchCollector):
    """Samples one batch, and begins later ones."""

    sampling: ContinuousSampling
    recomputed_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        before = self.sampling.kept_at_start.num_tokens
        # the tokens of responses in flight are unknown
        return max(0, self.queue.num_tokens + self.sampling.kept.num_tokens - before)

    @property
    def lookahead(self) -> int:
        """The number of later batches whose groups are begun."""
        return self.sampling.lookahead(self.step)

    def sample(self) -> None:
        self.go_on()
        super().sample()
        self.sample_until_the_update_ends()

    def refill(self) -> None:
        for _ in range(self.num_to_submit(lookahead=self.lookahead)):
            self.submit_next()

    def poll(self) -> None:
        self.check_or_abort()
        self.take_new_weights()
        self.advance()

    def close(self) -> Batch:
        return replace(super().close(), recomputed_tokens=self.recomputed_tokens)

    def leave_undecided(self, end: int) -> None:
        """Keep the undecided groups for the next batch, or drop them if none follows."""
        if self.lookahead:
            self.keep(end)
        else:
            super().leave_undecided(end)

    def sample_until_the_update_ends(self) -> None:
        """Go on with the groups of later batches while the step still updates; decide none of them.

        Only with `rollout.clock: load`, because the update's end is not part of a run's history.
        """
        new = self.sampling.new_weights
        while self.lookahead and new is not None and not self.queue.is_open:
            self.refill()
            if not self.in_flight or new.exist.is_set():
                return
            self.check_or_abort()
            self.advance()

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
                group, i = self.in_flight.pop(part.generation.request_id)
                group.responses[i] = part.generation
                part.close()
            raise
        self.resume(parts)

    def suspend(self) -> list[Unfinished]:
        """Stop all requests, receive the responses that have just ended, and return the rest."""
        responses = self.sampling.engine.suspend(list(self.in_flight))
        self.receive([response for response in responses if not isinstance(response, Unfinished)])
        return [response for response in responses if isinstance(response, Unfinished)]

    def resume(self, parts: Sequence[Unfinished]) -> None:
        """Resume suspended responses of groups in flight, whose tokens are read again."""
        requests = []
        prompts = {}
        for part in parts:
            group, i = self.in_flight[part.generation.request_id]
            requests.append(
                self.sampling.request(
                    group.step, group.position, i, group.problem, group.prompt_ids
                )
            )
            if tokens := len(part.generation.token_ids):
                self.recomputed_tokens += tokens
                prompts[group.position] = len(group.prompt_ids)
        self.recomputed_tokens += sum(prompts.values())
        if requests:
            self.sampling.engine.resume(requests, parts)

    def go_on(self) -> None:
        """Resume the kept groups, and restart those that are too old or do not fit the options."""
        kept = self.sampling.kept
        self.sampling.kept = Kept()
        self.decisions.extend(kept.decisions)
        parts: list[Unfinished] = []
        for group in kept.groups:
            if self.can_go_on(group):
                self.queue.add(self.undecided(group))
                parts += group.unfinished
            else:
                self.give_up(group)
                self.submit(group.position, group.problem, group.prompt_ids)
        self.resume(parts)

    def can_go_on(self, group: KeptGroup) -> bool:
        """Return True if a kept group fits the staleness and sizes, which may have changed."""
        limit = self.sampling.plan.max_response_tokens
        has_room = all(part.generation.num_sampled < limit for part in group.unfinished)
        return bool(group.responses) and has_room and self.is_fresh(group.version, self.step - 1)

    def is_fresh(self, version: int | None, closed: int) -> bool:
        """Return True if a group may train after step `closed`, by its first token's version."""
        return version is None or closed - version <= self.sampling.max_staleness

    def undecided(self, kept: KeptGroup) -> UndecidedGroup:
        """Return a kept group as one of this batch, with its suspended responses in flight."""
        group = UndecidedGroup(
            kept.step,
            kept.position,
            kept.problem,
            kept.prompt_ids,
            [None if isinstance(part, Unfinished) else part for part in kept.responses],
            texts=kept.texts,
            verdicts=kept.verdicts,
            due_poll=kept.lag,
        )
        for i, response in enumerate(kept.responses):
            if isinstance(response, Unfinished):
                self.in_flight[response.generation.request_id] = group, i
        return group

    def keep(self, end: int) -> None:
        """Suspend undecided groups for the next batch; those with too old a token restart there."""
        suspended: dict[int, dict[int, Unfinished]] = {}  # by position and index in the group
        for part in self.suspend():
            group, i = self.in_flight.pop(part.generation.request_id)
            suspended.setdefault(group.position, {})[i] = part
        kept = []
        for group in self.queue.undecided:
            candidate = self.kept_group(group, suspended.get(group.position, {}))
            if self.is_fresh(candidate.version, self.step):
                kept.append(candidate)
            else:
                self.give_up(candidate)
                kept.append(KeptGroup(self.step, group.position, group.problem, group.prompt_ids))
        self.queue.undecided.clear()
        decisions = [decision for decision in self.decisions if decision.position >= end]
        self.sampling.kept = Kept(tuple(kept), tuple(decisions))
        # the engine may still hold keys and values of the suspended responses: it begins anew
        self.sampling.engine_version = None

    def kept_group(self, group: UndecidedGroup, suspended: Mapping[int, Unfinished]) -> KeptGroup:
        """Return an undecided group as it goes on, with its suspended responses by their index."""
        return KeptGroup(
            group.step,
            group.position,
            group.problem,
            group.prompt_ids,
            tuple(
                suspended[i] if response is None else response
                for i, response in enumerate(group.responses)
            ),
            texts=group.texts,
            verdicts=group.verdicts,
            lag=max(0, group.due_poll - self.polls),
        )

    def give_up(self, group: KeptGroup) -> None:
        """Count what was generated of a group that begins again."""
        group.close()
        if group.num_tokens:
            self.queue.count_tokens("stale", group.num_tokens)
