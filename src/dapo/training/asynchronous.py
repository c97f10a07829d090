"""`schedule: async`: Algorithm 1, where the engine samples while the policy updates, with a bound
on the staleness.

Let theta_s be the policy after s steps, theta_0 the initial one, and eta = `max_staleness`, from 1
on (0 is `sync`).

    theta_0 samples B_1                                             lines 4 to 8
    for step s = 1 .. S:
        at the same time
            theta_{s-1}, in the engine, samples B_{s+1}             lines 4 to 8; not where s = S
            theta_{s-1}, in the trainer, learns from B_s            lines 9 to 11; it becomes theta_s
        evaluate theta_s and save, where due

A batch closes with its last group, in the order of the stream. Weights change only then. With eta =
1 later groups are dropped and come again, so a batch has the tokens of one policy. With eta >= 2
the engine works eta // 2 batches ahead: a group that is undecided when B_b closes is kept if its
first token was sampled by theta_v with b - v <= eta, and goes on under the next weights; an older
one begins again in its place. So the staleness of every trained token, s - 1 less the version that
sampled it, is 0 to eta: a group begun during B_b was begun by theta_{b-2}, and trains in step b at
staleness 1; one that trains in step b + 1 was kept when B_b closed, at b - v <= eta.
`bounded_staleness` checks it.

In the words of the field theta is the current policy, theta_{s-1}, with which the step begins, the
proximal policy (pi_prox), and the one that sampled a token, whatever its version, the behaviour
policy (mu):

    J = E[ min(pi_prox / mu, c) x min(u A, clip(u) A) ]             u = pi_theta / pi_prox, c = loss.engine_correction

The clip bounds how far one step moves the policy, whichever policies have sampled. The factor
corrects for responses of other policies, and is truncated so that no token can dominate
(`loss.engine_correction: tis`, required).

A step ends when both of its halves have, so nothing runs between two steps. An evaluation then has
the engine to itself, with exactly the policy that is evaluated, and the state of a run is policy,
stream, sampler, the prefetched batch and the kept groups, which a checkpoint holds. Stream, engine,
judge and sampler belong to the sampling thread while it runs, and otherwise to the loop. No clock
is read: two runs, or a run and its resumption, are equal.

With `rollout.clock: load` an engine whose batch has closed samples for later batches until the
updates have ended, and one whose batch has not takes the weights of theta_s at once. Neither two
runs nor a run and its resumption are equal.

A step that fails before its first update undoes both halves, and its batch stays prefetched. After
that update the other half is always finished, even if a signal comes, because its policy will be
gone. If it fails, the next step has no prefetched batch and begins, like the first, by sampling
from the newest policy.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import Any

from dapo.core.errors import EngineError, ShortfallError
from dapo.sampling.batch import collect
from dapo.sampling.continuous import ContinuousSampling, PrefetchedBatch
from dapo.sampling.queue import Batch
from dapo.sampling.rollout_metrics import staleness_metrics
from dapo.sampling.selection import ProblemSelector
from dapo.training.state import Run
from dapo.training.step_metrics import report_step, rollouts_in_background

_POLL_INTERVAL_S = 0.5


def step(run: Run, number: int) -> None:
    """Take a step; lines that differ from `train.on_policy_step` are marked with a star."""
    run.stop.check()
    batch = prefetched_batch(run, step=number)  # * sampled during the step before
    is_last = run.config.train.is_budget_spent(
        run.state.tokens_generated + batch.num_generated_tokens
    )
    # * lines 2 to 8 of the next step, in a thread
    with next_batch(run, step=number + 1, is_last=is_last) as pending:
        samples = run.estimate_advantages(batch, step=number)  # line 9
        with rollouts_in_background(run, batch, samples) as text_metrics:
            updates = run.prepare_updates(samples, step=number)  # line 10
        staleness = bounded_staleness(run, batch)  # *
        with run.stop.deferred():
            if pending is not None:
                pending.raise_if_failed()  # * the last time that both halves can be undone
            for minibatch in run.track("update", updates):
                run.state.updates.append(run.policy.update(minibatch, step=number))  # line 11
            report_step(run, batch, samples, text_metrics | staleness)
            # freed now, not while the trainer waits for the next ones
            del batch, samples, updates
            run.state.prefetched_batch = await_batch(run, pending)  # *
    if pending is None:
        sampling_of(run).discard_kept()  # * of batches beyond `train.token_budget`


def sampling_of(run: Run) -> ContinuousSampling:
    """Return the run's sampling, which keeps what it has begun for later batches."""
    assert isinstance(run.sampling, ContinuousSampling)
    return run.sampling


def prefetched_batch(run: Run, *, step: int) -> Batch:
    """Return the prefetched batch, or sample one now with the policy that begins the step."""
    if run.state.prefetched_batch is None:
        selector = run.begin_sampling(step)
        batch = run.sample_batch(step, selector)
        run.state.prefetched_batch = sampling_of(run).prefetched(batch)
    return run.state.prefetched_batch.batch


def requeue(run: Run) -> None:
    """Requeue the prefetched problems, which a resumed run samples with its own policy."""
    if run.state.prefetched_batch is None:
        return
    prefetched = run.state.prefetched_batch
    run.sampling.roll_back(finished_steps=run.state.step)  # the batch after it
    if isinstance(run.sampling, ContinuousSampling):
        run.sampling.discard_kept()
    run.sampling.restart_at(prefetched.start, discarding=prefetched.batch.num_generated_tokens)
    run.state.prefetched_batch = None
    run.state.is_saved = False


def bounded_staleness(run: Run, batch: Batch) -> dict[str, float]:
    """Return the metrics of staleness.

    Raises EngineError beyond `max_staleness`: the engine had the wrong weights.
    """
    metrics = staleness_metrics(batch.groups, version=run.state.step)
    most = run.config.max_staleness
    if (
        not 0
        <= metrics.get("rollout/staleness_min", 0)
        <= metrics.get("rollout/staleness_max", 0)
        <= most
    ):
        raise EngineError(
            f"the tokens of the batch are {metrics['rollout/staleness_min']:g} to"
            f" {metrics['rollout/staleness_max']:g} steps stale, expected 0 to {most}"
            " (max_staleness)"
        )
    if run.config.suspends_responses:
        metrics["rollout/recomputed_tokens"] = batch.recomputed_tokens
        return metrics
    return {name: value for name, value in metrics.items() if not name.endswith("_min")}


@contextmanager
def next_batch(run: Run, *, step: int, is_last: bool = False) -> "Iterator[PendingBatch | None]":
    """Sample the batch of a step while the block runs; None after the last step.

    Leaving early cancels the sampling.

    `is_last`: the step before is the last, though it is not `train.num_steps`. If the block raises
    ShortfallError, the batch that it trains on is requeued as well.
    """
    if is_last or step > run.config.train.num_steps:
        pending = None
    else:
        selector = run.begin_sampling(step)
        if run.state.closed_at is not None:
            run.timer.add("engine_idle", time.perf_counter() - run.state.closed_at)
        pending = PendingBatch(run, step, selector)
    try:
        yield pending
    except ShortfallError:
        if pending is not None:
            pending.cancel()
        requeue(run)
        raise
    finally:
        if pending is not None:  # no effect on a finished batch
            pending.cancel()


def await_batch(run: Run, pending: "PendingBatch | None") -> PrefetchedBatch | None:
    """Wait for the next step's batch."""
    run.state.prefetched_batch = None  # it has been trained on, even if the next one fails
    if pending is None:
        return None
    with run.phase("trainer_idle", total=run.config.rollout.prompts_per_step) as on_progress:
        batch = pending.result(on_progress, run.sync_engine)
    run.timer.add("generate", pending.seconds)
    run.state.closed_at = pending.closed_at
    return sampling_of(run).prefetched(batch)


class SamplingCancelled(Exception):
    """Ends the sampling thread at its next poll."""


class PendingBatch:
    """A batch that a thread samples; until it has ended, stream, engine, judge and sampler belong
    to it.
    """

    seconds = 0.0  # the duration of the sampling
    closed_at = 0.0  # the `time.perf_counter` at its end

    def __init__(self, run: Run, step: int, selector: ProblemSelector | None) -> None:
        self._is_cancelled = Event()
        self._progress = (0, run.sampling.sampler.prompts_per_step, "")
        self._new_weights = sampling_of(run).expect_weights(step - 1)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"dapo-batch-{step}")
        self._future = self._pool.submit(self._sample, run, step, selector)

    def raise_if_failed(self) -> None:
        """Raise the thread's error if it has failed."""
        if self._future.done():
            self._future.result()

    def result(
        self, on_progress: Callable[[int, int, str], None], load_weights: Callable[[], None]
    ) -> Batch:
        """Wait for the batch. Raises the thread's error if it has failed.

        The step's updates are made: `load_weights` is called if the thread wants their weights
        before its end.
        """
        new = self._new_weights
        awaited: list[Future[Any]] = [self._future]
        if new is not None:
            new.exist.set()
            awaited.append(new.wanted)
        while not self._future.done():
            if new is not None and new.wanted.done() and not new.are_loaded.is_set():
                load_weights()
                new.are_loaded.set()
                awaited.remove(new.wanted)
            wait(awaited, timeout=_POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
            on_progress(*self._progress)
        return self._future.result()

    def cancel(self) -> None:
        """End the thread, and wait for its end."""
        self._is_cancelled.set()
        self._pool.shutdown()

    def _sample(self, run: Run, step: int, selector: ProblemSelector | None) -> Batch:
        def check() -> None:
            run.stop.check()
            if self._is_cancelled.is_set():
                raise SamplingCancelled

        started = time.perf_counter()
        batch = collect(
            run.sampling, step=step, selector=selector, on_progress=self._on_progress, check=check
        )
        self.closed_at = time.perf_counter()
        self.seconds = self.closed_at - started
        return batch

    def _on_progress(self, accepted: int, batch_size: int, outcomes: str) -> None:
        self._progress = (accepted, batch_size, outcomes)
