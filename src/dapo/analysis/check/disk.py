"""Estimates the disk space that a run leaves: checkpoints, responses, evaluations and the rest."""

from math import ceil

from dapo.analysis.check.estimate import ResourceEstimate
from dapo.config import Config

# measured on small runs: what a file takes apart from its rows, and a row apart from its tokens
TABLE_BYTES = 5_000
RESPONSE_BYTES = 50
TOKEN_BYTES = 7  # of a token in a table of responses: id, log-probability, text
EVALUATED_RESPONSE_BYTES = 400
EVALUATED_TOKEN_BYTES = 5
METRICS_BYTES = 2_100  # of a step
CURVES_BYTES = 130_000
TOKENIZER_BYTES = 72  # of a token of the vocabulary, in tokenizer.json


def disk_bytes(
    estimate: ResourceEstimate, *, eval_problems: int | None, in_training: bool = False
) -> dict[str, float]:
    """Return the bytes of a run directory by part, after the run.

    Args:
        estimate: the configuration, the model's sizes and the assumed responses.
        eval_problems: the number of evaluation problems; None: unknown, taken as 0.
        in_training: the largest size while the run trains, when older checkpoints are still whole.
    """
    profile = estimate.profile
    responses = estimate.generated_responses
    tokens = responses * profile.mean_response_tokens
    steps = steps_in_budget(estimate.config, tokens)
    estimate = estimate.changed("train", num_steps=steps)
    config = estimate.config
    stored_steps = steps
    if config.log.rollouts == "none" or config.is_supervised:
        stored_steps = 0
    elif config.log.rollout_steps is not None:
        stored_steps = min(steps, config.log.rollout_steps)
    token_bytes: float = TOKEN_BYTES
    if config.log.rollouts == "no-logprobs":
        token_bytes = TOKEN_BYTES / 2
    rollouts = TABLE_BYTES + RESPONSE_BYTES * responses + token_bytes * tokens
    evaluated = (eval_problems or 0) * config.eval.samples_per_problem
    evaluation = (
        EVALUATED_RESPONSE_BYTES + EVALUATED_TOKEN_BYTES * profile.mean_response_tokens
    ) * evaluated
    return {
        "checkpoints": _checkpoint_bytes(estimate, in_training=in_training),
        "rollouts": stored_steps * rollouts,
        "eval": num_evaluations(config) * evaluation,
        "other": CURVES_BYTES
        + METRICS_BYTES * steps
        + TOKENIZER_BYTES * estimate.dimensions.vocabulary,
    }


def steps_in_budget(config: Config, step_tokens: float) -> int:
    """Return the number of steps of a run, which `train.token_budget` may end early.

    `step_tokens` are the tokens that a step generates.
    """
    train = config.train
    if train.token_budget is None or not step_tokens:
        return train.num_steps
    # the step that reaches the budget is the last one
    return min(train.num_steps, ceil(train.token_budget / step_tokens))


def num_evaluations(config: Config) -> int:
    """Return how often a run evaluates: before the first step, every few steps and at the end."""
    if config.data.eval is None:
        return 0
    return 1 + _times(config.train.num_steps, config.train.eval_every)


def export_bytes(estimate: ResourceEstimate) -> int:
    """Return the bytes of an exported model."""
    return estimate.memory.element_bytes * estimate.dimensions.parameters


def _checkpoint_bytes(estimate: ResourceEstimate, *, in_training: bool) -> float:
    """Return the bytes of the checkpoints that stay, with and without optimizer state."""
    train = estimate.config.train
    memory = estimate.memory
    written = _times(train.num_steps, train.save_every)
    kept = min(written, train.kept_in_training)
    whole = 3 * memory.master_bytes * (memory.trainable_parameters + memory.critic_parameters)
    if in_training:
        # the best one by evaluation stays beside the newest, and a new one is complete before an
        # old one is removed
        has_best = estimate.config.data.eval is not None and train.eval_every > 0
        return min(written, kept + 1 + has_best) * whole
    num_whole = min(kept, 1 if train.keep_checkpoints is None else train.keep_checkpoints)
    weights = memory.element_bytes * memory.trainable_parameters
    return num_whole * whole + (kept - num_whole) * weights


def _times(steps: int, every: int) -> int:
    """Return how often something happens every few steps and after the last; 0: only after it."""
    return ceil(steps / every) if every else 1
