"""The training objective on packed tokens: the policy loss with its KL and entropy terms, and the metrics about it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dapo.algo.loss import engine_weights, kl_penalty, policy_loss
from dapo.config import LossConfig
from dapo.policy.transfer import to_numbers

MEANS = {
    "loss/entropy": "entropy",
    "loss/ratio_mean": "ratio_sum",
    "loss/approx_kl": "approx_kl_sum",
    "loss/token_prob_mean": "prob_sum",
    "loss/clip_low_fraction": "clipped_low",
    "loss/clip_high_fraction": "clipped_high",
}
"""Metrics that are means over the trained tokens, and the sums that they are made of."""


def token_objective(
    logprobs: Tensor, entropies: Tensor, tokens: Mapping[str, Tensor], config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar loss of `[n]` packed tokens, and sums over the trained ones that describe it, on their device.

    Masked tokens are replaced by 0 rather than left out: how many there are need not be known, so nothing waits.

    Args:
        logprobs: `[n]` of the policy that trains.
        entropies: `[n]` in nats; with a gradient only where `entropy_coef` needs it.
        tokens: `[n]` each: `advantages`, `weights`, `mask`; where they are known also `old`, `engine` and `reference`
            log-probabilities. Without `old` the tokens are on policy: their ratio is 1.
        config: what the loss consists of.
    """
    mask, weights = tokens["mask"], tokens["weights"]
    old = tokens.get("old", logprobs.detach())
    corrected, about_correction = weights, {}
    if (cap := config.engine_correction) is not None:
        correction = engine_weights(old, tokens["engine"], mask, cap=cap)
        corrected = weights * correction
        about_correction["engine_weight"] = torch.where(mask, correction, 0.0).sum(dtype=torch.float64)
        about_correction["engine_truncated"] = (mask & (correction >= cap)).sum()
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    loss, sums = policy_loss(logprobs, old, tokens["advantages"], mask, corrected, dual_clip=config.dual_clip, **clip)
    sums |= about_correction | {"loss": loss.detach(), "entropy": torch.where(mask, entropies.detach(), 0.0).sum()}
    if "engine" in tokens:
        gaps = torch.where(mask, (tokens["engine"] - old).abs(), 0.0)
        sums["gap"], sums["gap_tokens"], sums["gap_max"] = gaps.sum(), mask.sum(), gaps.max()
    if "reference" in tokens:
        kl = kl_penalty(logprobs, tokens["reference"], mask, weights)
        sums["kl"] = kl.detach()
        loss = loss + config.kl_coef * kl
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * torch.where(mask, weights * entropies, 0.0).sum()
    return loss, sums


def add_sums(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Sums over chunks, microbatches or ranks by name (the maximum for names ending in `_max`); 0 for other names.

    Tensors come to main memory in one copy for all parts.
    """
    parts = list(parts)
    fetched = iter(to_numbers([value for part in parts for value in part.values() if isinstance(value, Tensor)]))
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            number = next(fetched) if isinstance(value, Tensor) else float(value)
            sums[name] = max(sums[name], number) if name.endswith("_max") else sums[name] + number
    return sums


def objective_metrics(sums: Mapping[str, float], config: LossConfig) -> dict[str, float]:
    """The sums of a whole minibatch turned into means over its trained tokens, where there are any."""
    count = sums["tokens"]
    metrics = {"loss/policy": sums["loss"], "optim/update_tokens": count}
    if "kl" in sums:
        metrics["loss/kl"] = sums["kl"]
    if not count:
        return metrics
    means = dict(MEANS)
    if config.dual_clip is not None:
        means["loss/clip_dual_fraction"] = "clipped_dual"
    if config.engine_correction is not None:
        means["loss/engine_weight_mean"] = "engine_weight"
        means["loss/engine_weight_truncated_fraction"] = "engine_truncated"
    metrics |= {name: sums[key] / count for name, key in means.items()}
    if sums["clipped_high"]:
        metrics["loss/clipped_high_prob_mean"] = sums["clipped_high_prob_sum"] / sums["clipped_high"]
    if sums["gap_tokens"]:
        metrics["rollout/engine_logprob_gap_mean"] = sums["gap"] / sums["gap_tokens"]
        metrics["rollout/engine_logprob_gap_max"] = sums["gap_max"]
    return metrics


def is_valid_update(metrics: Mapping[str, float], config: LossConfig) -> bool:
    """Whether the loss is finite, and the policy still near the one whose tokens it learns from."""
    approx_kl, limit = metrics.get("loss/approx_kl", 0.0), config.max_approx_kl
    return math.isfinite(metrics["loss/policy"]) and (limit is None or approx_kl <= limit)
