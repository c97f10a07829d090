"""Three estimates of the divergence between the policy and a reference, from the sampled tokens
alone.

With d = log policy - log reference of a token (clamped to +-20) and q = reference / policy =
exp(-d), as in Schulman's note "Approximating KL Divergence" (2020):

    k1 = d               mean over the policy's samples: KL(policy || reference); a single one may be negative
    k2 = d^2 / 2         not that mean, but near it where the two are near each other; never negative
    k3 = q - 1 + d       the same mean as k1, never negative, and a lower variance near the reference

Good values do not make good gradients. In expectation over responses of one token, sampled by the
current policy, an update follows the gradient of:

    estimate   in the loss (`kl_penalty`)      in the reward (`token_kl`, then the policy gradient)
    k1         nothing: the mean is 0          KL(policy || reference)
    k2         KL(policy || reference)         nothing that is a divergence; 0 to first order near the reference
    k3         KL(reference || policy)         KL(policy || reference) - KL(reference || policy); likewise

So k1 belongs in the reward, and k2 or k3 in the loss. For longer responses k1 in the reward still
has the gradient of the divergence between distributions of responses. k2 and k3 in the loss have
that of the tokens' divergences with the states held fixed: the effect of a token on the divergence
of later tokens is missing.

With tokens of an older policy (the second and later updates of a step, `schedule: async`) the terms
of the loss are biased, because they have no importance weight; in the reward the ratio of the
policy gradient corrects that, up to its clip.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dapo.algo.loss import LOG_RATIO_BOUND, check_shapes, masked_log_ratio, per_token

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]


def token_kl(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, estimator: KlEstimator = "k3"
) -> Tensor:
    """The estimate of KL(policy || reference) at each token, in float32 or better; 0 where the mask
    is false.

    Args:
        logprobs: of the policy, of any shape; masked ones may hold anything, NaN included.
        reference_logprobs: of the reference, of the same shape; they get no gradient.
        mask: of the same shape, true (non-zero) for tokens that count.
        estimator: the estimate of the module's table.

    Raises:
        ValueError: the shapes do not fit, or the estimator is unknown.
    """
    check_shapes(logprobs, reference_logprobs=reference_logprobs, mask=mask)
    difference = masked_log_ratio(logprobs, reference_logprobs.detach(), mask.bool())
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        log_q = -difference
        # expm1: near q = 1 the estimate is about (log q)^2 / 2, which exp() - 1 would round away
        return torch.expm1(log_q) - log_q
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def kl_penalty(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    estimator: KlEstimator = "k3",
) -> Tensor:
    """Eq. 5's `D_KL(policy || reference)`, weighted like the loss: times beta, add it to the loss.

    On policy, with the states held fixed, its expected gradient is zero for k1 (it only adds
    noise), that of KL(policy || reference) for k2, and that of KL(reference || policy) for k3. Off
    policy it is biased. DAPO has no such term.

    There is no gradient beyond a log-ratio of +-20.

    Args:
        logprobs: as for `token_kl`, like the two after it.
        reference_logprobs: of the reference.
        mask: true (non-zero) for tokens that count.
        weights: `[N]` from `aggregation_weights`, or one for each token.
        estimator: the estimate of the module's table.

    Raises:
        ValueError: as `token_kl` does.
    """
    estimates = token_kl(logprobs, reference_logprobs, mask, estimator=estimator)
    return (estimates * per_token("weights", weights, estimates)).sum()


def kl_gradient(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    estimator: KlEstimator = "k3",
) -> Tensor:
    """The derivative of `kl_penalty` by each of its `logprobs`, `[T]`: w for k1, w d for k2, w (1 -
    q) for k3.

    Args:
        logprobs: `[T]` of the policy.
        reference_logprobs: `[T]` of the reference.
        mask: `[T]` booleans, true for tokens that count.
        weights: `[T]` w of each token.
        estimator: the estimate of the module's table.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k3":
        # expm1: 1 - exp() would round a small difference away
        slope = -torch.expm1(-difference)
    else:
        slope = difference if estimator == "k2" else torch.ones_like(difference)
    return torch.where(mask & (difference.abs() <= LOG_RATIO_BOUND), slope * weights, 0.0)
