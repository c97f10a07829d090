"""The gradient of an update by the naive equations, for tests of the policy."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance import naive
from dapo.types import Sample
from helpers.tiny_policies import plain_distributions, plain_scores

PARAMETERS = ("clip_low", "clip_high", "dual_clip")


def whole_gradient(
    network: PreTrainedModel,
    samples: list[Sample],
    temperature: float,
    *,
    reference: PreTrainedModel | None = None,
    is_on_policy: bool = False,
    weights: list[float] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The gradient of the whole minibatch: by the naive equations to the log-probabilities, then by
    autograd.

    `weights` are those of each sample's tokens; None: of samples that share no response.
    """
    scores = plain_scores(network, samples, temperature)
    logprobs = [row.detach().tolist() for row, _ in scores]
    masks = [list(row.mask) for row in samples]
    old = logprobs if is_on_policy else [list(row.old_logprobs or ()) for row in samples]
    if weights is None:
        weights = naive.aggregation_weights(
            [sum(row) for row in masks],
            [row.group_id for row in samples],
            options.get("aggregate", "token"),
            50,
        )
    surrogate = options.get("surrogate", "clip")
    given = {"clip_low": 0.2, "clip_high": 0.28} | {
        n: options[n] for n in PARAMETERS if n in options
    }
    parameters = (
        {"positive_temperature": 1.0, "negative_temperature": 1.05}
        if surrogate == "sapo"
        else given
    )
    advantages = [row.advantage for row in samples]
    _, gradient = naive.policy_loss(
        logprobs, old, masks, advantages, weights, surrogate=surrogate, **parameters
    )
    factors = [[float(trains) for trains in mask] for mask in masks]
    if (cap := options.get("engine_correction")) is not None:
        engine = [list(row.engine_logprobs or ()) for row in samples]
        how = options.get("engine_over_cap", "truncate"), options.get("engine_ratio", "token")
        corrections = naive.importance_weights(old, engine, masks, cap, *how)
        factors = [
            [f * u for f, u in zip(*rows, strict=True)]
            for rows in zip(factors, corrections, strict=True)
        ]
    divergences = [torch.zeros(len(mask), dtype=torch.float64) for mask in masks]
    if reference is not None and options.get("kl_estimator") == "full":
        pairs = (plain_distributions(each, samples, temperature) for each in (network, reference))
        divergences = [(p.exp() * (p - q.detach())).sum(dim=1) for p, q in zip(*pairs, strict=True)]
    elif reference is not None:
        base = [row.detach().tolist() for row, _ in plain_scores(reference, samples, temperature)]
        estimator = options.get("kl_estimator", "k3")
        _, _, slopes = naive.kl_loss(logprobs, base, masks, weights, estimator=estimator)
        coef = options["kl_coef"]
        gradient = [
            [g + coef * s for g, s in zip(*rows, strict=True)]
            for rows in zip(gradient, slopes, strict=True)
        ]
    loss = torch.zeros((), dtype=torch.float64)
    for (scored, entropies), row, of_row, weight, kl in zip(
        scores, gradient, factors, weights, divergences, strict=True
    ):
        factor = torch.tensor(of_row, dtype=torch.float64)
        loss = loss + options.get("kl_coef", 0.0) * weight * kl @ factor
        loss = loss + scored @ (factor * torch.tensor(row, dtype=torch.float64))
        loss = loss - options.get("entropy_coef", 0.0) * weight * entropies @ factor
    loss.backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
