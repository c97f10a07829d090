"""Ends a diverged run once its step is finished and can be saved; warnings come from `dapo.training.rules`."""

from collections.abc import Mapping

from dapo.core.errors import NumericsError
from dapo.training.state import Run

MAX_SKIPPED_UPDATES = 10
"""Updates skipped in a row (loss or gradient not finite, or loss.max_approx_kl exceeded) that end a run."""

MIN_ENTROPY = 1.0e-4
"""Nats per token, the mean of -logprob over a step's responses, below which the policy is all but deterministic."""

ENTROPY_COLLAPSE_STEPS = 5
"""Steps in a row below MIN_ENTROPY that end a run: one such step may be a batch of easy problems."""


def entropy_collapse_steps(metrics: Mapping[str, float], before: int) -> int:
    """Count the steps in a row, up to the one with these metrics, in which the policy was all but deterministic.

    The entropy is `rollout/entropy_estimate`: unlike loss/entropy it includes groups without a signal, most of the
    groups of a collapsing policy. A step without a sampled token changes nothing.
    """
    if not metrics["rollout/response_tokens_max"]:
        return before
    return before + 1 if metrics["rollout/entropy_estimate"] < MIN_ENTROPY else 0


def check_divergence(run: Run) -> None:
    """Raise NumericsError where further training is useless. The finished step is worth saving."""
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
