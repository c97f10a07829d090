"""PPO's advantages and value targets by generalized advantage estimation (GAE), and the loss of its
value function.

A response is an episode: in state s_t, the prompt and the response's tokens before t, the policy
takes token t and gets reward r_t. A value function V estimates the remaining rewards:

    r_t     = -p_t, and at the last token T also the shaped reward: -p_T + R
    delta_t = r_t + gamma V(s_{t+1}) - V(s_t),        V(s_{T+1}) = 0
    A_t     = delta_t + gamma lambda A_{t+1},         A_{T+1} = 0
    target  = A_t + V(s_t),                           the regression target of V(s_t)

p_t is the penalty of a token, kl_coef times its divergence from the reference. An episode ends with
the last token of the response, be it an end token or the token at the length limit.

Sources: GAE, arXiv 1506.02438, Eq. 16; PPO, arXiv 1707.06347, Eq. 9, 11 and 12; DAPO's Eq. 2 and 3
repeat them.
"""

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def token_rewards(rewards: Tensor, lengths: Tensor, penalties: Tensor) -> Tensor:
    """`[N, T]` r_t: minus the penalty of each token, plus the shaped reward at a response's last
    token.

    Args:
        rewards: `[N]` shaped rewards R.
        lengths: `[N]` from 0 to T tokens.
        penalties: `[N, T]` p_t, ignored after a response's end.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_shapes(penalties, rewards=rewards, lengths=lengths)
    positions = torch.arange(penalties.shape[1])
    at_end = positions == lengths[:, None] - 1
    token_parts = torch.where(positions < lengths[:, None], -penalties, 0.0)
    # an empty response has no last token: its reward is nowhere
    return token_parts + torch.where(at_end, rewards[:, None].to(token_parts.dtype), 0.0)


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """`[N, T]` the advantages A_t of the tokens, and `[N, T]` the targets of their values; 0 after
    a response's end.

    Example: rewards (0, 0, 1), values (.5, .5, .75), gamma = lambda = 1: advantages (.5, .5, .25),
    targets (1, 1, 1).

    Args:
        rewards: `[N, T]` r_t from `token_rewards`.
        values: `[N, T]` V(s_t) before the step's first update, ignored after a response's end.
        lengths: `[N]` from 0 to T tokens.
        gamma: the discount of later rewards, from 0 to 1.
        gae_lambda: lambda, from 0 to 1: 1 gives the remaining rewards minus the value, without bias
            and with the largest variance; 0 gives delta_t.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_shapes(values, lengths=lengths)
    if rewards.shape != values.shape:
        raise ValueError(
            f"rewards must be of the shape of the values, {list(values.shape)}, got"
            f" {list(rewards.shape)}"
        )
    is_token = torch.arange(values.shape[1]) < lengths[:, None]
    # 0 behind the end, so that V(s_{T+1}) = 0 in rows of any length
    rewards = torch.where(is_token, rewards, 0.0)
    values = torch.where(is_token, values, 0.0)
    next_values = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    later = deltas.new_zeros(len(deltas))
    # backwards, because A_t needs A_{t+1}
    for t in reversed(range(deltas.shape[1])):
        later = deltas[:, t] + gamma * gae_lambda * later
        advantages[:, t] = later
    return advantages, torch.where(is_token, advantages + values, 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8) over the tokens that train, 0 elsewhere; equal advantages
    give zeros.

    The variance has the divisor n - 1. Pass the tokens of a step's whole batch, so that advantages
    do not depend on its split into minibatches.
    """
    trained = mask.bool()
    numbers = advantages[trained]
    # equal ones by comparison: their float mean may differ from them
    if not len(numbers) or numbers.max() == numbers.min():
        return torch.zeros_like(advantages)
    scale = (numbers.var(correction=1) + WHITEN_EPS).rsqrt()
    return torch.where(trained, (advantages - numbers.mean()) * scale, 0.0)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip_range: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss, a scalar to minimise, and sums over the trained tokens that add up over
    microbatches.

        clipped = V_old + clip(V - V_old, -clip_range, clip_range)
        loss    = sum_t w_t max((V - target)^2, (clipped - target)^2) / 2

    PPO's Eq. 9 has only the squared error; the clip comes from the code released with it: a value
    that the step's updates have moved towards its target by more than `clip_range` has no gradient.
    The sums are `tokens`, and `clipped`, the number of them without gradient.

    Args:
        values: `[T]` V(s_t), like all tensors; only they get a gradient.
        old_values: those before the step's first update.
        targets: what the values should be.
        mask: true (non-zero) for tokens that train; others may hold anything, NaN included.
        weights: w_t.
        clip_range: the largest change of a value in a step; None: no limit.
    """
    trained = mask.bool()
    squared = torch.where(trained, values - targets, 0.0).square()
    clipped = torch.zeros_like(trained)
    if clip_range is not None:
        change = torch.where(trained, values - old_values, 0.0)
        clipped_squared = (old_values + change.clamp(-clip_range, clip_range) - targets).square()
        # the larger of the two errors: only a move towards the target is stopped
        clipped = trained & (change.abs() > clip_range) & (clipped_squared > squared)
        squared = torch.where(clipped, clipped_squared, squared)
    loss = (squared * torch.where(trained, weights, 0.0)).sum() / 2
    return loss, {"tokens": trained.sum(), "clipped": clipped.sum()}


def explained_variance(values: Tensor, targets: Tensor) -> float | None:
    """1 - Var(targets - values) / Var(targets): 1 for perfect values, 0 for a constant; None for
    equal targets.
    """
    if len(targets) < 2 or targets.max() == targets.min():  # their variance is 0
        return None
    return 1.0 - float((targets - values).var() / targets.var())


def _check_shapes(tokens: Tensor, **numbers: Tensor) -> None:
    """Raise ValueError for a wrong shape, which broadcasting would silently turn into a wrong
    number.
    """
    for name, tensor in numbers.items():
        if tokens.ndim != 2 or tensor.shape != tokens.shape[:1]:
            raise ValueError(
                f"{name} must have one number per response of [N, T] tokens, got"
                f" {list(tensor.shape)} for {list(tokens.shape)}"
            )
