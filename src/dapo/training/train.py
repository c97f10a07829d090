"""Algorithm 1 of the paper."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from dapo.config import Config
from dapo.core.background import in_background
from dapo.core.errors import DapoError
from dapo.core.files import atomic_write_json
from dapo.engines.engine import drop_weights
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.scores import Evaluation
from dapo.telemetry.metrics import (
    StepTimer,
    engine_gap_metrics,
    mean_of_updates,
    reflection_metrics,
    rollout_metrics,
)
from dapo.telemetry.profiler import profiled_step
from dapo.telemetry.rollout_table import write_rollouts
from dapo.training.checkpointing import save_after_failure, save_now, save_when_due
from dapo.training.divergence import check_divergence, entropy_collapse_steps, warn_divergence
from dapo.training.rollout import Batch, collect, require_groups
from dapo.training.run_directory import RunDirectory
from dapo.training.samples import minibatches, shaped_reward, with_advantages
from dapo.training.state import Run, TrainState
from dapo.types import Group, Sample, Verdict


class TakeStep(Protocol):
    """One step of a schedule; it ends with `conclude`."""

    def __call__(self, config: Config, run: Run, train_state: TrainState, *, step: int, timer: StepTimer) -> None: ...


def train(config: Config, run: Run, train_state: TrainState) -> None:
    """Algorithm 1, from `progress.step` to `num_steps`.

    Raises DapoError, or OSError from the run directory, with state saved, where it cannot go on.
    """
    run_steps(config, run, train_state, train_step)


def run_steps(config: Config, run: Run, train_state: TrainState, take_step: TakeStep) -> None:
    """What lies around the steps of any schedule: evaluate, log, look at the numbers, save."""
    try:
        if train_state.unlogged is not None:  # before the first step; or an evaluation was broken off
            finish_step(config, run, train_state, StepTimer())
        for step in range(train_state.step + 1, config.train.num_steps + 1):  # line 1
            with profiled_step(step, config.profile.steps, run.directory.profile, run.tracker.message) as timer:
                take_step(config, run, train_state, step=step, timer=timer)
                finish_step(config, run, train_state, timer)
            check_divergence(config, run, train_state)
            save_when_due(config, run, train_state)
        save_now(config, run, train_state)
    except (DapoError, OSError) as error:
        save_after_failure(config, run, train_state, error)
        raise


def train_step(config: Config, run: Run, train_state: TrainState, *, step: int, timer: StepTimer) -> None:
    """One turn of Algorithm 1, lines 3 to 11."""
    show_phase = run.tracker.phase
    with timer.phase("load_weights"):
        sync_engine(run, train_state)  # line 3: pi_old <- pi_theta
    with roll_back_sampling_on_failure(run):
        with timer.phase("generate"):
            show_phase("generate", 0, config.rollout.prompts_per_step)
            batch = collect(  # lines 2, 4-8: Eq. 11
                run.stream,
                run.engine,
                run.judge,
                run.sampler,
                run.encoder,
                run.plan,
                step=step,
                on_progress=partial(show_phase, "generate"),
            )
        drop_weights(run.engine)  # the next step brings others
        train_state.engine_version = None
        samples, metrics = prepare(config, run, batch, step=step, timer=timer)  # line 9
        updates = update_policy(config, run, train_state, samples, step=step, timer=timer)  # lines 10, 11
    conclude(config, run, train_state, batch, samples, metrics, updates)


def prepare(
    config: Config, run: Run, batch: Batch, *, step: int, timer: StepTimer
) -> tuple[list[Sample], dict[str, float]]:
    """The samples to train on, and the metrics of their rollout. Raises Starved where there is too little."""
    samples = with_advantages(batch.groups, config)  # line 9: Eq. 9, 13
    with rollouts_in_background(config, run, batch, samples, step=step, timer=timer) as text_metrics:
        metrics = describe_batch(config, run, batch, samples, step=step)
        require_groups(batch)
        if batch.shortfall:
            run.tracker.message(f"step {step}: short batch: {batch.reason}")
        if len(batch.groups) > config.train.minibatch_groups:
            with timer.phase("old_logprobs"):  # with a single update, old = the detached current ones
                run.tracker.phase("old_logprobs")
                samples = run.policy.record_old_logprobs(samples)
                metrics |= engine_gap_metrics(samples)
    return samples, metrics | text_metrics


def update_policy(
    config: Config, run: Run, train_state: TrainState, samples: Sequence[Sample], *, step: int, timer: StepTimer
) -> list[dict[str, float]]:
    """Algorithm 1, lines 10 and 11; the metrics of each update."""
    with timer.phase("update"):
        updates: list[dict[str, float]] = []
        batches = minibatches(samples, config, step=step)
        for i, minibatch in enumerate(batches):  # line 10: whole groups, shuffled
            run.tracker.phase("update", i, len(batches))
            updates.append(run.policy.update(minibatch, step=step))  # line 11: Eq. 8
            train_state.is_consistent &= bool(updates[-1]["optim/skipped"])
    return updates


def conclude(
    config: Config,
    run: Run,
    train_state: TrainState,
    batch: Batch,
    samples: Sequence[Sample],
    metrics: dict[str, float],
    updates: Sequence[Mapping[str, float]],
) -> None:
    """The step is done: look at its numbers, and count it."""
    step = train_state.step + 1
    metrics |= {name: value for name, value in mean_of_updates(updates).items() if name not in metrics}
    warn_divergence(config, run, metrics, updates, step=step)
    train_state.entropy_collapse_steps = entropy_collapse_steps(config, batch, train_state.entropy_collapse_steps)
    run.problem_stats.record((group for group, outcome in batch.judged if outcome != "excess"), step=step)
    tokens_trained = sum(sample.num_trained_tokens for sample in samples)
    train_state.advance(metrics, tokens_generated=batch.num_generated_tokens, tokens_trained=tokens_trained)


def finish_step(config: Config, run: Run, train_state: TrainState, timer: StepTimer) -> None:
    """Evaluate when due, and write the line of metrics of the step that `train_state` stands at."""
    step, metrics = train_state.step, dict(train_state.unlogged or {})
    if evaluation_is_due(config, step):
        with timer.phase("evaluate"):
            sync_engine(run, train_state)
            evaluation = run_evaluation(run, step=step)
        if evaluation is not None:
            metrics |= evaluation.metrics()
            train_state.accuracy = metrics[f"eval/{evaluation.plan.name}/accuracy"]
    if step > 0:
        timings = timer.metrics(tokens_generated=int(metrics["rollout/tokens_generated"]))
        train_state.wall_s += timings["time/step_s"]
        metrics |= timings
    if metrics:
        run.tracker.log(step, metrics)
    train_state.unlogged, train_state.is_saved = None, False


@contextmanager
def roll_back_sampling_on_failure(run: Run) -> Iterator[None]:
    """A failed step's problems go back to the stream, so that a resumed run starts this step anew."""
    position, keep_rate = run.stream.position, run.sampler.state_dict()
    try:
        yield
    except (DapoError, OSError):
        if run.stream.position != position:
            run.stream.rewind(position)
        run.sampler.load_state_dict(keep_rate)
        raise


def sync_engine(run: Run, train_state: TrainState) -> None:
    """Give the engine the policy's weights, unless it has them."""
    if train_state.engine_version != train_state.step:
        run.engine.load_weights(run.policy.weights(version=train_state.step), version=train_state.step)
        train_state.engine_version = train_state.step


def evaluation_is_due(config: Config, step: int) -> bool:
    """Before the first step, after every `eval_every`-th and the last."""
    every = config.train.eval_every
    return step in (0, config.train.num_steps) or bool(every and step % every == 0)


def run_evaluation(run: Run, *, step: int) -> Evaluation | None:
    """Evaluate the policy after `step` steps; the engine holds it. Writes eval/step_*.json."""
    if run.eval_plan is None or not run.held_out:
        return None
    evaluation = evaluate(
        run.engine,
        run.judge,
        run.encoder,
        run.held_out,
        run.eval_plan,
        on_progress=partial(run.tracker.phase, "evaluate"),
    )
    atomic_write_json(run.directory.eval(step), {"step": step, **evaluation.summary(), "table": evaluation.table()})
    return evaluation


def describe_batch(config: Config, run: Run, batch: Batch, samples: Sequence[Sample], *, step: int) -> dict[str, float]:
    """The step's rollout metrics, but for those of the texts."""
    rewards = {group.id: _rewards(group, config) for group, _ in batch.judged}
    errors = [v.error for group, _ in batch.judged for v in group.verdicts if v.error is not None]
    if errors:
        worst = Counter(errors).most_common(1)[0][0]
        run.tracker.message(f"step {step}: {len(errors)} verifier errors, most often: {worst}")
    decided = [(group, outcome) for group, outcome in batch.judged if outcome != "excess"]
    return rollout_metrics(
        decided,
        {str(outcome): count for outcome, count in batch.group_counts.items()},
        {str(outcome): count for outcome, count in batch.token_counts.items()},
        {group_id: [r for r in row if r is not None] for group_id, row in rewards.items()},
        shortfall=batch.shortfall,
    ) | {
        "rollout/epoch": batch.epoch,
        "rollout/tokens_in_minibatches": sum(s.num_trained_tokens for s in samples),
    }


@contextmanager
def rollouts_in_background(
    config: Config, run: Run, batch: Batch, samples: Sequence[Sample], *, step: int, timer: StepTimer
) -> Iterator[dict[str, float]]:
    """Beside the block, since both take long at scale: every judged response goes into rollouts/step_*.parquet, and all
    text is searched. When the block has ended, the table is on disk and the metrics of the texts are there.

    Raises OSError where the table cannot be written.
    """
    text_metrics: dict[str, float] = {}

    def work() -> None:
        text_metrics.update(reflection_metrics(group for group, outcome in batch.judged if outcome != "excess"))
        if config.log.rollouts:
            write_rollouts(run.directory.rollouts(step), _rollout_rows(config, run, batch, samples, step=step))

    with in_background(work, name="dapo-rollouts") as thread:
        yield text_metrics
        with timer.phase("write_rollouts"):  # what is left to wait for
            thread.join()


def summarise(run: Run, train_state: TrainState, *, exit_reason: str) -> dict[str, Any]:
    """What summary.json holds."""
    evaluations = [
        {name: value for name, value in evaluation.items() if name != "table"}
        for evaluation in read_evaluations(run.directory)
    ]
    return {
        "steps": train_state.step,
        "wall_s": round(train_state.wall_s, 3),
        "tokens_generated": train_state.tokens_generated,
        "tokens_trained": train_state.tokens_trained,
        "eval_first": evaluations[0] if evaluations else None,
        "eval_last": evaluations[-1] if evaluations else None,
        "exit_reason": exit_reason,
    }


def read_evaluations(directory: RunDirectory) -> list[dict[str, Any]]:
    """Every evaluation of a run, oldest first, each with its table of responses."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.path.glob("eval/step_*.json"))]


def _rewards(group: Group, config: Config) -> list[float | None]:
    def reward(i: int, verdict: Verdict) -> float | None:
        return None if verdict.error is not None else shaped_reward(group.generations[i], verdict, config)

    return [reward(i, verdict) for i, verdict in enumerate(group.verdicts)]


def _rollout_rows(
    config: Config, run: Run, batch: Batch, samples: Sequence[Sample], *, step: int
) -> Iterator[dict[str, Any]]:
    advantages: dict[int, list[float]] = {}
    for sample in samples:
        advantages.setdefault(sample.group_id, []).append(sample.advantage)
    for group, outcome in batch.judged:
        rewards, valid_advantages = _rewards(group, config), iter(advantages.get(group.id, ()))
        prompt = run.encoder.decode_prompt(group.prompt_ids)
        for i, (generation, verdict) in enumerate(zip(group.generations, group.verdicts, strict=True)):
            yield {
                "step": step,
                "group_id": group.id,
                "problem_id": group.problem.id,
                "source": group.problem.source,
                "sample": i,
                "prompt": prompt,
                "response": group.texts[i],
                "answer": group.problem.answer,
                "correct": verdict.correct,
                "score": None if verdict.error is not None else verdict.score,
                "error": verdict.error,
                "reward": rewards[i],
                "advantage": None if verdict.error is not None else next(valid_advantages, None),
                "prompt_tokens": len(group.prompt_ids),
                "response_tokens": len(generation.token_ids),
                "finish": generation.finish,
                "outcome": outcome,
                "response_ids": generation.token_ids,
                "engine_logprobs": generation.logprobs,
                "version": generation.version,
            }
