"""Rules over `schedule: async`: tokens that are too old, a half of the run that waits, and work that is thrown away."""

from dapo.config import Config
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import MIN_STEPS, MetricHistory

OVER_CAP = 0.05  # the fraction of tokens whose importance weight is above its cap, from which a run warns
IDLE = 0.5  # the fraction of a step's seconds in which a half of the run waits: it is then twice as fast as the other
STALE = 0.1  # the fraction of generated tokens that are given up as too old


def too_stale(history: MetricHistory, config: Config) -> Symptom | None:
    """The policy has moved too far since the tokens were sampled."""
    over = history.mean("loss/engine_weight_truncated_fraction")
    if not _is_asked(history, config) or over is None or over <= OVER_CAP:
        return None
    eta = config.max_staleness
    return Symptom(
        f"the importance weight of {over:.0%} of the tokens is beyond its cap: for this learning rate the policies "
        f"that sampled them, up to {eta} steps older, are too old",
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
    share = _share_of_step(history, "time/engine_idle_s")
    if not _is_asked(history, config) or share <= IDLE:
        return None
    return Symptom(
        f"the engine has nothing to sample for {share:.0%} of a step: the updates take longer than the next batch",
        history.means("time/engine_idle_s", "time/trainer_idle_s", "time/step_s"),
        advice="give the trainer what the engine does not use: GPUs (distributed.trainer_ranks) or fewer engines and "
        "more threads",
    )


def idle_trainer(history: MetricHistory, config: Config) -> Symptom | None:
    """The trainer waits for its batch."""
    share = _share_of_step(history, "time/trainer_idle_s")
    if not _is_asked(history, config) or share <= IDLE:
        return None
    return Symptom(
        f"the trainer waits for its batch for {share:.0%} of a step: sampling takes longer than the updates",
        history.means("time/trainer_idle_s", "time/engine_idle_s", "time/step_s"),
        (f"rollout.engines={2 * max(1, config.rollout.engines)}",),
        advice="more hardware belongs to the engines",
    )


def stale_work(history: MetricHistory, config: Config) -> Symptom | None:
    """Much of what is sampled is given up, because it is too old."""
    generated, stale = history.total("rollout/tokens_generated"), history.total("rollout/tokens_stale")
    if not _is_asked(history, config) or not generated or stale <= STALE * generated:
        return None
    return Symptom(
        f"{stale / generated:.0%} of the sampled tokens are given up: their groups were older than "
        f"max_staleness={config.max_staleness} when a batch closed",
        history.means("rollout/tokens_stale", "rollout/groups_stale", "rollout/staleness_mean"),
        (f"max_staleness={2 * config.max_staleness}",) if config.max_staleness <= 32 else (),
        advice="shorten the longest responses, rollout.max_response_tokens",
    )


def _is_asked(history: MetricHistory, config: Config) -> bool:
    return config.samples_ahead and len(history.window()) >= MIN_STEPS


def _share_of_step(history: MetricHistory, name: str) -> float:
    """The fraction of the steps' seconds, without those of evaluations."""
    seconds = history.total("time/step_s") - history.total("time/evaluate_s")
    return history.total(name) / seconds if seconds > 0 else 0.0
