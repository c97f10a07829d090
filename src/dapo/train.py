"""Algorithm 1 of the paper."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dapo.config import Config
from dapo.data.stream import ProblemStream
from dapo.engines.engine import RolloutEngine, WeightSource
from dapo.errors import DapoError
from dapo.evaluation import EvaluationPlan, evaluate
from dapo.rollout import Batch, DynamicSampler, Encoder, Judge, SamplingPlan, collect, require_groups
from dapo.run import RunDirectory, atomic_write_json
from dapo.samples import minibatches, shaped_reward, with_advantages
from dapo.telemetry.metrics import Stopwatch, engine_gap_metrics, mean_of_updates, rollout_metrics
from dapo.telemetry.rollouts import write_rollouts
from dapo.telemetry.tracker import Tracker
from dapo.types import Group, Problem, Sample, Verdict

STATE_FILE = "state.json"


class TrainablePolicy(Protocol):
    """What the loop needs of a policy."""

    def weights(self) -> WeightSource: ...

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]: ...

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


@dataclass
class Parts:
    """Everything that is plugged into the loop."""

    stream: ProblemStream
    engine: RolloutEngine
    judge: Judge
    policy: TrainablePolicy
    sampler: DynamicSampler
    encoder: Encoder
    plan: SamplingPlan
    tracker: Tracker
    run: RunDirectory
    held_out: Sequence[Problem] = ()
    eval_plan: EvaluationPlan | None = None


@dataclass
class Progress:
    """How far a run is: with stream, sampler and policy, all that a checkpoint holds."""

    step: int = 0
    """Finished training steps, which is also the version of the policy's weights."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    wall_s: float = 0.0
    engine_version: int | None = field(default=None, compare=False)
    """Of the weights that the engine holds."""

    def state_dict(self) -> dict[str, float]:
        """JSON values."""
        return {
            "step": self.step,
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "wall_s": self.wall_s,
        }


def train(config: Config, parts: Parts, progress: Progress) -> None:
    """Algorithm 1, from `progress.step` to `num_steps`. Raises DapoError, with state saved, where it cannot go on."""
    if progress.step == 0:
        sync_engine(parts, progress)
        if metrics := run_evaluation(parts, step=0):
            parts.tracker.log(0, metrics)
    for step in range(progress.step + 1, config.train.num_steps + 1):  # line 1
        watch, before = Stopwatch(), (parts.stream.position, parts.sampler.state_dict())
        try:
            metrics = train_step(config, parts, progress, step=step, watch=watch)
        except DapoError:
            _undo_sampling(parts, *before)
            save(config, parts, progress)
            raise
        if evaluation_is_due(config, step):
            with watch.phase("evaluate"):
                sync_engine(parts, progress)
                metrics |= run_evaluation(parts, step=step)
        timings = watch.metrics(tokens_generated=int(metrics["rollout/tokens_generated"]))
        progress.wall_s += timings["time/step_s"]
        parts.tracker.log(step, metrics | timings)
        if step == config.train.num_steps or (config.train.save_every and step % config.train.save_every == 0):
            parts.tracker.phase("save")
            save(config, parts, progress)


def train_step(config: Config, parts: Parts, progress: Progress, *, step: int, watch: Stopwatch) -> dict[str, float]:
    """One turn of Algorithm 1, lines 3 to 11."""
    tell = parts.tracker.phase
    with watch.phase("load_weights"):
        sync_engine(parts, progress)  # line 3: pi_old <- pi_theta
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
    samples = with_advantages(batch.groups, config)  # line 9: Eq. 9, 13
    metrics = describe_batch(config, parts, batch, samples, step=step)
    require_groups(batch, on_shortfall=config.dynamic_sampling.on_shortfall)
    if batch.shortfall:
        parts.tracker.message(f"step {step}: short batch: {batch.reason}")
    if len(batch.groups) > config.train.minibatch_groups:
        with watch.phase("old_logprobs"):  # with a single update, old = the detached current ones
            tell("old log-probabilities")
            samples = parts.policy.record_old_logprobs(samples)
            metrics |= engine_gap_metrics(samples)
    with watch.phase("update"):
        updates = []
        batches = minibatches(samples, config, step=step)
        for i, minibatch in enumerate(batches):  # line 10: whole groups, shuffled
            tell("update", i, len(batches))
            updates.append(parts.policy.update(minibatch, step=step))  # line 11: Eq. 8
    metrics |= {name: value for name, value in mean_of_updates(updates).items() if name not in metrics}
    progress.step = step
    progress.tokens_generated += batch.num_generated_tokens
    progress.tokens_trained += sum(sample.num_trained_tokens for sample in samples)
    return metrics


def sync_engine(parts: Parts, progress: Progress) -> None:
    """Give the engine the policy's weights, unless it has them."""
    if progress.engine_version != progress.step:
        parts.engine.load_weights(parts.policy.weights(), version=progress.step)
        progress.engine_version = progress.step


def evaluation_is_due(config: Config, step: int) -> bool:
    """After every `eval_every`-th step and the last."""
    every = config.train.eval_every
    return step == config.train.num_steps or bool(every and step % every == 0)


def run_evaluation(parts: Parts, *, step: int) -> dict[str, float]:
    """Evaluate the policy after `step` steps; the engine holds it. Writes eval/step_*.json, returns its metrics."""
    if parts.eval_plan is None or not parts.held_out:
        return {}
    evaluation = evaluate(
        parts.engine,
        parts.judge,
        parts.encoder,
        parts.held_out,
        parts.eval_plan,
        on_progress=partial(parts.tracker.phase, "evaluate"),
    )
    atomic_write_json(parts.run.eval(step), {"step": step, **evaluation.summary(), "table": evaluation.table()})
    return evaluation.metrics()


def describe_batch(
    config: Config, parts: Parts, batch: Batch, samples: Sequence[Sample], *, step: int
) -> dict[str, float]:
    """The step's rollout metrics; every judged response goes into rollouts/step_*.parquet."""
    rewards = {group.id: _rewards(group, config) for group, _ in batch.judged}
    if config.log.rollouts:
        write_rollouts(parts.run.rollouts(step), _rollout_rows(parts, batch, rewards, samples, step=step))
    errors = [v.error for group, _ in batch.judged for v in group.verdicts if v.error is not None]
    if errors:
        worst = max(set(errors), key=errors.count)
        parts.tracker.message(f"step {step}: {len(errors)} verifier errors, most often: {worst}")
    decided = [(group, fate) for group, fate in batch.judged if fate != "surplus"]
    return rollout_metrics(
        decided,
        {str(fate): count for fate, count in batch.group_counts.items()},
        {str(fate): count for fate, count in batch.token_counts.items()},
        {group_id: [r for r in row if r is not None] for group_id, row in rewards.items()},
        shortfall=batch.shortfall,
    ) | {
        "rollout/epoch": parts.stream.epoch,
        "rollout/tokens_in_minibatches": sum(s.num_trained_tokens for s in samples),
    }


def save(config: Config, parts: Parts, progress: Progress) -> None:
    """Write a checkpoint of the last finished step, unless there is one."""
    if (parts.run.checkpoints / f"step_{progress.step:06d}").exists():
        return

    def write(directory: Path) -> None:
        parts.policy.save(directory)
        state = {
            "progress": progress.state_dict(),
            "stream": parts.stream.state_dict(),
            "sampler": parts.sampler.state_dict(),
        }
        atomic_write_json(directory / STATE_FILE, state)

    parts.run.save_checkpoint(progress.step, write, keep=config.train.keep_checkpoints)


def restore(parts: Parts, checkpoint: Path) -> Progress:
    """Put policy, stream and sampler back to a checkpoint's state."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    parts.policy.load(checkpoint)
    parts.stream.load_state_dict(state["stream"])
    parts.sampler.load_state_dict(state["sampler"])
    return Progress(**state["progress"])


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


def _undo_sampling(parts: Parts, position: int, sampler_state: Mapping[str, float]) -> None:
    """The failed step's problems go back to the stream, so that a resumed run starts this step anew."""
    if parts.stream.position != position:
        parts.stream.rewind(position)
    parts.sampler.load_state_dict(sampler_state)


def _rewards(group: Group, config: Config) -> list[float | None]:
    def reward(i: int, verdict: Verdict) -> float | None:
        return None if verdict.error is not None else shaped_reward(group.generations[i], verdict, config)

    return [reward(i, verdict) for i, verdict in enumerate(group.verdicts)]


def _rollout_rows(
    parts: Parts,
    batch: Batch,
    rewards: Mapping[int, Sequence[float | None]],
    samples: Sequence[Sample],
    *,
    step: int,
) -> list[dict[str, Any]]:
    advantages: dict[int, list[float]] = {}
    for sample in samples:
        advantages.setdefault(sample.group_id, []).append(sample.advantage)
    rows = []
    for group, fate in batch.judged:
        valid_advantages = iter(advantages.get(group.id, ()))
        for i, (generation, verdict) in enumerate(zip(group.generations, group.verdicts, strict=True)):
            rows.append(
                {
                    "step": step,
                    "group_id": group.id,
                    "problem_id": group.problem.id,
                    "source": group.problem.source,
                    "sample": i,
                    "prompt": parts.encoder.decode_prompt(group.prompt_ids),
                    "response": group.texts[i],
                    "answer": group.problem.answer,
                    "correct": verdict.correct,
                    "score": None if verdict.error is not None else verdict.score,
                    "error": verdict.error,
                    "reward": rewards[group.id][i],
                    "advantage": None if verdict.error is not None else next(valid_advantages, None),
                    "prompt_tokens": len(group.prompt_ids),
                    "response_tokens": len(generation.token_ids),
                    "finish": generation.finish,
                    "fate": fate,
                    "response_ids": generation.token_ids,
                    "engine_logprobs": generation.logprobs,
                    "version": generation.version,
                }
            )
    return rows
