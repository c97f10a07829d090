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
    correction  w = min(pi(theta_{s-1}) / mu(theta_{s-2}), loss.engine_correction) times the token's loss

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
from dapo.core.errors import EngineError, ShortfallError
from dapo.engines.engine import RolloutEngine
from dapo.telemetry.metrics import StepTimer, staleness_metrics
from dapo.training.prefetched_batch import PrefetchedBatch
from dapo.training.rollout import collect
from dapo.training.signals import StoppableEngine
from dapo.training.state import Run, TrainState
from dapo.training.train import conclude, prepare, roll_back_sampling_on_failure, run_steps, sync_engine, update_policy

MAX_STALENESS = 1
"""Steps."""

_POLL_INTERVAL_S = 0.5


def train(config: Config, run: Run, train_state: TrainState) -> None:
    """From `progress.step` to `num_steps`. Raises as the synchronous schedule does, with state saved."""
    run_steps(config, run, train_state, train_step)


def train_step(config: Config, run: Run, train_state: TrainState, *, step: int, timer: StepTimer) -> None:
    """Step s: learn from B_s while B_{s+1} is sampled. It ends when both have."""
    run.stop.check()
    if train_state.prefetched_batch is None:
        train_state.prefetched_batch = sample_first(config, run, train_state, step=step, timer=timer)
    batch = train_state.prefetched_batch.batch
    try:
        with next_batch(config, run, train_state, step=step + 1, timer=timer) as pending_batch:
            samples, metrics = prepare(config, run, batch, step=step, timer=timer)  # line 9
            metrics |= bounded_staleness(staleness_metrics(batch.groups, version=train_state.step))
            with run.stop.deferred():
                pending_batch.raise_if_failed()  # for the last time that both halves can be given up
                updates = update_policy(config, run, train_state, samples, step=step, timer=timer)  # lines 10, 11
                conclude(config, run, train_state, batch, samples, metrics, updates)
                train_state.prefetched_batch = None
                with timer.phase("wait"):
                    train_state.prefetched_batch = pending_batch.result(partial(run.tracker.phase, "generate"))
            timer.add("generate", pending_batch.seconds)
    except ShortfallError:
        requeue(run, train_state)
        raise


def sample_first(config: Config, run: Run, train_state: TrainState, *, step: int, timer: StepTimer) -> PrefetchedBatch:
    """A batch of the policy that the step begins with, where none is ahead."""
    with timer.phase("load_weights"):
        sync_engine(run, train_state)
    with roll_back_sampling_on_failure(run), timer.phase("generate"):
        run.tracker.phase("generate", 0, config.rollout.prompts_per_step)
        return sample(run, run.engine, step=step, on_progress=partial(run.tracker.phase, "generate"))


def sample(run: Run, engine: RolloutEngine, *, step: int, on_progress: Callable[[int, int], None]) -> PrefetchedBatch:
    """Lines 4 to 8 for a step, with the weights that the engine holds."""
    position, sampler = run.stream.position, run.sampler.state_dict()
    batch = collect(
        run.stream,
        engine,
        run.judge,
        run.sampler,
        run.encoder,
        run.plan,
        step=step,
        on_progress=on_progress,
    )
    return PrefetchedBatch(step, batch, position, sampler)


def requeue(run: Run, train_state: TrainState) -> None:
    """Have the problems of the batch ahead drawn anew, from the policy and with the options of that time."""
    if train_state.prefetched_batch is None:
        return
    run.stream.rewind(train_state.prefetched_batch.position)
    run.sampler.load_state_dict(train_state.prefetched_batch.sampler)
    train_state.prefetched_batch, train_state.is_saved = None, False


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
    config: Config, run: Run, train_state: TrainState, *, step: int, timer: StepTimer
) -> "Iterator[PendingBatch | NoPendingBatch]":
    """Inside, the batch of a step is on its way, if the run has that step. Leaving early calls it off."""
    if step > config.train.num_steps:
        yield NoPendingBatch()
        return
    with timer.phase("load_weights"):
        sync_engine(run, train_state)
    with roll_back_sampling_on_failure(run):
        pending_batch = PendingBatch(run, step=step)
        try:
            yield pending_batch
        finally:  # of no effect where the batch has come
            pending_batch.cancel()


class SamplingCancelled(Exception):
    """Ends the sampling thread at its next poll."""


class PendingBatch:
    """A batch on its way, sampled in a thread: until that has ended, stream, engine, judge and sampler are its own."""

    seconds = 0.0
    """How long it took."""

    def __init__(self, run: Run, *, step: int) -> None:
        self._is_cancelled = threading.Event()
        self._accepted = (0, run.sampler.prompts_per_step)
        self._future: Future[PrefetchedBatch] = Future()
        self._thread = threading.Thread(target=self._sample, args=(run, step), name=f"dapo-batch-{step}")
        self._thread.start()

    def check(self) -> None:
        """For the thread: raise SamplingCancelled where that is so."""
        if self._is_cancelled.is_set():
            raise SamplingCancelled

    def raise_if_failed(self) -> None:
        """Raise what has ended the thread, if it has failed by now."""
        if self._future.done():
            self._future.result()

    def result(self, on_progress: Callable[[int, int], None]) -> PrefetchedBatch:
        """Wait for the batch. Raises what has ended the thread without one."""
        while not wait([self._future], timeout=_POLL_INTERVAL_S).done:
            on_progress(*self._accepted)
        self._thread.join()
        return self._future.result()

    def cancel(self) -> None:
        """Have the thread end, and wait until it has."""
        self._is_cancelled.set()
        self._thread.join()

    def _sample(self, run: Run, step: int) -> None:
        started = time.perf_counter()
        try:
            prefetched_batch = sample(run, StoppableEngine(run.engine, self), step=step, on_progress=self._on_progress)
        except BaseException as error:  # raised where the loop looks for the batch
            self._future.set_exception(error)
        else:
            self.seconds = time.perf_counter() - started
            self._future.set_result(prefetched_batch)

    def _on_progress(self, accepted: int, wanted: int) -> None:
        self._accepted = (accepted, wanted)


class NoPendingBatch:
    """What stands in the place of a batch that no step would learn from."""

    seconds = 0.0

    def raise_if_failed(self) -> None:
        """Nothing can fail."""

    def result(self, on_progress: Callable[[int, int], None]) -> PrefetchedBatch | None:
        """No batch."""
        return None
