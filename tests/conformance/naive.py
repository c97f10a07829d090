"""The equations as plain loops over lists in float64: the expected values of the conformance set
come from here.

Written from the papers. The package is not imported, and there are no tensors: a sum is a loop.
`[i][t]` is token t of response i. Each loss comes with its gradient by the log-probabilities,
derived by hand, and `central_differences` of the loss alone checks it whenever the set is made.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from typing import Any

Rows = list[list[float]]
LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20; beyond it a token has no gradient."""
DIGITS = 40


def exp(x: float) -> float:
    """e^x, correctly rounded: a C library's may differ in the last digit, and the files are
    compared byte by byte.
    """
    with localcontext(prec=DIGITS):
        return float(Decimal(x).exp())


def log(x: float) -> float:
    """The natural logarithm, correctly rounded."""
    with localcontext(prec=DIGITS):
        return float(Decimal(x).ln())


def exp_minus_1_minus_x(x: float) -> float:
    """e^x - 1 - x without the loss of digits near 0."""
    with localcontext(prec=DIGITS):
        return float(Decimal(x).exp() - 1 - Decimal(x))


def squared(x: float) -> float:
    return x * x


# --- advantages -------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float:
    """With the divisor n - 1 (Bessel)."""
    centre = mean(values)
    return math.sqrt(math.fsum(squared(value - centre) for value in values) / (len(values) - 1))


def group_advantages(rewards: Sequence[float], scale: str) -> list[float]:
    """DAPO's Eq. 9; equal rewards give zeros, exactly."""
    if max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    centre = mean(rewards)
    divisor = sample_std(rewards) + 1e-6 if scale == "std" else 1.0
    return [(reward - centre) / divisor for reward in rewards]


def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """The reward minus the mean of the others' (arXiv 2402.14740)."""
    if max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    return [
        reward - mean([other for j, other in enumerate(rewards) if j != i])
        for i, reward in enumerate(rewards)
    ]


def reinforce_pp_baseline_advantages(
    rewards: Sequence[float], group_ids: Sequence[int]
) -> list[float]:
    """Rewards less their group's mean, whitened over the batch (arXiv 2501.03262, REINFORCE++ w/
    baseline).
    """
    above = []
    for reward, own in zip(rewards, group_ids, strict=True):
        of_group = [other for other, group in zip(rewards, group_ids, strict=True) if group == own]
        above.append(0.0 if max(of_group) == min(of_group) else reward - mean(of_group))
    if not any(above):
        return above
    # their mean is 0
    std = math.sqrt(math.fsum(squared(difference) for difference in above) / (len(above) - 1))
    return [difference / (std + 1e-6) for difference in above]


def is_informative(correct: Sequence[bool | None], scores: Sequence[float | None]) -> bool:
    """DAPO's Eq. 11 on verdicts; a verdict of null (None, None) is an error and does not count."""
    valid = [(c, s) for c, s in zip(correct, scores, strict=True) if s is not None]
    if len(valid) < 2:
        return False
    if all(c is not None for c, _ in valid):
        return 0 < sum(1 for c, _ in valid if c) < len(valid)
    return max(s for _, s in valid) > min(s for _, s in valid)


def generalized_advantages(
    rewards: Rows, values: Rows, gamma: float, gae_lambda: float
) -> tuple[Rows, Rows]:
    """A_t = sum_l (gamma lambda)^l delta_{t+l} (arXiv 1506.02438, Eq. 16) as a double loop, and A_t
    + V_t.
    """
    advantages = []
    for reward, value in zip(rewards, values, strict=True):
        length = len(reward)
        following = [*value[1:], 0.0]
        deltas = [reward[t] + gamma * following[t] - value[t] for t in range(length)]
        row = []
        for t in range(length):
            terms = []
            factor = 1.0
            for later in range(t, length):
                terms.append(factor * deltas[later])
                factor *= gamma * gae_lambda
            row.append(math.fsum(terms))
        advantages.append(row)
    targets = [
        [a + v for a, v in zip(*pair, strict=True)] for pair in zip(advantages, values, strict=True)
    ]
    return advantages, targets


def whiten(values: Rows, mask: Sequence[Sequence[bool]]) -> Rows:
    """(x - mean) / sqrt(variance + 1e-8) over the trained tokens, divisor n - 1; equal ones give
    zeros.
    """
    chosen = [
        x
        for pair in zip(values, mask, strict=True)
        for x, trained in zip(*pair, strict=True)
        if trained
    ]
    if max(chosen) == min(chosen):
        return [[0.0 for _ in row] for row in values]
    centre = mean(chosen)
    divisor = math.sqrt(math.fsum(squared(x - centre) for x in chosen) / (len(chosen) - 1) + 1e-8)
    return [
        [(x - centre) / divisor if trained else 0.0 for x, trained in zip(*pair, strict=True)]
        for pair in zip(values, mask, strict=True)
    ]


# --- rewards, weights -------------------------------------------------------------------------------------------------


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """DAPO's Eq. 13, its three cases in their order, times `factor`."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return factor * ((max_length - buffer) - length) / buffer
    return -factor


def aggregation_weights(
    lengths: Sequence[int], groups: Sequence[int], aggregate: str, max_length: int | None
) -> list[float]:
    """What each trained token of response i weighs: Eq. 12 and its alternatives."""
    weights = []
    for length, group in zip(lengths, groups, strict=True):
        if length == 0:
            weights.append(0.0)
            continue
        if aggregate == "token":
            weights.append(1 / sum(lengths))
        elif aggregate == "group":
            num_groups = len({g for n, g in zip(lengths, groups, strict=True) if n > 0})
            in_group = sum(n for n, g in zip(lengths, groups, strict=True) if g == group)
            weights.append(1 / (num_groups * in_group))
        else:
            responses = sum(1 for n in lengths if n > 0)
            weights.append(
                1 / (responses * (length if aggregate == "sequence" else max_length or 0))
            )
    return weights


def importance_weights(
    old_logprobs: Rows,
    engine_logprobs: Rows,
    mask: Sequence[Sequence[bool]],
    cap: float,
    over_cap: str,
    ratio: str,
) -> Rows:
    """min(u, cap), or u within 1/cap .. cap and else 0, where u is pi_old / pi_engine; 1 at masked
    tokens.
    """
    weights = []
    for old, engine, trained in zip(old_logprobs, engine_logprobs, mask, strict=True):
        tokens = [t for t in range(len(trained)) if trained[t]]
        whole = math.fsum(old[t] - engine[t] for t in tokens)
        row = [1.0] * len(trained)
        for t in tokens:
            u = exp(bounded(whole if ratio == "sequence" else old[t] - engine[t]))
            if over_cap == "truncate":
                row[t] = min(u, cap)
            else:
                row[t] = u if 1 / cap <= u <= cap else 0.0
        weights.append(row)
    return weights


# --- losses -----------------------------------------------------------------------------------------------------------


def bounded(log_ratio: float) -> float:
    return min(max(log_ratio, -LOG_RATIO_BOUND), LOG_RATIO_BOUND)


def clip_surrogate(
    log_ratio: float, advantage: float, clip_low: float, clip_high: float
) -> tuple[float, float]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), Eq. 8 and 10, and its derivative by log
    r.
    """
    ratio = exp(bounded(log_ratio))
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    if clipped * advantage < ratio * advantage:
        return clipped * advantage, 0.0
    return ratio * advantage, ratio * advantage if abs(log_ratio) < LOG_RATIO_BOUND else 0.0


def dual_clip_surrogate(
    log_ratio: float, advantage: float, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[float, float]:
    """For A < 0 at least dual_clip times A (arXiv 1912.09729)."""
    value, slope = clip_surrogate(log_ratio, advantage, clip_low, clip_high)
    if advantage < 0 and value < dual_clip * advantage:
        return dual_clip * advantage, 0.0
    return value, slope


def sapo_surrogate(
    log_ratio: float, advantage: float, positive_temperature: float, negative_temperature: float
) -> tuple[float, float]:
    """(4 / tau) sigmoid(tau (r - 1)) A (arXiv 2511.20347), and 4 p (1 - p) r A with p the
    sigmoid.
    """
    tau = positive_temperature if advantage > 0 else negative_temperature
    ratio = exp(bounded(log_ratio))
    p = 1 / (1 + exp(-tau * (ratio - 1)))
    return 4 / tau * p * advantage, 4 * p * (1 - p) * ratio * advantage


def policy_loss(
    logprobs: Rows,
    old_logprobs: Rows,
    mask: Sequence[Sequence[bool]],
    advantages: Sequence[float],
    weights: Sequence[float],
    *,
    surrogate: str = "clip",
    at: Rows | None = None,
    **parameters: float,
) -> tuple[float, Rows]:
    """-sum_i w_i sum_t f_it over the trained tokens, and its derivative by each log-probability.

    `at`: the log-probabilities at which CISPO's weight, which has no gradient, is taken; by default
    `logprobs`.
    """
    terms = []
    gradient = []
    for i, trained in enumerate(mask):
        tokens = [t for t in range(len(trained)) if trained[t]]
        log_ratios = {t: logprobs[i][t] - old_logprobs[i][t] for t in tokens}
        row = [0.0] * len(trained)
        for t in tokens:
            if surrogate == "clip" and "dual_clip" in parameters:
                value, slope = dual_clip_surrogate(log_ratios[t], advantages[i], **parameters)
            elif surrogate == "clip":
                value, slope = clip_surrogate(log_ratios[t], advantages[i], **parameters)
            # arXiv 2507.18071: one ratio of the response, the geometric mean
            elif surrogate == "gspo":
                value, slope = clip_surrogate(
                    mean(list(log_ratios.values())), advantages[i], **parameters
                )
            elif surrogate == "cispo":  # arXiv 2506.13585: a bounded weight without gradient
                held = logprobs[i][t] if at is None else at[i][t]
                weight = min(exp(bounded(held - old_logprobs[i][t])), 1 + parameters["clip_high"])
                value = weight * advantages[i] * logprobs[i][t]
                slope = weight * advantages[i]
            else:
                value, slope = sapo_surrogate(log_ratios[t], advantages[i], **parameters)
            terms.append(-weights[i] * value)
            # for gspo: each of n tokens adds slope / n to each of n terms
            row[t] = -weights[i] * slope
        gradient.append(row)
    return math.fsum(terms), gradient


def speed_of_choice(
    chooses_b: Sequence[bool],
    rewards: Sequence[float],
    groups: Sequence[int],
    lengths: Sequence[int],
    truncated: Sequence[bool],
    p: float,
    p_old: float,
    *,
    aggregate: str,
    filter_truncated: bool,
    clip_low: float,
    clip_high: float,
) -> float:
    """sum_i w_i f'(r_i) d log pi_i / dz over the first tokens, with log pi_i = log p or log(1 - p),
    p = sigmoid(z).
    """
    advantages = [0.0] * len(rewards)
    for group in set(groups):
        members = [i for i in range(len(groups)) if groups[i] == group]
        of_group = group_advantages([rewards[i] for i in members], "std")
        for i, advantage in zip(members, of_group, strict=True):
            advantages[i] = advantage
    trained = [
        0 if filter_truncated and cut else n for n, cut in zip(lengths, truncated, strict=True)
    ]
    weights = aggregation_weights(trained, groups, aggregate, None)
    terms = []
    for is_b, advantage, weight in zip(chooses_b, advantages, weights, strict=True):
        now, old = (p, p_old) if is_b else (1 - p, 1 - p_old)
        _, slope = clip_surrogate(log(now) - log(old), advantage, clip_low, clip_high)
        terms.append(weight * slope * (1 - p if is_b else -p))
    return math.fsum(terms)


def kl_estimate(difference: float, estimator: str) -> tuple[float, float]:
    """The estimate from d = log pi - log pi_ref of one token, and its derivative by log pi."""
    d = bounded(difference)
    inside = 1.0 if abs(difference) < LOG_RATIO_BOUND else 0.0
    if estimator == "k1":
        return d, inside
    if estimator == "k2":
        return d * d / 2, d * inside
    return exp_minus_1_minus_x(-d), (1 - exp(-d)) * inside


def kl_loss(
    logprobs: Rows,
    reference_logprobs: Rows,
    mask: Sequence[Sequence[bool]],
    weights: Sequence[float],
    *,
    estimator: str,
) -> tuple[float, Rows, Rows]:
    """sum_i w_i sum_t of the estimate, the estimates themselves, and the derivative by each
    log-probability.
    """
    terms = []
    each = []
    gradient = []
    for i, trained in enumerate(mask):
        pairs = [
            (
                kl_estimate(logprobs[i][t] - reference_logprobs[i][t], estimator)
                if trained[t]
                else (0.0, 0.0)
            )
            for t in range(len(trained))
        ]
        terms += [weights[i] * value for value, _ in pairs]
        each.append([value for value, _ in pairs])
        gradient.append([weights[i] * slope for _, slope in pairs])
    return math.fsum(terms), each, gradient


def value_loss(
    values: Sequence[float],
    old_values: Sequence[float],
    targets: Sequence[float],
    weights: Sequence[float],
    clip_range: float | None,
) -> tuple[float, list[float]]:
    """sum_t w_t max((V - target)^2, (V_old + clip(V - V_old) - target)^2) / 2, and its derivative
    by each V.
    """
    terms = []
    gradient = []
    for value, old, target, weight in zip(values, old_values, targets, weights, strict=True):
        error = squared(value - target)
        slope = 2 * (value - target)
        if clip_range is not None:
            held = old + min(max(value - old, -clip_range), clip_range)
            if squared(held - target) > error:
                error = squared(held - target)
                slope = 0.0
        terms.append(weight * error / 2)
        gradient.append(weight * slope / 2)
    return math.fsum(terms), gradient


# --- evaluation -------------------------------------------------------------------------------------------------------


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The fraction of the subsets of k of the samples that hold a correct one (arXiv 2107.03374,
    Eq. 1).
    """
    return float(1 - Decimal(math.comb(samples - correct, k)) / Decimal(math.comb(samples, k)))


# --- the check of every gradient --------------------------------------------------------------------------------------


def central_differences(
    loss_of: Callable[[Any], float], point: Rows, gradient: Rows, step: float = 1e-5
) -> None:
    """Raise unless `gradient` is what differences of `loss_of` around `point` give; null numbers
    are left alone.
    """
    for i, row in enumerate(point):
        for t, number in enumerate(row):
            if math.isnan(number):
                continue
            ahead = [list(r) for r in point]
            behind = [list(r) for r in point]
            ahead[i][t] += step
            behind[i][t] -= step
            found = (loss_of(ahead) - loss_of(behind)) / (2 * step)
            if not abs(found - gradient[i][t]) <= 1e-7 * max(1.0, abs(found)):
                raise AssertionError(
                    f"token {t} of row {i}: the formula gives {gradient[i][t]}, differences {found}"
                )
