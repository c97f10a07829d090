"""What each token of an optimizer update adds to its loss and gradient (Eq. 8), from the code that trains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo.algo.loss import LOG_RATIO_BOUND, clip_log_ratio
from dapo.config import LossConfig
from dapo.policy.objective import corrected_weights, gradient_terms, objective_gradient, objective_sums
from dapo.types import Sample

CLIP_NAMES = ("none", "low", "high", "dual")
"""What `TokenTerms.clipped` counts: no clip, 1 - clip_low, 1 + clip_high, dual_clip."""


@dataclass(frozen=True)
class TokenTerms:
    """One response's tokens in the loss of its update; `[T]` float64 each."""

    ratio: Tensor
    """r of Eq. 6: the policy over pi_old."""
    weight: Tensor
    """The factor of the token's surrogate in the loss: Eq. 12's, times the engine correction where there is one."""
    gradient: Tensor
    """The derivative of the loss by the token's log-probability; 0 for a clipped one, but for its KL term."""
    unclipped_gradient: Tensor
    """The same, if nothing were clipped; equal to it where `loss.surrogate` is not `clip`."""
    clipped: Tensor
    """Indices into CLIP_NAMES; 0 where `loss.surrogate` is not `clip`."""
    loss: float
    """The response's part of the policy loss (Eq. 8, negated)."""
    kl: float
    """The response's part of the KL divergence, before `loss.kl_coef`; 0 without one."""


def token_terms(
    samples: Sequence[Sample],
    weights: Sequence[float],
    config: LossConfig,
    logprobs: Sequence[Sequence[float]] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
) -> list[TokenTerms]:
    """The terms of each sample of an update, in float64.

    Args:
        samples: All samples of the update; with `old_logprobs` where `logprobs` are given.
        weights: The loss weight of each sample's tokens.
        config: What the loss consists of; its entropy term is left out.
        logprobs: Of the policy that the update begins with; None: it is pi_old, so that every ratio is 1.
        reference: Of the initial policy, where the loss has a KL term.
    """
    found = []
    for i, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        length = len(sample.response_ids)
        ones = torch.ones(length, dtype=torch.float64)
        tokens = {"mask": _row(sample.mask).bool(), "weights": weight * ones, "advantages": sample.advantage * ones}
        now = ones - 1 if logprobs is None else _row(logprobs[i])
        if logprobs is not None:
            tokens["old"] = _row(sample.old_logprobs or ())
        tokens["responses"] = torch.zeros(length, dtype=torch.int64)
        if len(sample.engine_logprobs) == length:
            tokens["engine"] = _row(sample.engine_logprobs)
        if reference is not None:
            tokens["reference"] = _row(reference[i])
        found.append(_terms_of(now, tokens, config))
    return found


def _terms_of(logprobs: Tensor, tokens: dict[str, Tensor], config: LossConfig) -> TokenTerms:
    terms = gradient_terms(tokens, config)
    terms.pop("entropy", None)
    old, advantages = tokens.get("old", logprobs), tokens["advantages"]
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    wide, clipped = terms, torch.zeros(len(old), dtype=torch.int64)
    if config.is_clipped:
        bounds = {"low": torch.full_like(old, -LOG_RATIO_BOUND), "high": torch.full_like(old, LOG_RATIO_BOUND)}
        wide = {**terms, **bounds}
        trained = torch.where(tokens["mask"], log_ratio, 0.0)
        bounded = clip_log_ratio(trained, terms["low"], terms["high"])
        clipped[bounded > trained] = CLIP_NAMES.index("low")
        clipped[(bounded < trained) & (advantages > 0)] = CLIP_NAMES.index("high")
        clipped[(bounded < trained) & (advantages < 0)] = CLIP_NAMES.index("dual")
    sums = objective_sums(logprobs, torch.zeros_like(old), tokens, config)
    weights, _ = corrected_weights(old, tokens, config)
    weights = torch.where(tokens["mask"], weights, 0.0)
    return TokenTerms(
        ratio=log_ratio.exp(),
        weight=weights,
        gradient=objective_gradient(logprobs, terms, config)[0],
        unclipped_gradient=objective_gradient(logprobs, wide, config)[0],
        clipped=clipped,
        loss=float(sums["loss"]),
        kl=float(sums["kl"]) if "kl" in sums else 0.0,
    )


def _row(values: Sequence[float]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64).copy())
