"""Rules over a run's results: held-out accuracy, a second verifier's verdicts, seconds, episodes,
old policies.
"""

import json
import shlex
from typing import Any

from dapo.config import Config
from dapo.config.lengths import limit_of_response
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import AUDIT_GAP, GAIN, LONG, MIN_STEPS, MetricHistory
from dapo.training.rules.sampling_rules import decided

AUDIT_EVIDENCE = 20.0
"""The evidence for a gap that a run without one reaches with a probability of at most 1 in 20, over
all its steps.
"""
JUDGE_WAIT = 0.5  # the fraction of a step spent waiting for verdicts above which a run warns
MIN_JUDGE_WAIT_S = 1.0  # seconds of waiting per step below which nothing is worth changing
# the fraction of episodes without an answer of their environment above which a run warns
ENVIRONMENT_ERRORS = 0.05
CUT = 0.9  # the fraction of episodes that are cut above which a run warns
TOOL_ERRORS = 0.9  # the fraction of tool calls that fail above which a run warns
# the fraction of tokens whose importance weight is above its cap, from which a run warns
OVER_CAP = 0.05
# the fraction of a step's seconds in which a half of the run waits: it is then twice as fast as the
# other
IDLE = 0.5
STALE = 0.1  # the fraction of generated tokens that are given up as too old


def audit_gap(history: MetricHistory, config: Config) -> Symptom | None:
    """The reward's verifier accepts what a second verifier refuses."""
    gap = history.mean("audit/gap")
    first_gap = history.first_mean("audit/gap")
    if gap is None or not gap > AUDIT_GAP or history.audit.wealth < AUDIT_EVIDENCE:
        return None
    trend = ""
    if first_gap is not None and first_gap <= AUDIT_GAP:
        trend = (
            f", and it was {first_gap:.3g} in the first steps: the run learns what only the reward"
            " accepts"
        )
    return Symptom(
        f"the reward's verifier is {gap:.3g} above the audit's on the same responses; a gap of at"
        f" most {AUDIT_GAP:g} would look like this in fewer than one run in"
        f" {AUDIT_EVIDENCE:g}{trend}",
        {"audit/gap at first": first_gap}
        | history.means("audit/gap", "audit/mean", "audit/problems"),
        _audit_as_reward(config),
        advice=(
            "read the responses below, which the reward accepts and the audit refuses; then fix one"
            " of the two"
        ),
    )


def _audit_as_reward(config: Config) -> tuple[str, ...]:
    """Return the options with which the audit's verifier is the reward; it cannot audit itself."""
    if config.audit.name_and_options is None:
        return ()
    name, verifier_options = config.audit.name_and_options
    options = []
    if verifier_options or config.reward.options:
        options = [f"reward.options={json.dumps(verifier_options, separators=(',', ':'))}"]
    return (shlex.join([f"reward.verifier={name}", *options, "audit.verifier=null"]),)


def overfit(history: MetricHistory, config: Config) -> Symptom | None:
    """Training goes up while the evaluation goes down."""
    best = history.best_evaluation
    last = history.last_evaluation
    if best is None or last is None or best.step == last.step or not last.high < best.low:
        return None
    name = history.performance
    accuracy = history.mean(name)
    first_accuracy = history.first_mean(name)
    if accuracy is None or first_accuracy is None or accuracy - first_accuracy < GAIN:
        return None
    style = ".3f" if last.is_score else ".1%"
    fell = (
        f"from {best.accuracy:{style}} at step {best.step} to {last.accuracy:{style}} at"
        f" {last.step}"
    )
    fell = f"held-out {'mean score' if last.is_score else 'accuracy'} fell {fell}"
    evidence = {
        "eval accuracy": last.accuracy,
        "eval accuracy, best": best.accuracy,
        f"{name} at first": first_accuracy,
    }
    if last.truncated - best.truncated >= (best.accuracy - last.accuracy) / 2:
        section = "rollout" if config.eval.max_response_tokens is None else "eval"
        option, limit = limit_of_response(config, section)
        if option.startswith("rollout."):
            option = "eval.max_response_tokens"
        return Symptom(
            f"{fell}, where {last.truncated:.0%} of its responses end at the limit of {limit}"
            f" tokens, after {best.truncated:.0%}: they are cut off, which is not overfitting",
            evidence | {"eval truncated_fraction": last.truncated},
            (f"{option}={2 * limit}",),
        )
    return Symptom(
        f"{fell}, beyond both intervals, while training went from {first_accuracy:.3g} to"
        f" {accuracy:.3g} ({name})",
        evidence | history.means(name, "rollout/epoch"),
        (f"loss.kl_coef={10 * config.loss.kl_coef or 0.001:g}",),
        advice=f"{_back_to(best.step)}; more problems, or problems like those of the evaluation",
    )


def _back_to(step: int) -> str:
    """Say how to return to the policy of an earlier step, which a resume cannot do."""
    if step == 0:
        return "the model before training is the best: begin a new run with other options"
    return (
        f"go back to step {step}: dapo fork RUN_DIR --step {step} while its checkpoint is whole, or"
        f" dapo export RUN_DIR my-model --step {step} once it holds only weights"
    )


def slow_verifier(history: MetricHistory, config: Config) -> Symptom | None:
    """The engine waits for verdicts."""
    waited = history.mean("time/judge_wait_s")
    step_s = history.total("time/step_s")
    evaluate_s = history.total("time/evaluate_s")
    training_s = (step_s - evaluate_s) / max(1, len(history.window()))
    if waited is None or not waited > max(JUDGE_WAIT * training_s, MIN_JUDGE_WAIT_S):
        return None
    per_call = history.mean("time/verifier_call_s")
    call = "" if per_call is None else f", {per_call:.2g} s per call"
    workers = min(
        4 * config.reward.workers, config.rollout.prompts_per_step * config.rollout.group_size
    )
    # one per response at most
    change = (f"reward.workers={workers}",) if workers > config.reward.workers else ()
    return Symptom(
        f"the engine waited {waited:.1f} of {training_s:.1f} s per step for verdicts{call}: the"
        " verifier is slower than the model",
        history.means("time/judge_wait_s", "time/step_s", "time/verifier_call_s"),
        change,
        advice="make it faster: dapo test times it",
    )


def environment_errors(history: MetricHistory, config: Config) -> Symptom | None:
    """The environment fails in many episodes."""
    errors = history.total("rollout/environment_errors")
    episodes = decided(history) * config.rollout.group_size
    if history.steps < MIN_STEPS or errors <= ENVIRONMENT_ERRORS * episodes:
        return None
    player = "agent" if config.runs_agent else "environment"
    return Symptom(
        f"{errors / max(1, episodes):.0%} of the episodes have no verdict, and train nothing: the"
        f" {player} fails in them",
        history.means("rollout/environment_errors"),
        advice=(
            f"correct the {player}: the reason is below; if calls exceed their time, raise"
            " environment.timeout_s"
        ),
    )


def episodes_cut(history: MetricHistory, config: Config) -> Symptom | None:
    """The environment ends hardly any episode, and few reach the limit of tokens."""
    if config.runs_agent:  # `empty_answers` says what an agent misses
        return None
    cut = history.rate("rollout/episodes_cut_fraction")
    truncated = history.mean("rollout/truncated_fraction") or 0.0
    if cut <= CUT or truncated > cut / 2:  # `truncation` reports a limit of tokens
        return None
    limit = config.environment.max_turns
    return Symptom(
        f"{cut:.0%} of the episodes are cut, most of them after {limit} turns, the limit: they are"
        " rewarded before they have ended",
        history.means(
            "rollout/episodes_cut_fraction", "rollout/turns_mean", "rollout/truncated_fraction"
        ),
        (f"environment.max_turns={min(2 * limit, 1000)}",),
        advice="or let the environment end an episode that cannot be solved any more (done=True)",
    )


def no_tool_calls(history: MetricHistory, config: Config) -> Symptom | None:
    """There are tools, and no episode calls one."""
    if (
        history.steps < MIN_STEPS
        or history.mean("rollout/tool_calls") is None
        or history.total("rollout/tool_calls")
    ):
        return None
    called_before = any(history.values("rollout/tool_calls", LONG))
    if not called_before and not config.environment.tools:
        return None  # an environment need not have tools
    if called_before:
        result = "any more: the policy has learned to do without"
    else:
        result = "so they change nothing"
    return Symptom(
        f"no episode calls a tool{' ' if called_before else ', '}{result}",
        history.means("rollout/tool_calls", "rollout/turns_mean"),
        advice=(
            "describe in data.instruction when to call one, with an example of a call; a form that"
            " the model never samples cannot be learned from rewards alone"
        ),
    )


def tool_errors(history: MetricHistory, config: Config) -> Symptom | None:
    """Nearly all tool calls fail."""
    calls = history.total("rollout/tool_calls")
    errors = history.total("rollout/tool_errors")
    if history.steps < MIN_STEPS or not calls or errors <= TOOL_ERRORS * calls:
        return None
    return Symptom(
        f"{errors / calls:.0%} of the tool calls fail, and the policy reads only their errors",
        history.means("rollout/tool_calls", "rollout/tool_errors"),
        advice=(
            "read the errors in the responses below: a tool that raises, or calls whose arguments"
            " do not fit; an example of a call in data.instruction shows the form"
        ),
    )


def too_stale(history: MetricHistory, config: Config) -> Symptom | None:
    """The policy has moved too far since the tokens were sampled."""
    over = history.mean("loss/engine_weight_truncated_fraction")
    if not _is_async(history, config) or over is None or over <= OVER_CAP:
        return None
    eta = config.max_staleness
    return Symptom(
        f"the importance weight of {over:.0%} of the tokens is beyond its cap: for this learning"
        f" rate the policies that sampled them, up to {eta} steps older, are too old",
        history.means(
            "loss/engine_weight_truncated_fraction",
            "loss/engine_weight_mean",
            "rollout/staleness_mean",
            "loss/movement",
        ),
        (*((f"max_staleness={eta // 2}",) if eta > 1 else ()), f"optim.lr={config.optim.lr / 2:g}"),
    )


def idle_engine(history: MetricHistory, config: Config) -> Symptom | None:
    """The engine waits for the trainer."""
    advice = (
        "give the trainer what the engine does not use: GPUs (distributed.trainer_ranks) or fewer"
        " engines and more "
    )
    cause = (
        "the engine has nothing to sample for {:.0%} of a step: the updates take longer than the"
        " next batch"
    )
    return _idle(history, config, "time/engine_idle_s", cause, advice=f"{advice}threads")


def idle_trainer(history: MetricHistory, config: Config) -> Symptom | None:
    """The trainer waits for its batch."""
    option = f"rollout.engines={2 * max(1, config.rollout.engines)}"
    cause = (
        "the trainer waits for its batch for {:.0%} of a step: sampling takes longer than the"
        " updates"
    )
    change: tuple[str, ...] = (option,)
    advice = "more hardware belongs to the engines"
    # the number of GPUs is no option, and two engines on one GPU sample no faster than one
    if config.train.device == "cuda" and not config.uses_ray:
        change = ()
        advice += f": {option} where another GPU is idle"
    return _idle(history, config, "time/trainer_idle_s", cause, change=change, advice=advice)


def _idle(
    history: MetricHistory, config: Config, name: str, cause: str, **remedy: Any
) -> Symptom | None:
    """Return a symptom if a metric's seconds exceed IDLE of the steps' own, without evaluations."""
    seconds = history.total("time/step_s") - history.total("time/evaluate_s")
    share = history.total(name) / seconds if seconds > 0 else 0.0
    if not _is_async(history, config) or share <= IDLE:
        return None
    idle = history.means("time/engine_idle_s", "time/trainer_idle_s", "time/step_s")
    return Symptom(cause.format(share), idle, **remedy)


def stale_work(history: MetricHistory, config: Config) -> Symptom | None:
    """Much of what is sampled is given up, because it is too old."""
    generated = history.total("rollout/tokens_generated")
    stale = history.total("rollout/tokens_stale")
    if not _is_async(history, config) or not generated or stale <= STALE * generated:
        return None
    return Symptom(
        f"{stale / generated:.0%} of the sampled tokens are given up: their groups were older than "
        f"max_staleness={config.max_staleness} when a batch closed",
        history.means("rollout/tokens_stale", "rollout/groups_stale", "rollout/staleness_mean"),
        (f"max_staleness={2 * config.max_staleness}",) if config.max_staleness <= 32 else (),
        advice="shorten the longest responses, rollout.max_response_tokens",
    )


def _is_async(history: MetricHistory, config: Config) -> bool:
    return config.samples_ahead and len(history.window()) >= MIN_STEPS
