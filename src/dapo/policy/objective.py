"""The training objective on packed tokens: policy loss, KL and entropy terms, and metrics."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo.algo.kl import kl_gradient, kl_penalty
from dapo.algo.loss import (
    Responses,
    capped_old_logprobs,
    clip_bounds,
    clipped_gradient,
    engine_weights,
)
from dapo.algo.surrogate_table import SURROGATES
from dapo.config import LossConfig
from dapo.core.errors import EngineError
from dapo.policy.custom_loss import CustomLoss, custom_metrics
from dapo.policy.transfer import to_numbers

MAX_OLD_LOGPROB_GAP = 1.0e-3
"""The largest difference in nats between the engine's and the policy's log-probability of a token
if the engine's is used as pi_old without a correction. With equal weights in float32 it is at most about 1e-5; the clip
begins at a log-ratio of 0.2.
"""
MEANS = {
    "loss/entropy": "entropy",
    "loss/ratio_mean": "ratio_sum",
    "loss/approx_kl": "approx_kl_sum",
    "loss/token_prob_mean": "prob_sum",
    "loss/clip_low_fraction": "clipped_low",
    "loss/clip_high_fraction": "clipped_high",
}
"""Metrics that are means over the trained tokens, and the names of their sums."""


class Correction(NamedTuple):
    """The log-probabilities of pi_old and the engine correction of `[n]` tokens."""

    old: Tensor
    on_surrogate: Tensor | None  # the factor of the surrogate; None: 1
    weight: Tensor | None
    """The importance weight, which is the factor of the KL and entropy terms; None: 1."""


class Slopes(NamedTuple):
    """The derivatives of the loss at `[n]` tokens, and the sums of a custom loss."""

    by_logprob: Tensor
    by_entropy: Tensor | None  # None without an entropy term
    # by each token's KL over the whole vocabulary; None without that term
    by_divergence: Tensor | None
    values: Mapping[str, Tensor | float]
    """The value and the metrics of a custom loss; empty for the others."""


def gradient_terms(
    tokens: Mapping[str, Tensor],
    config: LossConfig,
    responses: Responses | None = None,
    logprobs: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return `tokens` with the terms of `objective_gradient` that need no scores of parts.

    Args:
        tokens: `[S]` each: `advantages`, `weights` and `mask`; if known also the log-probabilities
            `old`, `engine` and `reference`. Without `old` the tokens are on policy: their ratio is
            1.
        config: the section `loss`.
        responses: the whole responses, for a loss that `needs_whole_responses`.
        logprobs: the policy's `[S]`, for such a loss unless `knows_responses`.

    Quantities of whole responses are computed here, once, as factors of tokens: the results can be
    cut between any two tokens. Raises ValueError if tokens of a response are missing.
    """
    mask = tokens["mask"]
    weights = tokens["weights"]
    advantages = tokens["advantages"]
    terms: dict[str, Tensor] = {}
    if config.is_clipped:
        low, high = clip_bounds(advantages, **_bounds(config))
        terms = {"scale": torch.where(mask, -weights * advantages, 0.0), "low": low, "high": high}
    old = tokens.get("old", logprobs)
    if SURROGATES[config.surrogate].needs_whole_responses:
        assert logprobs is not None
        assert old is not None
        terms["surrogate"] = _surrogate_gradient(logprobs, old, tokens, config, responses)
    # the ratio to the engine's changes with the policy: its correction needs the scores of parts
    if (
        config.engine_correction is not None
        and old is not None
        and not _has_ratio_to_engine(tokens, config)
    ):
        terms["correction"] = _engine_weights(old, tokens["engine"], tokens, config, responses)
    return {**tokens, **terms}


def knows_responses(tokens: Mapping[str, Tensor], config: LossConfig) -> bool:
    """Return True if `gradient_terms` need no log-probabilities but those of pi_old."""
    if not config.needs_whole_responses:
        return True
    return "old" in tokens and not SURROGATES[config.surrogate].needs_whole_responses


def objective_gradient(
    logprobs: Tensor,
    terms: Mapping[str, Tensor],
    config: LossConfig,
    custom: CustomLoss | None = None,
) -> Slopes:
    """Return the derivatives of the loss at a part of the tokens of a microbatch, of any size.

    Args:
        logprobs: the policy's log-probabilities of these tokens.
        terms: `gradient_terms` of the same tokens.
        config: the section `loss`.
        custom: the user's loss, if any.

    A token of weight 0, also one that the engine correction masks, has derivatives of exactly 0:
    its weight multiplies the surrogate, the KL term and the entropy term.
    """
    mask = terms["mask"]
    old, on_surrogate, correction = correct_engine(logprobs, terms, config)
    weights = _product(terms["weights"], correction)
    values: Mapping[str, Tensor | float] = {}
    if custom is not None:
        gradient, values = custom.differentiate(
            logprobs, old, terms["advantages"], mask, _product(terms["weights"], on_surrogate)
        )
    else:
        if config.is_clipped:
            gradient = clipped_gradient(logprobs - old, terms["scale"], terms["low"], terms["high"])
        elif SURROGATES[config.surrogate].needs_whole_responses:
            gradient = terms["surrogate"]
        else:
            gradient = _surrogate_gradient(logprobs, old, terms, config)
        gradient = _product(gradient, on_surrogate)
    if "reference" in terms:
        kl = kl_gradient(logprobs, terms["reference"], mask, weights, estimator=config.kl_estimate)
        gradient = gradient + config.kl_coef * kl
    by_entropy = None
    if config.entropy_coef > 0:
        by_entropy = torch.where(mask, -config.entropy_coef * weights, 0.0)
    by_divergence = None
    if config.has_full_kl:
        by_divergence = torch.where(mask, config.kl_coef * weights, 0.0)
    return Slopes(gradient, by_entropy, by_divergence, values)


def _surrogate_gradient(
    logprobs: Tensor,
    old: Tensor,
    tokens: Mapping[str, Tensor],
    config: LossConfig,
    responses: Responses | None = None,
) -> Tensor:
    """Return the derivatives of the loss of `loss.surrogate`, without the engine correction."""
    leaf = logprobs.detach().clone().requires_grad_()
    # the chunks' scores may be computed without gradients
    with torch.enable_grad():
        loss, _ = _surrogate_loss(leaf, old, tokens["weights"], tokens, config, responses)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def _surrogate_loss(
    logprobs: Tensor,
    old: Tensor,
    weights: Tensor,
    tokens: Mapping[str, Tensor],
    config: LossConfig,
    responses: Responses | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of `loss.surrogate`, and the sums about its tokens."""
    surrogate = SURROGATES[config.surrogate]
    keywords = _bounds(config)
    if surrogate.needs_whole_responses:
        keywords["responses"] = responses
    function = surrogate.load()
    return function(logprobs, old, tokens["advantages"], tokens["mask"], weights, **keywords)


def _has_ratio_to_engine(tokens: Mapping[str, Tensor], config: LossConfig) -> bool:
    """Return True if `old` is the engine's and the correction a cap of the ratio to it.

    A step with one update records no `old`: its correction is a weight, which the update knows.
    """
    return config.has_ratio_to_engine and "old" in tokens


def _engine_weights(
    policy: Tensor,
    engine: Tensor,
    tokens: Mapping[str, Tensor],
    config: LossConfig,
    responses: Responses | None = None,
) -> Tensor:
    """Return each token's weight of the engine correction (`algo.loss.engine_weights`)."""
    cap = config.engine_correction
    assert cap is not None
    by_response = config.engine_ratio == "sequence"
    if by_response and responses is None:
        raise ValueError("loss.engine_ratio=sequence needs the responses of the tokens")
    return engine_weights(
        policy,
        engine,
        tokens["mask"],
        cap=cap,
        over_cap=config.engine_over_cap,
        responses=responses if by_response else None,
    )


@torch.no_grad()
def correct_engine(logprobs: Tensor, terms: Mapping[str, Tensor], config: LossConfig) -> Correction:
    """Return pi_old and the engine correction of the tokens of `gradient_terms`.

    Args:
        logprobs: of the policy that trains.
        terms: `gradient_terms` of the same tokens.
        config: the section `loss`.
    """
    old = terms.get("old", logprobs)
    cap = config.engine_correction
    if cap is None:
        return Correction(old, None, None)
    if not _has_ratio_to_engine(terms, config):
        weight = terms.get("correction")
        if weight is None:
            weight = _engine_weights(old, terms["engine"], terms, config)
        return Correction(old, weight, weight)
    weight = _engine_weights(logprobs, old, terms, config)
    if config.engine_over_cap == "mask":
        return Correction(old, (weight > 0).to(weight.dtype), weight)
    # the ratio itself is capped, so that the surrogate needs no factor
    return Correction(capped_old_logprobs(logprobs, old, cap=cap), None, weight)


def _product(values: Tensor, factor: Tensor | None) -> Tensor:
    return values if factor is None else values * factor


def _describe_correction(
    weight: Tensor | None, mask: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    """Return sums that describe the engine correction; empty without one."""
    if weight is None:
        return {}
    assert config.engine_correction is not None
    # a truncated weight is the cap itself, a masked one is 0
    changed = weight >= config.engine_correction
    if config.engine_over_cap == "mask":
        changed = weight == 0
    return {
        "engine_weight": torch.where(mask, weight, 0.0).sum(dtype=torch.float64),
        "engine_truncated": (mask & changed).sum(),
    }


@torch.no_grad()
def objective_sums(
    logprobs: Tensor,
    entropies: Tensor,
    terms: Mapping[str, Tensor],
    config: LossConfig,
    custom: Mapping[str, Tensor | float] | None = None,
    divergences: Tensor | None = None,
    *,
    responses: Responses | None = None,
    with_nll: bool = False,
) -> dict[str, Tensor | float]:
    """Return sums over the trained tokens that describe the loss, on the tokens' device.

    Args:
        logprobs: `[S]` in nats, of the policy that trains.
        entropies: `[S]` in nats.
        terms: `gradient_terms`.
        config: the section `loss`.
        custom: for a custom loss, `add_values` of the sums that `objective_gradient` returned for
            all parts.
        divergences: `[S]` in nats, for `kl_estimator: full`.
        responses: as in `gradient_terms`.
        with_nll: whether to add the negative log-likelihood.

    Masked tokens count as 0 instead of being left out: a selection would wait for the device.
    """
    mask = terms["mask"]
    old, on_surrogate, correction = correct_engine(logprobs, terms, config)
    corrected = _product(terms["weights"], correction)
    surrogate_weights = _product(terms["weights"], on_surrogate)
    loss, sums = _surrogate_loss(logprobs, old, surrogate_weights, terms, config, responses)
    results: dict[str, Tensor | float] = {**sums, "loss": loss}
    if custom is not None:
        # a custom loss need not clip, and its own loss replaces that of Eq. 8
        results = {
            name: value for name, value in results.items() if not name.startswith("clipped_")
        }
        results |= custom
    results |= _describe_correction(correction, mask, config)
    results |= {"entropy": torch.where(mask, entropies, 0.0).sum()}
    if with_nll:  # of demonstrations, whose loss of Eq. 8 is a constant
        results["nll"] = torch.where(mask, -logprobs, 0.0).sum()
    if "engine" in terms:
        # pi_old that is the engine's own has no gap: the policy has, before its first update
        compared = logprobs if _has_ratio_to_engine(terms, config) else old
        gaps = torch.where(mask, (terms["engine"] - compared).abs(), 0.0)
        results["gap"] = gaps.sum()
        results["gap_tokens"] = mask.sum()
        results["gap_max"] = gaps.max()
    if "reference" in terms:
        results["kl"] = kl_penalty(
            logprobs, terms["reference"], mask, corrected, estimator=config.kl_estimate
        )
    elif divergences is not None:
        results["kl"] = torch.where(mask, divergences * corrected, 0.0).sum()
    return results


def add_values(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, Tensor | float]:
    """Return loss and metrics of a custom loss over a microbatch, added up on the device."""
    sums: dict[str, Tensor | float] = {"loss": 0}
    for part in parts:
        for name, value in part.items():
            # 0, not 0.0: counts stay integers, which float32 would round beyond 2**24
            sums[name] = sums.get(name, 0) + value
    return sums


def _bounds(config: LossConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SURROGATES[config.surrogate].bounds}


def add_sums(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Add sums over microbatches or ranks by name; for `_max` take the maximum.

    Missing names read as 0.

    All tensors come to main memory in one copy.
    """
    entries = [entry for part in parts for entry in part.items()]
    numbers = iter(to_numbers([value for _, value in entries if isinstance(value, Tensor)]))
    sums: dict[str, float] = defaultdict(float)
    for name, value in entries:
        number = next(numbers) if isinstance(value, Tensor) else float(value)
        if name.endswith("_max"):
            sums[name] = max(sums[name], number)
        else:
            sums[name] += number
    return sums


def objective_metrics(sums: Mapping[str, float], config: LossConfig) -> dict[str, float]:
    """Return the metrics of a minibatch from its sums; means only if there are trained tokens."""
    count = sums["tokens"]
    metrics = {"loss/policy": sums["loss"], "optim/update_tokens": count}
    if sums["separate_positions"]:
        metrics["optim/shared_token_fraction"] = 1 - sums["positions"] / sums["separate_positions"]
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
    metrics |= {name: sums[key] / count for name, key in means.items() if key in sums}
    clipped = sums["clipped_high"]
    if clipped:
        metrics["loss/clipped_high_prob_mean"] = sums["clipped_high_prob_sum"] / clipped
    if sums["gap_tokens"]:
        metrics["rollout/engine_logprob_gap_mean"] = sums["gap"] / sums["gap_tokens"]
        metrics["rollout/engine_logprob_gap_max"] = sums["gap_max"]
    return metrics | custom_metrics(sums)


def require_engine_agrees(metrics: Mapping[str, float], config: LossConfig) -> None:
    """Raise EngineError if pi_old is the engine's, uncorrected, but differs from the policy's."""
    gap = metrics.get("rollout/engine_logprob_gap_max", 0.0)
    # `not <=`: nan is a difference too
    must_agree = config.old_logprobs == "engine" and not config.has_ratio_to_engine
    if must_agree and not gap <= MAX_OLD_LOGPROB_GAP:
        raise EngineError(
            f"a token's log-probability in the engine differs from the policy's by {gap:.3g} nats"
            f" (more than {MAX_OLD_LOGPROB_GAP:g}), so it cannot be pi_old of Eq. 6: the engine's"
            " weights or its rounding differ; resume with loss.engine_correction=tis, which corrects"
            " for it, or with loss.old_logprobs=policy"
        )


def is_valid_update(metrics: Mapping[str, float], config: LossConfig) -> bool:
    """Return True if the loss is finite and the policy within `loss.max_approx_kl`."""
    if not math.isfinite(metrics["loss/policy"]):
        return False
    approx_kl = metrics.get("loss/approx_kl", 0.0)
    limit = config.max_approx_kl
    return limit is None or approx_kl <= limit
