"""Eq. 5, 8, 10 and 12: the clipped policy gradient loss, with one weight for all tokens of a
response.

The loss is `-sum_i w_i sum_t min(r_it A_i, clip(r_it) A_i)`. The weights are computed once for a
whole minibatch over all ranks, before it is split. So losses and gradients of any microbatches on
any ranks add up to the same sums (reduce with SUM, never with a mean).
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0

OverCap: TypeAlias = Literal["truncate", "mask"]
Aggregate: TypeAlias = Literal["token", "group", "sequence", "constant"]


@dataclass(frozen=True)
class Responses:
    """The response of each packed token, for quantities of whole responses: every token of each
    must be in the call.
    """

    index: Tensor
    """`[T]` integers from 0 to R - 1: the response of each token."""
    lengths: tuple[int, ...]
    """The number of tokens of each of the R responses, also of tokens that do not train; their sum
    is T.
    """

    @classmethod
    def of(cls, index: Tensor) -> "Responses":
        """The responses of whole ones' tokens, counted by `index`. It waits for the device."""
        return cls(index, tuple(torch.bincount(index).tolist()))


def clip_bounds(
    advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Eq. 10: the bounds of log r for each token, lower and upper, in the shape of `advantages`.

    In `min(r A, clip(r) A)` only the bound that lowers the objective acts: 1 + clip_high where A >
    0, 1 - clip_low where A < 0. All bounds of log r lie within +-20.

    Args:
        advantages: A of each token, of any shape.
        clip_low: the ratio r is clipped to at least 1 - clip_low.
        clip_high: the ratio r is clipped to at most 1 + clip_high.
        dual_clip: bounds r from above where A < 0; None: nothing does.

    Raises:
        ValueError: `dual_clip` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip must be above 1 (it bounds the ratio where A < 0), got {dual_clip}"
        )

    def log(ratio: float) -> float:
        # 0 or less has no logarithm: then only the clamp bounds the ratio
        bound = math.log(ratio) if ratio > 0 else -LOG_RATIO_BOUND
        return max(-LOG_RATIO_BOUND, min(bound, LOG_RATIO_BOUND))

    # filled on the device: a tensor of one number on the host would make the host wait for its copy
    low = torch.full_like(advantages, -LOG_RATIO_BOUND).masked_fill_(
        advantages < 0, log(1 - clip_low)
    )
    high = torch.full_like(advantages, log(math.inf if dual_clip is None else dual_clip))
    return low, high.masked_fill_(advantages > 0, log(1 + clip_high))


def clip_log_ratio(log_ratio: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The clip of Eq. 8, applied to log r; the loss, its gradient and its clip fractions all use
    it.
    """
    return log_ratio.clamp(low, high)


def clipped_gradient(log_ratio: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The derivative of `scale * clip(r)` by log r: `scale r` within the bounds, 0 outside.

    Training uses it instead of autograd, which launches twice as many kernels per chunk of tokens.

    Args:
        log_ratio: log r of each token, not clamped.
        scale: minus weight times advantage, 0 where nothing trains.
        low: the lower bounds of `clip_bounds`.
        high: the upper ones.
    """
    clipped = clip_log_ratio(log_ratio, low, high)
    return torch.where(clipped == log_ratio, scale * clipped.exp(), 0.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 8 and 10, negated: the scalar to minimise, and sums that describe the trained tokens.

    The loss has the type of `logprobs`, but at least float32. The log-ratio is clamped to +-20,
    beyond which a token has no gradient. The sums are unweighted 0-dim float64 tensors without
    gradient that add up over microbatches and ranks:

    - `tokens`: the number of trained tokens, zero advantages included;
    - `clipped_high` (A > 0, r > 1 + clip_high), `clipped_low` (A < 0, r < 1 - clip_low),
      `clipped_dual` (A < 0, r > dual_clip): the numbers of tokens whose gradient the clip removes;
    - `ratio_sum`: r;
    - `approx_kl_sum`: r - 1 - log r, whose mean estimates KL(old || new);
    - `prob_sum`: the probability under the current policy;
    - `clipped_high_prob_sum`: the same over the `clipped_high` tokens only (Fig. 3a shows their
      mean).

    Args:
        logprobs: `[N, T]`, or packed `[T]`; only they get a gradient; masked ones may hold
            anything, NaN included.
        old_logprobs: of the same shape; may be `logprobs` itself.
        advantages: A, `[N]` or one for each token.
        mask: of the shape of `logprobs`, true (non-zero) for tokens that train.
        weights: `[N]` from `aggregation_weights`, or one for each token.
        clip_low: the ratio r is clipped to at least 1 - clip_low.
        clip_high: the ratio r is clipped to at most 1 + clip_high.
        dual_clip: a bound on r where A < 0 (released scripts: 10; not in the paper).

    Raises:
        ValueError: the shapes do not fit, or `dual_clip` is not above 1.
    """
    check_shapes(logprobs, old_logprobs=old_logprobs, mask=mask)
    trained = mask.bool()
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), trained)
    advantage = per_token("advantages", advantages, log_ratio)
    bounds = clip_bounds(advantage, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    clipped = clip_log_ratio(log_ratio, *bounds)
    surrogate = clipped.exp() * advantage  # min(r A, clip(r) A)
    above = clipped < log_ratio
    sums = describe_tokens(
        logprobs,
        log_ratio,
        trained,
        clipped_low=clipped > log_ratio,
        clipped_high=above & (advantage > 0),
        clipped_dual=above & (advantage < 0),
    )
    token_weights = per_token("weights", weights, surrogate)
    return -(torch.where(trained, surrogate, 0.0) * token_weights).sum(), sums


@torch.no_grad()
def describe_tokens(
    logprobs: Tensor, log_ratio: Tensor, trained: Tensor, **clipped: Tensor
) -> dict[str, Tensor]:
    """The sums of `policy_loss` over its trained tokens.

    `log_ratio` is 0 and each of `clipped`, such as `clipped_high`, is false for tokens that do not
    train.
    """
    ratio = log_ratio.exp()
    prob = torch.where(trained, logprobs, -torch.inf).to(ratio.dtype).exp()
    terms = {
        "tokens": trained,
        **clipped,
        "ratio_sum": torch.where(trained, ratio, 0.0),
        "approx_kl_sum": torch.expm1(log_ratio) - log_ratio,
        "prob_sum": prob,
    }
    if "clipped_high" in terms:
        terms["clipped_high_prob_sum"] = torch.where(terms["clipped_high"], prob, 0.0)
    # float64: float32 counts no further than 2**24 tokens
    return {name: values.sum(dtype=torch.float64) for name, values in terms.items()}


def engine_weights(
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float,
    over_cap: OverCap = "truncate",
    responses: Responses | None = None,
) -> Tensor:
    """Importance sampling from the engine's distribution to pi_old's: a factor of each token's
    loss, without gradient.

        u_it = pi_old / pi_engine of the token, or, with `responses`, of all trained tokens of its response
        weight = min(u, cap)                        truncate: truncated importance sampling
        weight = u where 1/cap <= u <= cap, else 0  mask: masked importance sampling

    It corrects for an engine whose distribution differs from the trainer's (other kernels, a
    coarser type, older weights): the loss times u has the same expectation as under pi_old, per
    response exactly, per token to first order in the difference. A bound on u adds bias and reduces
    variance. Not in the paper; off by default. A token that does not train has the weight 1.

    Args:
        old_logprobs: of pi_old, such as packed `[T]`.
        engine_logprobs: of the engine, of the same shape; each log-ratio is clamped to +-20.
        mask: of the same shape, true (non-zero) for tokens that train.
        cap: the bound on u.
        over_cap: what becomes of a weight beyond the bound.
        responses: the response of each token, for one ratio per response; None: one per token.

    Raises:
        ValueError: the shapes do not fit, tokens of some of the `responses` are missing, `cap` is
            not positive, or it is below 1 with `mask`.
    """
    check_shapes(old_logprobs, engine_logprobs=engine_logprobs, mask=mask)
    if not cap > 0 or (over_cap == "mask" and cap < 1):
        least = "at least 1 (weights from 1/cap to cap stay)" if over_cap == "mask" else "above 0"
        raise ValueError(f"cap must be {least}: it bounds pi_old / pi_engine, got {cap}")
    trained = mask.bool()
    log_ratio = masked_log_ratio(old_logprobs.detach(), engine_logprobs.detach(), trained)
    if responses is not None:
        sums, _ = over_responses(log_ratio, trained, responses)
        log_ratio = torch.where(trained, sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), 0.0)
    ratio = log_ratio.exp()
    if over_cap == "truncate":
        return torch.where(trained, ratio.clamp(max=cap), 1.0)
    return torch.where(trained & ((ratio > cap) | (ratio < 1 / cap)), 0.0, ratio)


def capped_old_logprobs(logprobs: Tensor, engine_logprobs: Tensor, *, cap: float) -> Tensor:
    """Return old log-probabilities to which the policy's ratio is min(pi / pi_engine, cap).

    They are the engine's, raised where the ratio would exceed the cap: a loss of Eq. 8 with them is
    the truncated one for every clip, and a capped token keeps the gradient `cap * A * grad log pi`.
    The result has no gradient.

    Args:
        logprobs: of the policy, of any shape.
        engine_logprobs: of the engine, of the same shape.
        cap: the largest ratio, above 0.
    """
    return torch.maximum(engine_logprobs, logprobs.detach() - math.log(cap))


def over_responses(values: Tensor, trained: Tensor, responses: Responses) -> tuple[Tensor, Tensor]:
    """At each packed token `[T]`: the sum of `values` over the trained tokens of its response, and
    their number.

    Raises ValueError unless there are as many tokens as the responses have: a part would have
    another sum.
    """
    if values.shape != (sum(responses.lengths),) or responses.index.shape != values.shape:
        raise ValueError(
            f"a quantity of whole responses needs all their {sum(responses.lengths)} tokens "
            f"({len(responses.lengths)} responses), got {list(values.shape)} values"
        )
    zeros = values.new_zeros(len(responses.lengths))
    sums = zeros.index_add(0, responses.index, torch.where(trained, values, 0.0))
    counts = zeros.index_add(0, responses.index, trained.to(values.dtype))
    return sums[responses.index], counts[responses.index]


def aggregation_weights(
    lengths: Tensor,
    group_ids: Tensor,
    *,
    aggregate: Aggregate,
    max_length: int | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Eq. 12 and its alternatives: `[N]` float64, the weight of every trained token of each
    response of a minibatch.

    The formulas count only responses and groups with trained tokens; a response without one has
    weight 0. Call it once for the whole minibatch, all ranks together, zero advantages included.

    Args:
        lengths: `[N]` trained tokens (end token included; prompt, padding and masked tokens
            excluded).
        group_ids: `[N]` integers; equal numbers form a group.
        aggregate: `token`: 1 / trained tokens of the minibatch (DAPO as released); `group`: 1 /
            (groups x trained tokens of i's group) (Eq. 8 and 12 to the letter); `sequence`: 1 / (N
            x length_i) (GRPO, Eq. 5); `constant`: 1 / (N x max_length) (Dr. GRPO).
        max_length: the response limit in tokens, for `constant`.
        shares: `[N]` the share of each row in its response, whose branches share its weight: every
            count of tokens and of responses in the formulas is one of shares. None: all are 1.

    Raises ValueError if shapes do not fit, a length is negative, `aggregate` is unknown, or
    `max_length` is missing.
    """
    if lengths.ndim != 1 or group_ids.shape != lengths.shape:
        raise ValueError(
            f"lengths and group_ids must both be [N], got shapes {list(lengths.shape)} and"
            f" {list(group_ids.shape)}"
        )
    if (lengths < 0).any():
        raise ValueError(f"lengths must not be negative, got {lengths.tolist()}")
    tokens = lengths.double()
    share = torch.ones_like(tokens) if shares is None else shares.double()
    responses = (share * (tokens > 0)).sum()
    shared_tokens = share * tokens
    if aggregate == "token":
        denominator = shared_tokens.sum().expand_as(tokens)
    elif aggregate == "group":
        _, index = torch.unique(group_ids, return_inverse=True)
        # as many as groups, then zeros
        group_tokens = tokens.new_zeros(len(tokens)).index_add(0, index, shared_tokens)
        denominator = (group_tokens > 0).sum() * group_tokens[index]
    elif aggregate == "sequence":
        denominator = responses * tokens
    elif aggregate == "constant":
        if max_length is None or max_length < 1:
            raise ValueError(
                "aggregate='constant' needs max_length, the response limit in tokens, got"
                f" {max_length}"
            )
        denominator = (responses * max_length).expand_as(tokens)
    else:
        raise ValueError(
            f"aggregate must be 'token', 'group', 'sequence' or 'constant', got {aggregate!r}"
        )
    return torch.where(tokens > 0, share / denominator.double(), 0.0)


def masked_log_ratio(logprobs: Tensor, base: Tensor, trained: Tensor) -> Tensor:
    """log(policy / base) at each token, 0 where nothing trains, in float32 or better."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = logprobs.to(dtype) - base.to(dtype)
    # inf * 0 is nan, so mask before exp(): neither values nor gradients of padding pass
    return torch.where(trained, difference, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def check_shapes(like: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError for a wrong shape, which broadcasting would silently turn into a wrong
    loss.
    """
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name} must have a value for each token: {list(like.shape)}, got"
                f" {list(tensor.shape)}"
            )


def per_token(name: str, values: Tensor, like: Tensor) -> Tensor:
    """Values per token or per row, in the type of `like` and broadcast to its shape."""
    if values.shape == like.shape[:1]:
        values = values.reshape(-1, *[1] * (like.ndim - 1))
    else:
        check_shapes(like, **{name: values})
    return values.to(like.dtype)
