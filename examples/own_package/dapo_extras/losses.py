"""The loss `reinforce`: the policy gradient without a ratio and without a bound."""

from typing import Any

from torch import Tensor

from dapo.algo.loss import describe_tokens
from dapo.algo.surrogate_table import Surrogate
from dapo.algo.surrogates import token_log_ratios

REINFORCE = Surrogate(
    "dapo_extras.losses:reinforce_loss",
    "A log pi, without a ratio",
    "the policy gradient, no ratio is clipped",
    source="Williams, 1992",
)


def reinforce_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    **bounds: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `-sum w A log pi` over the trained tokens `[T]`, and the sums that describe them."""
    trained, log_ratio = token_log_ratios(logprobs, old_logprobs, advantages, mask, weights)
    loss = -(logprobs.where(trained, 0.0) * advantages * weights).sum()
    return loss, describe_tokens(logprobs, log_ratio, trained)
