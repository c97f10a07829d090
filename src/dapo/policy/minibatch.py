"""The part of a minibatch that an update computes, with loss weights and numbers per token."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dapo.algo.loss import Aggregate, Responses, aggregation_weights
from dapo.config import Config, LossConfig
from dapo.policy.packing import Microbatch, RankMicrobatch, partition
from dapo.policy.transfer import to_device
from dapo.types import Sample


def partition_minibatch(
    minibatch: Sequence[Sample], config: Config, *, ranks: int, every_sample: bool = False
) -> list[tuple[RankMicrobatch, ...]]:
    """Return each rank's passes of an update: samples that can have a gradient, and weights.

    Args:
        minibatch: whole groups.
        config: the configuration.
        ranks: the number of ranks.
        every_sample: whether samples with an advantage of exactly 0 are needed in any case.

    Samples with an advantage of exactly 0 are otherwise left out, unless the KL or entropy term or
    a custom loss (`loss.function`) can need them.
    """
    if len({sample.old_logprobs is None for sample in minibatch}) > 1:
        raise ValueError("either all samples of a minibatch have old_logprobs or none has")
    weights = loss_weights(minibatch, config)
    every_sample = every_sample or config.loss.needs_every_sample
    chosen = []
    for i, sample in enumerate(minibatch):
        is_needed = every_sample or sample.has_signal
        if sample.num_trained_tokens and is_needed:
            chosen.append(i)
    samples = [minibatch[i] for i in chosen]
    max_tokens = config.microbatch_tokens
    return partition(samples, weights[chosen].tolist(), ranks=ranks, max_tokens=max_tokens)


def loss_weights(
    minibatch: Sequence[Sample], config: Config, *, aggregate: Aggregate | None = None
) -> Tensor:
    """Return `[N]` float64: the loss weight of each trained token of each sample.

    It is the weight of Eq. 12 over the whole minibatch, samples without a gradient included.

    Args:
        minibatch: whole groups.
        config: the configuration.
        aggregate: the rule in place of `loss.aggregate`; None: that of the option.
    """
    lengths = torch.tensor([sample.num_trained_tokens for sample in minibatch])
    group_ids = torch.tensor([sample.group_id for sample in minibatch])
    max_length = config.rollout.max_response_tokens
    aggregate = aggregate or config.loss.aggregate
    shares = torch.tensor([sample.weight for sample in minibatch], dtype=torch.float64)
    return aggregation_weights(
        lengths, group_ids, aggregate=aggregate, max_length=max_length, shares=shares
    )


def loss_tokens(
    rank_microbatch: RankMicrobatch,
    microbatch: Microbatch,
    loss: LossConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the `tokens` of `objective.gradient_terms`, `[S]` each, in the order of targets.

    Args:
        rank_microbatch: the samples and their weights.
        microbatch: their tensors.
        loss: the section `loss`.
        dtype: the type of the numbers.
        device: their device, to which they come in one copy.

    `reference` is among them if a teacher behind a server has scored the samples.

    Raises:
        ValueError: values are missing or do not fit the responses.
    """
    samples = rank_microbatch.samples
    lengths = torch.tensor(microbatch.lengths)

    def of_samples(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(dtype).repeat_interleave(lengths)

    def of_tokens(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.from_numpy(np.concatenate(rows)).to(dtype)

    numbers = {
        "advantages": of_samples([sample.advantage for sample in samples]),
        "weights": of_samples(rank_microbatch.weights),
        "mask": of_tokens([sample.mask for sample in samples]),
    }
    # each is known of all samples or of none; the check of lengths below finds a mixture
    per_token = _known_rows([sample.token_advantages for sample in samples])
    if per_token:
        numbers["advantages"] = of_tokens(per_token)
    old = _known_rows([sample.old_logprobs for sample in samples])
    if old:
        numbers["old"] = of_tokens(old)
    if all(sample.engine_logprobs for sample in samples):
        numbers["engine"] = of_tokens([sample.engine_logprobs for sample in samples])
    elif loss.engine_correction is not None and not (loss.has_ratio_to_engine and old):
        raise ValueError("loss.engine_correction=tis needs engine_logprobs for all samples")
    reference = _known_rows([sample.reference_logprobs for sample in samples])
    if reference:
        numbers["reference"] = of_tokens(reference)
    if any(len(values) != sum(microbatch.lengths) for values in numbers.values()):
        raise ValueError(
            "mask, token_advantages, old_logprobs, engine_logprobs and reference_logprobs must have"
            " one value for each response token"
        )
    order = torch.from_numpy(microbatch.order)
    block = torch.stack(list(numbers.values()))[:, order]
    rows = to_device(block, device).unbind()
    tokens = dict(zip(numbers, rows, strict=True))
    tokens["mask"] = tokens["mask"].bool()
    return tokens


def _known_rows(rows: Sequence[Sequence[float] | None]) -> list[Sequence[float]]:
    return [row for row in rows if row is not None]


def whole_responses(microbatch: Microbatch, device: torch.device) -> Responses:
    """Return the response of each of a microbatch's S targets, on the device."""
    lengths = torch.tensor(microbatch.lengths)
    order = torch.from_numpy(microbatch.order)
    index = torch.arange(len(lengths)).repeat_interleave(lengths)[order]
    return Responses(to_device(index, device), microbatch.lengths)
