"""`make simulate ARGS="--max-staleness 0 1 2 4"`: how long a step takes for each bound, with the
real controller.

Responses have log-normal lengths, and a group carries a signal with a probability of a third. An
engine without a model counts the seconds that it would take: a decode step in 12 ms and 20 us per
running sequence, all sequences running at once. An update takes as long as generation does with `sync`, or
`--update-share` of it, on other hardware. A simulated token stands for TOKENS of them.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.scripted_engine import ScriptedEngine
from benchmarks.simulation_fakes import KEEP_RATE, LengthDistribution, num_right
from dapo.config.options import GPU_OVERSAMPLING
from dapo.config.rollout_options import ClockKind
from dapo.data.stream import ProblemStream
from dapo.engines.continuation import ContinuingEngine
from dapo.sampling.batch import SamplingPlan, collect
from dapo.sampling.continuous import ContinuousSampling, NewWeights
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.sampling.queue import Batch
from dapo.sampling.rollout_metrics import staleness_metrics
from dapo.types import Finish, Generation, GenerationRequest, Problem, Verdict

TOKENS = 64
STEP_S = 0.012
SEQUENCE_S = 20e-6
END = 1
FILL = 2
GROUP_SIZE = 16
MINIBATCHES = 16
UNCOUNTED = 4
"""First steps, in which the keep rate is learned and the first batches are begun."""


class ClockedEngine(ScriptedEngine):
    """Counts the seconds that its polls would take, and the processor time of its own."""

    def __init__(
        self,
        lengths: LengthDistribution,
        *,
        step_s: float = STEP_S,
        sequence_s: float = SEQUENCE_S,
        slots: int | None = None,
    ) -> None:
        """`slots`: the sequences that run at a time; None: all."""
        super().__init__(lambda request: response(lengths.length(request.seed)))
        self.seconds = self.own_s = 0.0
        self._step_s = step_s
        self._sequence_s = sequence_s
        self._free = math.inf if slots is None else slots
        self._waiting: deque[str] = deque()
        # the poll in which each running sequence ends, as a dictionary and as a queue
        self._ends: dict[str, int] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._num_started = 0

    def poll(self) -> list[Generation]:
        self.seconds += TOKENS * (self._step_s + self._sequence_s * len(self._ends))
        with self.timed():
            self.polls += 1
            finished = []
            while self._queue and self._queue[0][0] <= self.polls:
                end, _, name = heapq.heappop(self._queue)
                if self._ends.get(name) == end:
                    finished.append(self._sequences.pop(name))
                    self._leave(name)
            self._start()
            return [self._generation(seq.request, seq.token_ids, seq.finish) for seq in finished]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self.timed():
            super().submit(requests)
            self._waiting.extend(request.id for request in requests)
            self._start()

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        with self.timed():
            for name in request_ids:
                sequence = self._sequences[name]
                end = self._ends.get(name, self.polls + sequence.delay)
                sequence.polls = sequence.delay - (end - self.polls)
                self._leave(name)
            stopped = super().abort(request_ids)
            self._start()
            return stopped

    def _start(self) -> None:
        """Let waiting sequences run while slots are free."""
        while self._waiting and self._free > 0:
            name = self._waiting.popleft()
            if name not in self._sequences:  # it was aborted
                continue
            end = self.polls + self._sequences[name].delay
            self._ends[name] = end
            self._num_started += 1
            heapq.heappush(self._queue, (end, self._num_started, name))
            self._free -= 1

    def _leave(self, name: str) -> None:
        """Free the slot of a sequence, if it has one."""
        if self._ends.pop(name, None) is not None:
            self._free += 1

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the block as the engine's own, which is elsewhere in a run."""
        began = time.process_time()
        try:
            yield
        finally:
            self.own_s += time.process_time() - began


def response(length: int) -> tuple[Sequence[int], Finish]:
    """A response of about so many tokens."""
    return [FILL] * (length // TOKENS) + [END], "stop"


class SimulatedWeights(NewWeights):
    """The weights of an update that ends at a moment of the engine's seconds."""

    def __init__(self, engine: ClockedEngine, version: int, at: float) -> None:
        super().__init__(version)
        self.engine = engine
        self.at = at
        self.exist.is_set = lambda: engine.seconds >= at  # type: ignore[method-assign]

    def take(self, check: Callable[[], None]) -> None:
        """Load them."""
        self.engine.load_weights(None, self.version)  # type: ignore[arg-type]


class Judge:
    """A problem carries a signal with a given probability; the others are all right or all wrong."""

    def __init__(self, keep_rate: float = KEEP_RATE) -> None:
        self._keep_rate = keep_rate

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        count = len(responses)
        right = num_right(int(problem.id), count, keep_rate=self._keep_rate)
        future: Future[tuple[Verdict, ...]] = Future()
        future.set_result(
            tuple(Verdict(i < right, 1.0 if i < right else -1.0) for i in range(count))
        )
        return future

    def close(self) -> None:
        """Nothing is open."""


class Encoder:
    """A prompt is its number."""

    def encode(self, problem: Problem) -> tuple[int, ...]:
        return (int(problem.id),)

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    decode_prompt = decode


@dataclass(frozen=True)
class Row:
    """Means over the counted steps of one bound."""

    eta: int
    step_s: float
    generation_s: float
    staleness: float
    largest: int
    recomputed: float  # tokens read again, per generated token
    stale: float  # the fraction of generated tokens that were given up
    controller_s: float  # of this machine's time, per close


@dataclass
class SimulatedUpdates:
    """The updates of one step after the other, on hardware of their own."""

    update_s: float
    """Seconds of a step's updates."""
    early: bool
    """Whether each begins when its minibatch is complete, or all when the batch has closed."""
    ended_at: list[float] = field(default_factory=list)
    """When those of each step had ended."""

    def make(self, accepted_at: Sequence[float], closed_at: float) -> None:
        """Make those of a batch, whose groups were accepted and which closed at these times."""
        end = self.end_of(-1)
        for i in range(MINIBATCHES):
            last = len(accepted_at) * (i + 1) // MINIBATCHES - 1
            complete_at = accepted_at[last] if self.early else closed_at
            end = max(end, complete_at) + self.update_s / MINIBATCHES
        self.ended_at.append(end)

    def end_of(self, index: int) -> float:
        """Return when the updates of a step had ended; index -1 is the newest one."""
        return self.ended_at[index] if len(self.ended_at) >= abs(index) else 0.0


def simulate(
    eta: int,
    *,
    prompts: int,
    steps: int,
    update_s: float,
    clock: ClockKind = "history",
    early: bool = False,
) -> Row:
    """Sample `steps` batches under a bound, with updates of so many seconds a step.

    `early`: an update begins when its minibatch is complete.
    """
    lengths = LengthDistribution(20480, 5000.0)
    engine = ClockedEngine(lengths)
    sampling = ContinuousSampling(
        stream=ProblemStream([Problem(str(i), "", "") for i in range(17_000)], seed=0),
        engine=ContinuingEngine(engine),
        judge=Judge(),
        sampler=DynamicSampler(prompts_per_step=prompts, max_groups_per_step=10 * prompts),
        encoder=Encoder(),
        plan=SamplingPlan(GROUP_SIZE, 20480 // TOKENS + 1, 1.0, (END,), 0),
        max_staleness=eta,
        lookahead=lambda step: max(0, min(eta // 2, steps - step)),
        by_load=clock == "load",
        oversampling=GPU_OVERSAMPLING,
    )
    updates = SimulatedUpdates(update_s, early)
    batches: list[Batch] = []
    generation: list[float] = []
    controller: list[float] = []
    began_at: list[float] = []
    waited_s = 0.0  # for weights, which the engine's seconds leave out
    for step in range(1, steps + 1):
        engine.load_weights(None, max(0, step - 1 - min(eta, 1)))  # type: ignore[arg-type]
        weights_at = updates.end_of(-2 if eta else -1)
        waited_s += max(0.0, weights_at - (engine.seconds + waited_s))
        before = engine.seconds
        began_at.append(before + waited_s)
        accepted_at: list[float] = []
        own = engine.own_s
        if clock == "load" and eta and step > 1:
            sampling.new_weights = SimulatedWeights(engine, step - 1, updates.end_of(-1) - waited_s)

        def note_accepted(
            accepted: int,
            total: int,
            outcomes: str,
            times: list[float] = accepted_at,
            waited_s: float = waited_s,
        ) -> None:
            if accepted > len(times):
                times.append(engine.seconds + waited_s)

        began = time.process_time()
        batches.append(collect(sampling, step=step, on_progress=note_accepted))
        controller.append(time.process_time() - began - (engine.own_s - own))
        generation.append(engine.seconds - before)
        updates.make(accepted_at, engine.seconds + waited_s)
    counted = range(UNCOUNTED, steps - max(1, eta))
    ages = [staleness_metrics(batches[i].groups, version=i) for i in counted]
    tokens = sum(batches[i].num_generated_tokens for i in counted)
    return Row(
        eta,
        (began_at[counted.stop] - began_at[counted.start]) / len(counted),
        fmean(generation[i] for i in counted),
        fmean(age["rollout/staleness_mean"] for age in ages),
        int(max(age["rollout/staleness_max"] for age in ages)),
        sum(batches[i].recomputed_tokens for i in counted) / tokens,
        sum(batches[i].token_counts.get("stale", 0) for i in counted) / tokens,
        fmean(controller[i] for i in counted),
    )


def table(
    etas: Sequence[int],
    *,
    prompts: int,
    steps: int,
    update_share: float = 1.0,
    clock: ClockKind = "history",
    early: bool = False,
) -> str:
    """A row for each bound, as Markdown.

    An update takes that share of the generation's time with a bound of 0.
    """
    generation_s = simulate(0, prompts=prompts, steps=steps, update_s=0.0).generation_s
    update_s = update_share * generation_s
    sync_s = generation_s + update_s
    rows = [
        simulate(
            eta,
            prompts=prompts,
            steps=steps,
            update_s=update_s,
            clock=clock,
            early=early and eta > 0,
        )
        for eta in etas
    ]
    lines = [
        (
            "| max_staleness | s per step | times sync | generation, s | mean staleness | largest "
            "| tokens read again per generated one | given up | controller, s per step |"
        ),
        "|" + " --- |" * 9,
    ]
    lines += [
        f"| {row.eta} | {row.step_s:,.0f} | {sync_s / row.step_s:.2f} |"
        f" {row.generation_s:,.0f} | {row.staleness:.2f} | {row.largest} | {row.recomputed:.2f} |"
        f" {row.stale:.1%} | {row.controller_s:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)
