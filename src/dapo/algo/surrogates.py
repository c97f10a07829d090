"""GSPO, CISPO and SAPO: surrogates that replace the clipped ratio of Eq. 8.

Arguments, results and errors are those of `policy_loss`, with a number for each of the packed
tokens `[T]`. While every ratio is 1, all have the gradient of `policy_loss`: they differ in the
second and later updates of a step, and wherever old log-probabilities come from an older policy.
"""

import math

import torch
from torch import Tensor

from dapo.algo.loss import (
    Responses,
    check_shapes,
    clip_bounds,
    clip_log_ratio,
    describe_tokens,
    masked_log_ratio,
    over_responses,
)

POSITIVE_TEMPERATURE = 1.0
NEGATIVE_TEMPERATURE = 1.05  # SAPO's temperatures for A > 0 and A < 0, as published


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    responses: Responses,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (arXiv 2507.18071): one ratio for each response, clipped as a whole, in the form of
    GSPO-token (Eq. 13, 14).

        s_i  = (pi(o_i) / pi_old(o_i))^(1 / |o_i|) = exp(mean_t log r_it)
        s_it = sg(s_i) pi_it / sg(pi_it)
        loss = -sum_i sum_t w_it min(s_it A_i, clip(s_it, 1 - clip_low, 1 + clip_high) A_i)

    s_it has the value of s_i and the gradient of its own token alone. With equal weights in a
    response, value and gradient are those of Eq. 5 to 7, with `aggregate="sequence"` as in the
    paper. Where weights differ, as with an engine correction by token, a token's gradient follows
    its own weight: one of weight 0 does not train, which Eq. 7 would give the mean of the others'
    weights. In the sums r is s_i at each token of response i. Published bounds: 3e-4 and 4e-4.

    Args:
        logprobs: `[T]`, as for `policy_loss`, like the four after it.
        old_logprobs: `[T]`.
        advantages: `[T]`.
        mask: `[T]`.
        weights: `[T]`.
        responses: the response of each token.
        clip_low: s_i is clipped to at least 1 - clip_low.
        clip_high: s_i is clipped to at most 1 + clip_high.

    Raises:
        ValueError: the shapes do not fit, or some tokens of a response are not in the call.
    """
    trained, log_ratio = token_log_ratios(logprobs, old_logprobs, advantages, mask, weights)
    total, length = over_responses(log_ratio, trained, responses)
    # the mean, with the gradient of the own token
    log_ratio = torch.where(
        trained, (total / length.clamp(min=1)).detach() + (log_ratio - log_ratio.detach()), 0.0
    )
    clipped = clip_log_ratio(
        log_ratio, *clip_bounds(advantages, clip_low=clip_low, clip_high=clip_high)
    )
    surrogate = clipped.exp() * advantages  # min(s A, clip(s) A)
    sums = describe_tokens(
        logprobs,
        log_ratio,
        trained,
        clipped_low=clipped > log_ratio,
        clipped_high=clipped < log_ratio,
    )
    return -(torch.where(trained, surrogate, 0.0) * weights).sum(), sums


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (arXiv 2506.13585, Eq. 4 and 5): the ratio is a bounded weight without gradient, so no
    token loses its own.

        loss = -sum_i w_i sum_t sg(min(r_it, 1 + clip_high)) A_i log pi_it

    `clipped_high` counts the tokens whose weight is bounded, whatever the sign of A: they have a
    gradient all the same. There is no lower bound, as published.

    Args:
        logprobs: `[T]`, as for `policy_loss`, like the four after it.
        old_logprobs: `[T]`.
        advantages: `[T]`.
        mask: `[T]`.
        weights: `[T]`.
        clip_high: the weight of log pi is at most 1 + clip_high.
    """
    trained, log_ratio = token_log_ratios(logprobs, old_logprobs, advantages, mask, weights)
    clipped = log_ratio.detach().clamp(max=math.log1p(clip_high))
    # masked tokens may hold NaN, which times 0 stays NaN
    token_logprobs = torch.where(trained, logprobs, 0.0).to(clipped.dtype)
    sums = describe_tokens(logprobs, log_ratio, trained, clipped_high=clipped < log_ratio)
    return -(clipped.exp() * advantages * token_logprobs * weights).sum(), sums


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    positive_temperature: float = POSITIVE_TEMPERATURE,
    negative_temperature: float = NEGATIVE_TEMPERATURE,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO (arXiv 2511.20347): a smooth gate in place of the clip.

        f(r) = (4 / tau) sigmoid(tau (r - 1)),    tau by the sign of A
        loss = -sum_i w_i sum_t f(r_it) A_i

    The gradient of a token is that of r A times 4 p (1 - p), p = sigmoid(tau (r - 1)): 1 on policy,
    and it fades as r leaves 1 on either side, faster for a larger tau. Nothing is clipped.

    Args:
        logprobs: `[T]`, as for `policy_loss`, like the four after it.
        old_logprobs: `[T]`.
        advantages: `[T]`.
        mask: `[T]`.
        weights: `[T]`.
        positive_temperature: tau where A > 0.
        negative_temperature: tau elsewhere.
    """
    trained, log_ratio = token_log_ratios(logprobs, old_logprobs, advantages, mask, weights)
    tau = torch.full_like(log_ratio, negative_temperature).masked_fill(
        advantages > 0, positive_temperature
    )
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    sums = describe_tokens(logprobs, log_ratio, trained)
    return -(torch.where(trained, gate, 0.0) * advantages * weights).sum(), sums


def token_log_ratios(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return whether each token trains, and its log r, clamped to +-20; 0 where nothing trains.

    Args:
        logprobs: `[T]`, as for `policy_loss`, like all others; their shapes are checked.
        old_logprobs: `[T]`.
        advantages: `[T]`.
        mask: `[T]`.
        weights: `[T]`.
    """
    check_shapes(
        logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, weights=weights
    )
    trained = mask.bool()
    return trained, masked_log_ratio(logprobs, old_logprobs.detach(), trained)
