"""The training objective on packed tokens: the policy loss with its KL and entropy terms, and the metrics about it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dapo.algo.loss import engine_weights, kl_penalty, policy_loss
from dapo.config import LossConfig

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
    """The scalar loss of `[n]` packed tokens, and sums over the trained ones that describe it.

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
        about_correction["engine_weight"] = correction[mask].sum(dtype=torch.float64)
        about_correction["engine_truncated"] = (correction[mask] >= cap).sum()
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    loss, sums = policy_loss(logprobs, old, tokens["advantages"], mask, corrected, dual_clip=config.dual_clip, **clip)
    sums |= about_correction | {"loss": loss.detach(), "entropy": entropies.detach()[mask].sum()}
    if "engine" in tokens:
        gaps = (tokens["engine"] - old).abs()[mask]
        sums["gap"], sums["gap_tokens"] = gaps.sum(), mask.sum()
        sums["gap_max"] = gaps.max() if len(gaps) else gaps.sum()
    if "reference" in tokens:
        kl = kl_penalty(logprobs, tokens["reference"], mask, weights)
        sums["kl"] = kl.detach()
        loss = loss + config.kl_coef * kl
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (weights * entropies)[mask].sum()
    return loss, sums


def add_sums(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Sums over chunks, microbatches or ranks by name (the maximum for names ending in `_max`); 0 for other names."""
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            sums[name] = max(sums[name], float(value)) if name.endswith("_max") else sums[name] + float(value)
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
