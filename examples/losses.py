"""Losses of one's own: `dapo train my.yaml loss.function=losses:reinforce`, or `s.update(batch,
loss=reinforce)`.

Each takes tensors `[T]` with a number for each response token of a part of a minibatch, and returns
the scalar to minimise with metrics, which are logged as `loss/NAME`. `docs/losses.md` says what the
arguments are, and what is guaranteed.
"""

import torch
from torch import Tensor


def dapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The paper's own loss (Eq. 8 and 10): what the trainer computes where `loss.function` is not
    set.
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
    loss = -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()
    return loss, {"clipped_up": (weights * (advantages > 0) * (ratio > 1.28)).sum()}


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a baseline: no ratio and no clip, as if each update were the first of its
    step.
    """
    return -(weights * advantages * logprobs).sum(), {
        "pushed_up": (weights * (advantages > 0)).sum()
    }


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ratio is clipped and has no gradient itself, so that a clipped token still trains, at a
    bounded weight.
    """
    ratio = (logprobs.detach() - old_logprobs).exp().clamp(max=1.28)
    return -(weights * ratio * advantages * logprobs).sum(), {
        "ratio_at_limit": (weights * (ratio >= 1.28)).sum()
    }
