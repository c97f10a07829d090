"""Algorithm 1 of the paper (arXiv 2503.14476), and the differences from it:

1. Groups enter the batch in the order in which they were submitted, and only the groups that it
   needs are sampled (`sampling/batch.py`). The paper oversamples, and does not define which groups
   it takes.
2. In a step's first update pi_old is the detached policy itself: its log-probabilities are not
   computed twice.
3. Nothing is lost: generated groups that do not train are counted by outcome, and a step that fails
   requeues its problems, so that a resumed run repeats that step exactly.
4. The policy is evaluated before the first step, after every `train.eval_every`-th step and after
   the last; checkpoints are written in the background.

Each schedule has the same loop and a step of its own: `on_policy_step` below, `asynchronous.step`
and `supervised.step`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dapo.config import Config
from dapo.core.errors import DapoError
from dapo.training import asynchronous, supervised
from dapo.training.checkpointing import save_after_failure, save_if_due, save_now
from dapo.training.state import Run
from dapo.training.step_metrics import (
    evaluate_and_log,
    evaluate_last,
    report_step,
    rollouts_in_background,
)
from dapo.training.stopping import ProblemsSolved, check_divergence


def train(run: Run) -> None:
    """Train from the run's state to `train.num_steps`, or to `train.token_budget`.

    Raises DapoError, or OSError from the run directory, if it cannot continue; the state is then
    saved.
    """
    take_step = step_of_schedule(run.config)
    with saved_on_failure(run):
        # before the first step, or the evaluation in which the run was interrupted
        evaluate_and_log(run)
        for step in run.steps():  # line 1
            with run.timed(step):
                take_step(run, step)  # lines 2 to 11
                evaluate_and_log(run)
            check_divergence(run)
            save_if_due(run)
        save_now(run)


def on_policy_step(run: Run, step: int) -> None:
    """Take a step of `schedule: sync`."""
    selector = run.begin_sampling(step)  # line 3: pi_old <- pi_theta
    batch = run.sample_batch(step, selector)  # lines 2, 4 to 8: Eq. 11
    run.sampling.drop_weights()
    samples = run.estimate_advantages(batch, step=step)  # line 9: Eq. 9, 13
    with rollouts_in_background(run, batch, samples) as text_metrics:
        updates = run.prepare_updates(samples, step=step)  # line 10: pi_old of Eq. 6
    for minibatch in run.track("update", updates):
        run.state.updates.append(run.policy.update(minibatch, step=step))  # line 11: Eq. 8
    report_step(run, batch, samples, text_metrics)


def step_of_schedule(config: Config) -> Callable[[Run, int], None]:
    """Return the function that takes a step; with `max_staleness: 0`, `async` is `sync`."""
    if config.is_supervised:
        return supervised.step
    if config.samples_ahead:
        return asynchronous.step
    return on_policy_step


@contextmanager
def saved_on_failure(run: Run) -> Iterator[None]:
    """If the block fails, undo the sampling of the present step, and save the last finished one."""
    try:
        with ended_when_solved(run):
            yield
    except (DapoError, OSError) as error:
        run.sampling.roll_back(finished_steps=run.state.step)
        save_after_failure(run, error)
        raise


@contextmanager
def ended_when_solved(run: Run) -> Iterator[None]:
    """If the block finds all problems solved, undo the sampling, evaluate, save and end."""
    try:
        yield
    except ProblemsSolved as solved:
        run.sampling.roll_back(finished_steps=run.state.step)
        run.tracker.message(f"solved: {solved}")
        evaluate_last(run)
        save_now(run)
        run.is_solved = True
