"""Rules over a run's results: held-out accuracy, a second verifier's verdicts, and seconds."""

from math import sqrt
from statistics import fmean, stdev

from dapo.config import Config
from dapo.evaluation.intervals import student_quantile
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import MetricHistory

MIN_STEPS = 3
"""Steps that a rule over means needs."""
AUDIT_GAP = 0.1
"""The gap between the reward's verifier and the audit's, in accuracy or score, that the interval must lie above."""
TRAINING_GAIN = 0.05
"""The gain in training accuracy that makes a loss in the evaluation overfitting."""
JUDGE_WAIT = 0.5
"""The fraction of a step spent waiting for verdicts above which a run warns."""
MIN_JUDGE_WAIT_S = 1.0
"""Seconds of waiting per step below which nothing is worth changing."""


def audit_gap(history: MetricHistory, config: Config) -> Symptom | None:
    """The reward's verifier accepts what a second verifier refuses."""
    gaps = history.values("audit/gap")
    if len(gaps) < MIN_STEPS:
        return None
    gap, half = fmean(gaps), student_quantile(len(gaps) - 1) * stdev(gaps) / sqrt(len(gaps))
    if gap - half <= AUDIT_GAP:
        return None
    before = history.first_mean("audit/gap")
    grown = before is not None and gap - half > before
    trend = (
        f", and it was {before:.3g} in the first steps: the run learns what only the reward accepts" if grown else ""
    )
    return Symptom(
        f"the reward's verifier is {gap:.3g} above the audit's on the same responses (95 % interval {gap - half:.3g} "
        f"to {gap + half:.3g}){trend}",
        {
            "audit/gap": gap,
            "audit/gap at first": before,
            "audit/mean": history.mean("audit/mean"),
            "audit/responses": history.total("audit/responses"),
        },
        (f"reward.verifier={config.audit.name_and_options[0]}",) if config.audit.name_and_options else (),
        advice="read the responses below, which the reward accepts and the audit refuses; then fix one of the two",
    )


def overfit(history: MetricHistory, config: Config) -> Symptom | None:
    """Training goes up while the evaluation goes down."""
    best, last = history.best_evaluation, history.last_evaluation
    if best is None or last is None or best.step == last.step or not last.high < best.low:
        return None
    name = "reward/accuracy" if history.mean("reward/accuracy") is not None else "reward/score_mean"
    accuracy, before = history.mean(name), history.first_mean(name)
    if accuracy is None or before is None or accuracy - before < TRAINING_GAIN:
        return None
    return Symptom(
        f"held-out accuracy fell from {best.accuracy:.1%} at step {best.step} to {last.accuracy:.1%} at step "
        f"{last.step}, beyond both intervals, while training went from {before:.3g} to {accuracy:.3g} ({name})",
        {
            "eval accuracy": last.accuracy,
            "eval accuracy, best": best.accuracy,
            name: accuracy,
            f"{name} at first": before,
            "rollout/epoch": history.mean("rollout/epoch"),
        },
        (f"train.num_steps={max(best.step, 1)}", "loss.kl_coef=0.001"),
        advice="more problems, or problems like those of the evaluation; the best checkpoint is kept",
    )


def slow_verifier(history: MetricHistory, config: Config) -> Symptom | None:
    """The engine waits for verdicts."""
    waited = history.mean("time/judge_wait_s")
    step_s, evaluate_s = history.total("time/step_s"), history.total("time/evaluate_s")
    training_s = (step_s - evaluate_s) / max(1, len(history.window()))
    if waited is None or not waited > max(JUDGE_WAIT * training_s, MIN_JUDGE_WAIT_S):
        return None
    per_call = history.mean("time/verifier_call_s")
    call = "" if per_call is None else f", {per_call:.2g} s per call"
    return Symptom(
        f"the engine waited {waited:.1f} of {training_s:.1f} s per step for verdicts{call}: the verifier is slower "
        "than the model",
        {
            "time/judge_wait_s": waited,
            "time/step_s": history.mean("time/step_s"),
            "time/verifier_call_s": per_call,
        },
        (f"reward.workers={4 * config.reward.workers}",),
        advice="or make it faster: dapo reward test times it",
    )
