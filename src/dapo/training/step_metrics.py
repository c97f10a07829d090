"""Reports a step: its metrics, its table of judged responses, and the evaluation after it."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import Any

from dapo.config import Config
from dapo.core.loading import own_name
from dapo.core.text import one_line, shorten
from dapo.evaluation.evaluate import EngineSampler, evaluate
from dapo.evaluation.scores import Evaluation
from dapo.rewards.combine import TimedJudge
from dapo.runs.evaluations import write_evaluation
from dapo.runs.outcomes import Outcome, verdict_word
from dapo.runs.rollout_table import (
    branches_json,
    episode_json,
    flat_ranges,
    flat_versions,
    short_fields,
    write_rollouts,
)
from dapo.sampling.queue import Batch
from dapo.sampling.rollout_metrics import (
    mean_of_updates,
    prediction_metrics,
    reflection_metrics,
    response_metrics,
    rollout_metrics,
)
from dapo.sampling.second_verifier import AuditedStep
from dapo.training.state import Run
from dapo.training.stopping import (
    BY_SCORE,
    deciders_of,
    describe_short_batch,
    entropy_collapse_steps,
    require_groups,
    reward_test_command,
    who_decides,
)
from dapo.training.updates import critic_metrics
from dapo.types import Generation, Sample

MIN_GROUPS = 4
MIN_SHARE = 0.5
"""The number of groups with a signal, and the share of their tokens, from which the top problem is
reported.
"""
NO_AUDIT = AuditedStep()
_SHOWN_RESPONSES = 2
_SHOWN_CHARS = 160
# seconds that the table waits for the block, so that the samples reach the idle trainer first
HEAD_START_S = 1.0


@contextmanager
def rollouts_in_background(
    run: Run, batch: Batch, samples: Sequence[Sample]
) -> Iterator[dict[str, float]]:
    """Write the step's judged responses and search their texts while the block runs.

    Both take long at scale. After the block the table is on disk, and the yielded mapping has the
    metrics of the texts. Raises the errors of `require_groups`, and OSError if the table cannot be
    written.
    """
    step = run.state.step + 1
    text_metrics: dict[str, float] = {}

    audit = None if run.audit is None else run.audit.submit(batch.groups, step=step)
    may_begin = Event()

    def work() -> None:
        may_begin.wait(HEAD_START_S)
        decided = [group for group, _ in batch.decided]
        text_metrics.update(reflection_metrics(decided) | response_metrics(decided))
        audited = NO_AUDIT if audit is None else audit()
        if audit is not None:
            text_metrics.update(audited.metrics())
        _write_rollouts(run, batch, samples, audited, step=step)

    with in_background(work, name="dapo-rollouts") as pending:
        try:
            config = run.config
            test = reward_test_command(
                config.reward, config.data, config.environment.title, run.directory.path
            )
            require_groups(
                batch,
                step=step,
                empty_steps=run.state.empty_steps,
                reward_test=test,
                config=config,
            )
            if batch.shortfall:
                run.tracker.message(f"step {step}: short batch: {describe_short_batch(batch)}")
            yield text_metrics
        finally:
            may_begin.set()
        with run.phase("write_rollouts"):  # the remaining wait
            wait([pending])


@contextmanager
def in_background(work: Callable[[], None], *, name: str) -> Iterator[Future[None]]:
    """Do `work` in a thread while the block runs, and wait for it after the block.

    Raises the error of the block, or else the error of `work`.
    """
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        future = pool.submit(work)
        yield future
    future.result()


def report_step(
    run: Run, batch: Batch, samples: Sequence[Sample], more: Mapping[str, float]
) -> None:
    """Count the step as finished, and keep its metrics and `more` until it is evaluated."""
    state = run.state
    step = run.state.step + 1
    tokens_trained = sum(sample.num_trained_tokens for sample in samples)
    metrics = batch_metrics(batch, samples)
    if (prediction := batch.prediction) is not None:
        metrics |= prediction_metrics(prediction)
    metrics |= mean_of_updates(state.updates) | dict(more)
    errors = [v.error for group, _ in batch.judged for v in group.verdicts if v.error is not None]
    if errors:
        most_frequent = Counter(errors).most_common(1)[0][0]
        run.tracker.message(
            f"step {step}: {len(errors)} verifier errors, most often: {most_frequent}"
        )
    if (
        step == 1
        and "reward/accuracy" not in metrics
        and len(errors) < sum(group.size for group, _ in batch.judged)
    ):
        run.tracker.message(
            "step 1: the reward gives scores, neither correct nor wrong, so that there is no"
            " accuracy; reward.threshold=1 would count scores of at least 1 as correct"
        )
    notice = _notice_of_deciders(batch, run.config) if step == 1 else None
    if notice is not None:
        run.tracker.message(f"step 1: {notice}")
    state.entropy_collapse_steps = entropy_collapse_steps(metrics, state.entropy_collapse_steps)
    run.problem_stats.record((group for group, _ in batch.decided), step=step)
    state.empty_steps = 0 if batch.groups else state.empty_steps + 1
    state.advance(
        metrics, tokens_generated=batch.num_generated_tokens, tokens_trained=tokens_trained
    )


def _notice_of_deciders(batch: Batch, config: Config) -> str | None:
    """Say which of several verifiers decides whether a group trains; None if none of them does."""
    verifier = config.reward.verifier
    deciders = deciders_of(verdict for group, _ in batch.judged for verdict in group.verdicts)
    if not deciders or isinstance(verifier, str) or config.dynamic_sampling.metric == "score":
        return None
    who = who_decides(deciders, config)
    others = [own_name(name) for name in verifier if name not in deciders]
    if not others:
        return f"{who}: a response is right where all of them say so"
    names = " and ".join(f"`{name}`" for name in others)
    return (
        f"{who}, and only that decides whether a group trains (Eq. 11); {names} alone lets no group"
        f" train. To learn from the scores, set {BY_SCORE}"
    )


def _signal_metrics(batch: Batch, samples: Sequence[Sample]) -> dict[str, float]:
    """Compute the fraction of groups without a training signal, and the top problem's share.

    That is the largest share of one problem in those tokens, if it exceeds MIN_SHARE.
    """
    with_signal = {
        sample.group_id for sample in samples if sample.has_signal and sample.num_trained_tokens
    }
    flat = 1 - len(with_signal) / max(1, len(batch.groups))
    metrics = {"rollout/zero_advantage_fraction": flat} if batch.groups and flat else {}
    preference = _length_preference(samples)
    if preference is not None:
        metrics["rollout/length_preference"] = preference
    if len(with_signal) < MIN_GROUPS:
        return metrics
    problems = {group.id: group.problem.id for group in batch.groups}
    tokens: Counter[str] = Counter()
    for sample in samples:
        if sample.has_signal:
            tokens[problems[sample.group_id]] += sample.num_trained_tokens
    share = max(tokens.values(), default=0) / max(1, tokens.total())
    return metrics | ({"rollout/top_problem_fraction": share} if share > MIN_SHARE else {})


def _length_preference(samples: Sequence[Sample]) -> float | None:
    """Compute the mean product of a sample's advantage and its relative length.

    The length is the number of its trained tokens, as a difference to the mean of its group and in
    units of that. Below 0, the advantages favour the shorter responses of a group. None if no
    sample has an advantage.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.has_signal and sample.num_trained_tokens:
            groups.setdefault(sample.group_id, []).append(sample)
    products = []
    for members in groups.values():
        mean_length = sum(sample.num_trained_tokens for sample in members) / len(members)
        products += [
            sample.advantage * (sample.num_trained_tokens / mean_length - 1) for sample in members
        ]
    return math.fsum(products) / len(products) if products else None


def batch_metrics(batch: Batch, samples: Sequence[Sample]) -> dict[str, float]:
    """Compute the metrics `reward/*`, `rollout/*` and `critic/*` of a batch and its samples."""
    token_counts = token_account(batch, samples)
    metrics = rollout_metrics(
        batch.decided, batch.group_counts, token_counts, shortfall=batch.shortfall
    )
    tokens_trained = sum(sample.num_trained_tokens for sample in samples)
    if kl := [sample.kl for sample in samples if sample.kl is not None]:
        metrics["reward/kl_mean"] = math.fsum(kl) / max(
            1, sum(sample.num_sampled for sample in samples)
        )
    metrics |= {"rollout/epoch": batch.epoch, "rollout/tokens_in_minibatches": tokens_trained}
    # a probe has no samples
    if samples:
        metrics |= _signal_metrics(batch, samples)
    return metrics | critic_metrics(samples)


def token_account(batch: Batch, samples: Sequence[Sample]) -> dict[Outcome, int]:
    """Count a batch's generated tokens by what becomes of them; the sum is all of its tokens.

    In a group that trains, the tokens of truncated responses that `overlong.mode: filter` masks
    count as filtered, and those of responses without a verdict as invalid.
    """
    counts = dict(batch.token_counts)
    masked = sum(sample.num_sampled - sample.num_trained_tokens for sample in samples)
    invalid = 0
    for group in batch.groups:
        for generation, reward in zip(group.generations, group.rewards, strict=True):
            if reward is None:
                invalid += generation.num_sampled
    reasons: tuple[tuple[Outcome, int], ...] = (("filtered", masked), ("invalid", invalid))
    for outcome, tokens in reasons:
        if tokens:
            counts[outcome] = counts.get(outcome, 0) + tokens
            counts["trained"] -= tokens
    return counts


def evaluate_and_log(run: Run) -> None:
    """Evaluate if due, and write the step's metrics, unless they are written already."""
    state = run.state
    step = run.state.step
    if state.pending_metrics is None:
        return
    run.keep_verifier_output()
    metrics = dict(state.pending_metrics)
    every = run.config.train.eval_every
    if step == 0 or run.is_complete or (every and step % every == 0):
        began = time.perf_counter()
        run.sync_engine()
        evaluation = _evaluate(run, step)
        if state.closed_at is not None:  # the engine was at work
            state.closed_at += time.perf_counter() - began
        if evaluation is not None:
            metrics |= evaluation.metrics()
            if step == 0:
                _show_first_responses(run, evaluation)
    if step > 0:
        run.timer.add("judge_wait", run.sampling.pop_judge_wait_s())
        judge = run.sampling.judge  # its calls in an evaluation count as well
        if isinstance(judge, TimedJudge):
            seconds = judge.pop_mean_latency()
            if seconds is not None:
                metrics["time/verifier_call_s"] = round(seconds, 6)
        if run.environment is not None:
            metrics["time/environment_s"] = round(run.environment.pop_call_s(), 6)
        tokens = "tokens_in_minibatches" if run.config.is_supervised else "tokens_generated"
        timings = run.timer.metrics(tokens=int(metrics[f"rollout/{tokens}"]))
        state.wall_s += timings["time/step_s"]
        metrics |= timings
    if metrics:
        metrics["time/warnings"] = run.warn(metrics)
        run.tracker.log(step, metrics)
    state.pending_metrics = None
    state.is_saved = False


def evaluate_last(run: Run) -> None:
    """Evaluate the last finished step if needed; its metrics are a further line of the step."""
    step = run.state.step
    if run.directory.eval(step).exists():
        return
    run.sync_engine()
    if (evaluation := _evaluate(run, step)) is not None:
        run.tracker.log(step, evaluation.metrics())
        run.state.is_saved = False  # its checkpoint lacks the accuracy


def _evaluate(run: Run, step: int) -> Evaluation | None:
    """Evaluate the engine's policy after `step` steps, and write eval/step_*.json."""
    if run.eval_plan is None or not run.held_out:
        return None
    sampling = run.sampling
    with run.phase("evaluate", total=len(run.held_out)) as on_progress:
        sampler = EngineSampler(sampling.engine, sampling.encoder, run.eval_plan)
        evaluation = evaluate(
            sampler, sampling.judge, run.held_out, on_progress=on_progress, check=run.stop.check
        )
    write_evaluation(run.directory, step, summary := evaluation.summary(), evaluation.table())
    run.state.accuracy = summary["accuracy"]
    if summary["warning"] is not None:
        run.tracker.message(
            f"step {step}: evaluation: {summary['warning']}; the most frequent error:"
            f" {summary['most_frequent_error']}"
        )
    return evaluation


def _show_first_responses(run: Run, evaluation: Evaluation) -> None:
    """Show the first responses before training, where most problems of a new setup show."""
    shown = [entry for entry in evaluation.problems if entry.valid][:_SHOWN_RESPONSES]
    if not shown:
        return
    lines = [f"step {run.state.step}: responses before training:"]
    for judged in shown:
        problem = judged.problem
        response = judged.valid[0]
        texts = (problem.question, problem.answer, response.text)
        question, reference, text = (
            shorten(one_line(part), _SHOWN_CHARS, keep="end") for part in texts
        )
        if response.correct is None:
            mark = f"score {response.score:g}"
        else:
            mark = verdict_word(response.correct, None)
        lines += [
            f"  question   {question}",
            f"  reference  {reference}",
            f"  response   {text}  [{mark}]",
        ]
    run.tracker.message("\n".join(lines))


def _write_rollouts(
    run: Run, batch: Batch, samples: Sequence[Sample], audited: AuditedStep, *, step: int
) -> None:
    """Write the table of responses, and remove old tables, as `log.rollouts` sets."""
    log = run.config.log
    if log.rollouts == "none":
        return
    with_logprobs = log.rollouts != "no-logprobs"
    decode = run.sampling.encoder.decode_prompt
    rows = rollout_rows(
        batch, samples, decode, step=step, with_logprobs=with_logprobs, audited=audited
    )
    write_rollouts(run.directory.rollouts(step), rows)
    if log.rollout_steps is not None:
        run.directory.drop_old_rollouts(step, log.rollout_steps)


def rollout_rows(
    batch: Batch,
    samples: Sequence[Sample],
    decode_prompt: Callable[[Sequence[int]], str],
    *,
    step: int,
    with_logprobs: bool = True,
    audited: AuditedStep = NO_AUDIT,
) -> Iterator[dict[str, Any]]:
    """Yield a row of rollouts/*.parquet for each judged response of a batch.

    The column `sampled` exists only if a response has tokens that were not sampled, `episode` only
    with episodes, `versions` only if several policies sampled a response, and `branches` only if an
    agent wrote its own prompts.

    Args:
        batch: The judged groups of a step.
        samples: The samples that the step trains on, for their advantages.
        decode_prompt: Turns the ids of a prompt into text.
        step: The step.
        with_logprobs: Store the engine's log-probability of each token.
        audited: The verdicts of the second verifier.
    """
    generations = [generation for group, _ in batch.judged for generation in group.generations]
    optional_columns: dict[str, Callable[[Generation], Any]] = {}
    if any(generation.sampled for generation in generations):
        optional_columns["sampled"] = flat_ranges
    if any(generation.episode for generation in generations):
        optional_columns["episode"] = episode_json
    if any(generation.versions for generation in generations):
        optional_columns["versions"] = flat_versions
    if any(branches_json(generation) for generation in generations):
        optional_columns["branches"] = branches_json
    advantages = {(sample.group_id, sample.index): sample.advantage for sample in samples}
    audits = audited.verdicts()
    for group, outcome in batch.judged:
        prompt = decode_prompt(group.prompt_ids)
        question = group.problem.question
        fields = short_fields(group.problem.fields, known=[group.problem.answer])
        for i, (generation, verdict) in enumerate(
            zip(group.generations, group.verdicts, strict=True)
        ):
            audit = audits.get((group.id, i))
            yield {
                "step": step,
                "group_id": group.id,
                "problem_id": group.problem.id,
                "source": group.problem.source,
                "sample": i,
                "question": question,
                "prompt": prompt,
                "response": (
                    group.texts[i] if generation.episode is None else generation.episode.transcript
                ),
                "answer": group.problem.answer,
                "fields": fields,
                "correct": verdict.correct,
                "score": None if verdict.error is not None else verdict.score,
                "components": json.dumps(dict(verdict.components)) if verdict.components else None,
                "error": verdict.error,
                "reward": group.rewards[i],
                "advantage": advantages.get((group.id, i)),
                "prompt_tokens": len(group.prompt_ids),
                "response_tokens": generation.num_sampled,
                "finish": generation.finish,
                "outcome": outcome,
                "response_ids": generation.token_ids,
                "engine_logprobs": generation.logprobs if with_logprobs else None,
                "version": generation.version,
                "audit_correct": None if audit is None else audit.correct,
                "audit_score": None if audit is None or audit.error is not None else audit.score,
                "audit_error": None if audit is None else audit.error,
            } | {name: value(generation) for name, value in optional_columns.items()}
