"""`schedule: one_step_off`: Algorithm 1, where the next batch is sampled while the policy updates.

Let theta_s be the policy after s steps, and theta_0 the initial one.

    theta_0 samples B_1                                             lines 4 to 8
    for step s = 1 .. S:
        beside each other
            theta_{s-1}, in the engine, samples B_{s+1}             lines 4 to 8; not where s = S
            theta_{s-1}, in the trainer, learns from B_s            lines 9 to 11; it becomes theta_s
        evaluate theta_s and save, where due

So from the second step on a batch was sampled by the policy of one step before the one that learns from it: its tokens
are one step stale, those of the first batch not at all, and none ever more than `MAX_STALENESS`. Where pi is what the
trainer computes of a token and mu what the engine does:

    ratio       r = pi(theta) / pi(theta_{s-1}), clipped as ever: pi_old is the policy that the step begins with
    correction  w = min(pi(theta_{s-1}) / mu(theta_{s-2}), loss.engine_correction_cap) times the token's loss

The clip bounds how far one step moves the policy, which has nothing to do with who has sampled; that the responses are
another policy's is what w corrects, truncated so that no token can dominate (`loss.engine_correction: tis`, required).

Between two steps nothing is in flight: a step ends when both of its halves have. So an evaluation has the engine for
itself, with exactly the policy it is to judge, and the state of a run is policy, stream, sampler and the one batch that
is ahead, which a checkpoint holds. Only stream, engine, judge and sampler change hands: they belong to the thread that
samples, from its start to its end, and else to the loop.

A step that is given up before its first update gives up both halves: the batch it was to learn from stays ahead. From
that update on the other half is seen through, signals notwithstanding, because the policy that samples it will be gone.
If it then fails of itself, the next step has no batch ahead and begins, like the first, by sampling from the newest
policy.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

from dapo.config import Config
from dapo.core.errors import EngineError, Starved
from dapo.engines.engine import RolloutEngine
from dapo.telemetry.metrics import Stopwatch, staleness_metrics
from dapo.training.prefetched_batch import Ahead
from dapo.training.rollout import collect
from dapo.training.signals import StoppableEngine
from dapo.training.state import Parts, Progress
from dapo.training.train import conclude, prepare, run_steps, sampling_undone_on_failure, sync_engine, update_policy

MAX_STALENESS = 1
"""Steps."""

_REFRESH_S = 0.5


def train(config: Config, parts: Parts, progress: Progress) -> None:
    """From `progress.step` to `num_steps`. Raises as the synchronous schedule does, with state saved."""
    run_steps(config, parts, progress, train_step)


def train_step(config: Config, parts: Parts, progress: Progress, *, step: int, watch: Stopwatch) -> None:
    """Step s: learn from B_s while B_{s+1} is sampled. It ends when both have."""
    parts.stop.check()
    if progress.ahead is None:
        progress.ahead = sample_first(config, parts, progress, step=step, watch=watch)
    batch = progress.ahead.batch
    try:
        with next_batch(config, parts, progress, step=step + 1, watch=watch) as coming:
            samples, metrics = prepare(config, parts, batch, step=step, watch=watch)  # line 9
            metrics |= bounded_staleness(staleness_metrics(batch.groups, version=progress.step))
            with parts.stop.held():
                coming.raise_failure()  # for the last time that both halves can be given up
                updates = update_policy(config, parts, progress, samples, step=step, watch=watch)  # lines 10, 11
                conclude(config, parts, progress, batch, samples, metrics, updates)
                progress.ahead = None
                with watch.phase("wait"):
                    progress.ahead = coming.result(partial(parts.tracker.phase, "generate"))
            watch.add("generate", coming.seconds)
    except Starved:
        give_back(parts, progress)
        raise


def sample_first(config: Config, parts: Parts, progress: Progress, *, step: int, watch: Stopwatch) -> Ahead:
    """A batch of the policy that the step begins with, where none is ahead."""
    with watch.phase("load_weights"):
        sync_engine(parts, progress)
    with sampling_undone_on_failure(parts), watch.phase("generate"):
        parts.tracker.phase("generate", 0, config.rollout.prompts_per_step)
        return sample(parts, parts.engine, step=step, on_progress=partial(parts.tracker.phase, "generate"))


def sample(parts: Parts, engine: RolloutEngine, *, step: int, on_progress: Callable[[int, int], None]) -> Ahead:
    """Lines 4 to 8 for a step, with the weights that the engine holds."""
    position, sampler = parts.stream.position, parts.sampler.state_dict()
    batch = collect(
        parts.stream,
        engine,
        parts.judge,
        parts.sampler,
        parts.encoder,
        parts.plan,
        step=step,
        on_progress=on_progress,
    )
    return Ahead(step, batch, position, sampler)


def give_back(parts: Parts, progress: Progress) -> None:
    """Have the problems of the batch ahead drawn anew, from the policy and with the options of that time."""
    if progress.ahead is None:
        return
    parts.stream.rewind(progress.ahead.position)
    parts.sampler.load_state_dict(progress.ahead.sampler)
    progress.ahead, progress.is_saved = None, False


def bounded_staleness(metrics: dict[str, float]) -> dict[str, float]:
    """The same metrics. Raises EngineError beyond the bound: the engine did not hold the weights it was given."""
    if not 0 <= metrics.get("rollout/staleness_mean", 0) <= metrics.get("rollout/staleness_max", 0) <= MAX_STALENESS:
        raise EngineError(
            f"the batch is up to {metrics['rollout/staleness_max']:g} steps stale (on average "
            f"{metrics['rollout/staleness_mean']:g}), expected 0 to {MAX_STALENESS}"
        )
    return metrics


@contextmanager
def next_batch(
    config: Config, parts: Parts, progress: Progress, *, step: int, watch: Stopwatch
) -> "Iterator[Coming | NoneComing]":
    """Inside, the batch of a step is on its way, if the run has that step. Leaving early calls it off."""
    if step > config.train.num_steps:
        yield NoneComing()
        return
    with watch.phase("load_weights"):
        sync_engine(parts, progress)
    with sampling_undone_on_failure(parts):
        coming = Coming(parts, step=step)
        try:
            yield coming
        finally:  # of no effect where the batch has come
            coming.call_off()


class CalledOff(Exception):
    """Ends the sampling thread at its next poll."""


class Coming:
    """A batch on its way, sampled in a thread: until that has ended, stream, engine, judge and sampler are its own."""

    seconds = 0.0
    """How long it took."""

    def __init__(self, parts: Parts, *, step: int) -> None:
        self._is_called_off = threading.Event()
        self._accepted = (0, parts.sampler.prompts_per_step)
        self._outcome: Future[Ahead] = Future()
        self._thread = threading.Thread(target=self._sample, args=(parts, step), name=f"dapo-batch-{step}")
        self._thread.start()

    def check(self) -> None:
        """For the thread: raise CalledOff where that is so."""
        if self._is_called_off.is_set():
            raise CalledOff

    def raise_failure(self) -> None:
        """Raise what has ended the thread, if it has failed by now."""
        if self._outcome.done():
            self._outcome.result()

    def result(self, on_progress: Callable[[int, int], None]) -> Ahead:
        """Wait for the batch. Raises what has ended the thread without one."""
        while not wait([self._outcome], timeout=_REFRESH_S).done:
            on_progress(*self._accepted)
        self._thread.join()
        return self._outcome.result()

    def call_off(self) -> None:
        """Have the thread end, and wait until it has."""
        self._is_called_off.set()
        self._thread.join()

    def _sample(self, parts: Parts, step: int) -> None:
        started = time.perf_counter()
        try:
            ahead = sample(parts, StoppableEngine(parts.engine, self), step=step, on_progress=self._note)
        except BaseException as error:  # raised where the loop looks for the batch
            self._outcome.set_exception(error)
        else:
            self.seconds = time.perf_counter() - started
            self._outcome.set_result(ahead)

    def _note(self, accepted: int, wanted: int) -> None:
        self._accepted = (accepted, wanted)


class NoneComing:
    """What stands in the place of a batch that no step would learn from."""

    seconds = 0.0

    def raise_failure(self) -> None:
        """Nothing can fail."""

    def result(self, on_progress: Callable[[int, int], None]) -> Ahead | None:
        """No batch."""
        return None
