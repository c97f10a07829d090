"""Algorithm 1 of the paper."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from dapo.config import Config
from dapo.core.background import beside
from dapo.core.errors import DapoError
from dapo.core.files import atomic_write_json
from dapo.engines.engine import drop_weights
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.scores import Evaluation
from dapo.telemetry.metrics import (
    Stopwatch,
    engine_gap_metrics,
    mean_of_updates,
    reflection_metrics,
    rollout_metrics,
)
from dapo.telemetry.profiler import watched_step
from dapo.telemetry.rollout_table import write_rollouts
from dapo.training.checkpointing import save_after_failure, save_now, save_when_due
from dapo.training.divergence import collapsed_steps, require_sound_numbers, warn_of_numbers
from dapo.training.rollout import Batch, collect, require_groups
from dapo.training.run_directory import RunDirectory
from dapo.training.samples import minibatches, shaped_reward, with_advantages
from dapo.training.state import Parts, Progress
from dapo.types import Group, Sample, Verdict


class TakeStep(Protocol):
    """One step of a schedule; it ends with `conclude`."""

    def __call__(self, config: Config, parts: Parts, progress: Progress, *, step: int, watch: Stopwatch) -> None: ...


def train(config: Config, parts: Parts, progress: Progress) -> None:
    """Algorithm 1, from `progress.step` to `num_steps`.

    Raises DapoError, or OSError from the run directory, with state saved, where it cannot go on.
    """
    run_steps(config, parts, progress, train_step)


def run_steps(config: Config, parts: Parts, progress: Progress, take_step: TakeStep) -> None:
    """What lies around the steps of any schedule: evaluate, log, look at the numbers, save."""
    try:
        if progress.unlogged is not None:  # before the first step; or an evaluation was broken off
            finish_step(config, parts, progress, Stopwatch())
        for step in range(progress.step + 1, config.train.num_steps + 1):  # line 1
            with watched_step(step, config.profile.steps, parts.run.profile, parts.tracker.message) as watch:
                take_step(config, parts, progress, step=step, watch=watch)
                finish_step(config, parts, progress, watch)
            require_sound_numbers(config, parts, progress)
            save_when_due(config, parts, progress)
        save_now(config, parts, progress)
    except (DapoError, OSError) as error:
        save_after_failure(config, parts, progress, error)
        raise


def train_step(config: Config, parts: Parts, progress: Progress, *, step: int, watch: Stopwatch) -> None:
    """One turn of Algorithm 1, lines 3 to 11."""
    tell = parts.tracker.phase
    with watch.phase("load_weights"):
        sync_engine(parts, progress)  # line 3: pi_old <- pi_theta
    with sampling_undone_on_failure(parts):
        with watch.phase("generate"):
            tell("generate", 0, config.rollout.prompts_per_step)
            batch = collect(  # lines 2, 4-8: Eq. 11
                parts.stream,
                parts.engine,
                parts.judge,
                parts.sampler,
                parts.encoder,
                parts.plan,
                step=step,
                on_progress=partial(tell, "generate"),
            )
        drop_weights(parts.engine)  # the next step brings others
        progress.engine_version = None
        samples, metrics = prepare(config, parts, batch, step=step, watch=watch)  # line 9
        updates = update_policy(config, parts, progress, samples, step=step, watch=watch)  # lines 10, 11
    conclude(config, parts, progress, batch, samples, metrics, updates)


def prepare(
    config: Config, parts: Parts, batch: Batch, *, step: int, watch: Stopwatch
) -> tuple[list[Sample], dict[str, float]]:
    """The samples to train on, and the metrics of their rollout. Raises Starved where there is too little."""
    samples = with_advantages(batch.groups, config)  # line 9: Eq. 9, 13
    with read_and_stored(config, parts, batch, samples, step=step, watch=watch) as found:
        metrics = describe_batch(config, parts, batch, samples, step=step)
        require_groups(batch, on_shortfall=config.dynamic_sampling.on_shortfall)
        if batch.shortfall:
            parts.tracker.message(f"step {step}: short batch: {batch.reason}")
        if len(batch.groups) > config.train.minibatch_groups:
            with watch.phase("old_logprobs"):  # with a single update, old = the detached current ones
                parts.tracker.phase("old log-probabilities")
                samples = parts.policy.record_old_logprobs(samples)
                metrics |= engine_gap_metrics(samples)
    return samples, metrics | found


def update_policy(
    config: Config, parts: Parts, progress: Progress, samples: Sequence[Sample], *, step: int, watch: Stopwatch
) -> list[dict[str, float]]:
    """Algorithm 1, lines 10 and 11; the metrics of each update."""
    with watch.phase("update"):
        updates: list[dict[str, float]] = []
        batches = minibatches(samples, config, step=step)
        for i, minibatch in enumerate(batches):  # line 10: whole groups, shuffled
            parts.tracker.phase("update", i, len(batches))
            updates.append(parts.policy.update(minibatch, step=step))  # line 11: Eq. 8
            progress.is_whole &= bool(updates[-1]["optim/skipped"])
    return updates


def conclude(
    config: Config,
    parts: Parts,
    progress: Progress,
    batch: Batch,
    samples: Sequence[Sample],
    metrics: dict[str, float],
    updates: Sequence[Mapping[str, float]],
) -> None:
    """The step is done: look at its numbers, and count it."""
    step = progress.step + 1
    metrics |= {name: value for name, value in mean_of_updates(updates).items() if name not in metrics}
    warn_of_numbers(config, parts, metrics, updates, step=step)
    progress.collapsed_steps = collapsed_steps(config, batch, progress.collapsed_steps)
    parts.history.record((group for group, fate in batch.judged if fate != "surplus"), step=step)
    tokens_trained = sum(sample.num_trained_tokens for sample in samples)
    progress.advance(metrics, tokens_generated=batch.num_generated_tokens, tokens_trained=tokens_trained)


def finish_step(config: Config, parts: Parts, progress: Progress, watch: Stopwatch) -> None:
    """Evaluate when due, and write the line of metrics of the step that `progress` stands at."""
    step, metrics = progress.step, dict(progress.unlogged or {})
    if evaluation_is_due(config, step):
        with watch.phase("evaluate"):
            sync_engine(parts, progress)
            evaluation = run_evaluation(parts, step=step)
        if evaluation is not None:
            metrics |= evaluation.metrics()
            progress.accuracy = metrics[f"eval/{evaluation.plan.name}/accuracy"]
    if step > 0:
        timings = watch.metrics(tokens_generated=int(metrics["rollout/tokens_generated"]))
        progress.wall_s += timings["time/step_s"]
        metrics |= timings
    if metrics:
        parts.tracker.log(step, metrics)
    progress.unlogged, progress.is_saved = None, False


@contextmanager
def sampling_undone_on_failure(parts: Parts) -> Iterator[None]:
    """A failed step's problems go back to the stream, so that a resumed run starts this step anew."""
    position, keep_rate = parts.stream.position, parts.sampler.state_dict()
    try:
        yield
    except (DapoError, OSError):
        if parts.stream.position != position:
            parts.stream.rewind(position)
        parts.sampler.load_state_dict(keep_rate)
        raise


def sync_engine(parts: Parts, progress: Progress) -> None:
    """Give the engine the policy's weights, unless it has them."""
    if progress.engine_version != progress.step:
        parts.engine.load_weights(parts.policy.weights(), version=progress.step)
        progress.engine_version = progress.step


def evaluation_is_due(config: Config, step: int) -> bool:
    """Before the first step, after every `eval_every`-th and the last."""
    every = config.train.eval_every
    return step in (0, config.train.num_steps) or bool(every and step % every == 0)


def run_evaluation(parts: Parts, *, step: int) -> Evaluation | None:
    """Evaluate the policy after `step` steps; the engine holds it. Writes eval/step_*.json."""
    if parts.eval_plan is None or not parts.held_out:
        return None
    evaluation = evaluate(
        parts.engine,
        parts.judge,
        parts.encoder,
        parts.held_out,
        parts.eval_plan,
        on_progress=partial(parts.tracker.phase, "evaluate"),
    )
    atomic_write_json(parts.run.eval(step), {"step": step, **evaluation.summary(), "table": evaluation.table()})
    return evaluation


def describe_batch(
    config: Config, parts: Parts, batch: Batch, samples: Sequence[Sample], *, step: int
) -> dict[str, float]:
    """The step's rollout metrics, but for those of the texts."""
    rewards = {group.id: _rewards(group, config) for group, _ in batch.judged}
    errors = [v.error for group, _ in batch.judged for v in group.verdicts if v.error is not None]
    if errors:
        worst = Counter(errors).most_common(1)[0][0]
        parts.tracker.message(f"step {step}: {len(errors)} verifier errors, most often: {worst}")
    decided = [(group, fate) for group, fate in batch.judged if fate != "surplus"]
    return rollout_metrics(
        decided,
        {str(fate): count for fate, count in batch.group_counts.items()},
        {str(fate): count for fate, count in batch.token_counts.items()},
        {group_id: [r for r in row if r is not None] for group_id, row in rewards.items()},
        shortfall=batch.shortfall,
    ) | {
        "rollout/epoch": batch.epoch,
        "rollout/tokens_in_minibatches": sum(s.num_trained_tokens for s in samples),
    }


@contextmanager
def read_and_stored(
    config: Config, parts: Parts, batch: Batch, samples: Sequence[Sample], *, step: int, watch: Stopwatch
) -> Iterator[dict[str, float]]:
    """Beside the block, since both take long at scale: every judged response goes into rollouts/step_*.parquet, and all
    text is searched. When the block has ended, the table is on disk and the metrics of the texts are there.

    Raises OSError where the table cannot be written.
    """
    found: dict[str, float] = {}

    def work() -> None:
        found.update(reflection_metrics(group for group, fate in batch.judged if fate != "surplus"))
        if config.log.rollouts:
            write_rollouts(parts.run.rollouts(step), _rollout_rows(config, parts, batch, samples, step=step))

    with beside(work, name="dapo-rollouts") as thread:
        yield found
        with watch.phase("write_rollouts"):  # what is left to wait for
            thread.join()


def summarise(parts: Parts, progress: Progress, *, exit_reason: str) -> dict[str, Any]:
    """What summary.json holds."""
    evaluations = [
        {name: value for name, value in evaluation.items() if name != "table"}
        for evaluation in read_evaluations(parts.run)
    ]
    return {
        "steps": progress.step,
        "wall_s": round(progress.wall_s, 3),
        "tokens_generated": progress.tokens_generated,
        "tokens_trained": progress.tokens_trained,
        "eval_first": evaluations[0] if evaluations else None,
        "eval_last": evaluations[-1] if evaluations else None,
        "exit_reason": exit_reason,
    }


def read_evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    """Every evaluation of a run, oldest first, each with its table of responses."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(run.path.glob("eval/step_*.json"))]


def _rewards(group: Group, config: Config) -> list[float | None]:
    def reward(i: int, verdict: Verdict) -> float | None:
        return None if verdict.error is not None else shaped_reward(group.generations[i], verdict, config)

    return [reward(i, verdict) for i, verdict in enumerate(group.verdicts)]


def _rollout_rows(
    config: Config, parts: Parts, batch: Batch, samples: Sequence[Sample], *, step: int
) -> Iterator[dict[str, Any]]:
    advantages: dict[int, list[float]] = {}
    for sample in samples:
        advantages.setdefault(sample.group_id, []).append(sample.advantage)
    for group, fate in batch.judged:
        rewards, valid_advantages = _rewards(group, config), iter(advantages.get(group.id, ()))
        prompt = parts.encoder.decode_prompt(group.prompt_ids)
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
                "fate": fate,
                "response_ids": generation.token_ids,
                "engine_logprobs": generation.logprobs,
                "version": generation.version,
            }
