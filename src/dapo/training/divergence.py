"""Divergence: what a run warns of, and what ends it once the step is finished and can be saved."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dapo.config import Config
from dapo.core.errors import NumericsError
from dapo.training.rollout import Batch
from dapo.training.state import Run

MAX_SKIPPED_UPDATES = 10
"""Updates skipped in a row (loss or gradient not finite, or loss.max_approx_kl exceeded) that end a run."""

MAX_LOGPROB_GAP = 0.1  # nats per token between sampler and trainer, mean over a step's tokens, above which a run warns

MIN_ENTROPY = 1.0e-4
"""Nats per token, the mean of -logprob over a step's responses, below which the policy is all but deterministic."""

ENTROPY_COLLAPSE_STEPS = 5
"""Steps in a row below MIN_ENTROPY that end a run: one such step may be a batch of easy problems."""


def warn_divergence(run: Run, metrics: Mapping[str, float], *, step: int) -> None:
    """Log where updates were skipped, and where the engine's log-probabilities are not the trainer's."""
    for warning in (_skipped_updates_warning(run.state.updates), _logprob_gap_warning(run.config, metrics)):
        if warning:
            run.tracker.message(f"step {step}: {warning}")


def entropy_collapse_steps(batch: Batch, before: int) -> int:
    """How many steps in a row, this one included, the policy was all but deterministic."""
    entropy = sampled_entropy(batch)
    if entropy is None:
        return before
    return before + 1 if entropy < MIN_ENTROPY else 0


def sampled_entropy(batch: Batch) -> float | None:
    """The policy's entropy in nats per token, estimated by the mean of -log p over the tokens that it sampled.

    Unlike loss/entropy it counts the groups without a signal, of which a collapsing policy has most. Like every metric
    of a run it leaves out what was in flight when the batch closed. None where no token was sampled.
    """
    rows = [generation.logprobs for group, _ in batch.decided for generation in group.generations]
    count = sum(map(len, rows))
    return -math.fsum(float(np.sum(row, dtype=np.float64)) for row in rows) / count if count else None


def check_divergence(run: Run) -> None:
    """Raise NumericsError where training on would be in vain. The finished step is worth saving."""
    skipped = run.policy.skipped_in_a_row
    if skipped >= MAX_SKIPPED_UPDATES:
        raise NumericsError(
            f"{skipped} updates in a row were skipped (at most {MAX_SKIPPED_UPDATES - 1} may be): the loss or the "
            "gradient was not finite, or the policy too far from the one that sampled (loss.max_approx_kl="
            f"{run.config.loss.max_approx_kl}); lower optim.lr, or look at loss/* and optim/grad_norm before that"
        )
    if run.state.entropy_collapse_steps >= ENTROPY_COLLAPSE_STEPS:
        raise NumericsError(
            f"the policy has collapsed: its entropy was below {MIN_ENTROPY:g} nats per token in "
            f"{run.state.entropy_collapse_steps} steps in a row, so the responses to a prompt are all alike; "
            "start again with a lower optim.lr or a higher loss.clip_high"
        )


def _skipped_updates_warning(updates: Sequence[Mapping[str, float]]) -> str:
    skipped = [update for update in updates if update["optim/skipped"]]
    if not skipped:
        return ""
    causes = [
        f"gradient norm {update['optim/grad_norm']:.3g}, loss/approx_kl {update.get('loss/approx_kl', 0.0):.3g}"
        for update in skipped
    ]
    return f"{len(skipped)} of {len(updates)} updates skipped, the first with {causes[0]}"


def _logprob_gap_warning(config: Config, metrics: Mapping[str, float]) -> str:
    """Warning text where sampler and trainer log-probabilities differ by more than MAX_LOGPROB_GAP."""
    gap = metrics.get("rollout/engine_logprob_gap_mean", 0.0)
    if gap <= MAX_LOGPROB_GAP or config.loss.engine_correction is not None:  # NaN is a gap too
        return ""
    return (
        f"sampler and trainer differ by {gap:.3g} nats per token on average (more than {MAX_LOGPROB_GAP:g}): the "
        "engine may hold other weights, or compute in a coarser dtype, which loss.engine_correction=tis corrects"
    )
