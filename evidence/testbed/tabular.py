"""The predictions of the testbed: one logit, the paper's advantages and losses, and no network.

A choice between two strategies has one logit z; p = sigmoid(z) is the share of the better one, B. A
step samples groups of choices, and its updates follow the gradient

    sum_i w_i min(r_i A_i, clip(r_i) A_i)' (1[i = B] - p)

with the weights of the loss, the advantages of Eq. 9 and the ratios of Eq. 8. The optimizer is
AdamW's direction or plain gradient descent, both with momentum. The size of its steps is the only
free parameter: `steps_to` it is set once per experiment, from the pilot's growth at the level where
the technique has no effect.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_EPSILON = 1.0e-8


@dataclass(frozen=True)
class Choice:
    """A task and a method, in the numbers that matter to one logit."""

    start: float
    """The share of B before training."""
    right_a: float = 0.3
    right_b: float = 0.95
    rate: float = 0.05
    optimizer: str = "adam"
    momentum: float = 0.9
    groups: int = 16
    size: int = 8
    updates: int = 2
    length_a: int = 1
    length_b: int = 1
    per_token: bool = True
    """The token-level loss; otherwise the mean over sequences."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    trivial: float = 0.0
    resampled: bool = False
    """Dynamic sampling: groups without a signal are replaced."""
    too_long: float = 0.0
    """The share of the problems on which B does not end within the limit."""
    filtered: bool = False
    """Overlong filtering: truncated responses stay in the group's mean and leave the loss."""


def simulate(choice: Choice, *, steps: int, seeds: int = 48) -> Floats:
    """The share of B before each step, of many seeds. [steps, seeds]"""
    rng = np.random.default_rng(7)
    z = np.full(seeds, np.log(choice.start / (1 - choice.start)))
    optimizer = _Optimizer(choice, seeds)
    shares = []
    for _ in range(steps):
        old = _sigmoid(z)
        shares.append(old)
        is_b, advantages, weights = _sample(choice, old, rng)
        order = np.array_split(np.arange(choice.groups), choice.updates)
        for chosen in order:
            z = z + optimizer.step(
                _gradient(
                    choice, z, old, is_b[:, chosen], advantages[:, chosen], weights[:, chosen]
                )
            )
    return np.array(shares)


def _sample(choice: Choice, p: Floats, rng: np.random.Generator) -> tuple[Flags, Floats, Floats]:
    """A batch of every seed: which choices are B, their advantages, their weights in the loss.

    [seeds, groups, size]
    """
    shape = (len(p), choice.groups, choice.size)
    is_b, rewards, is_cut = (np.zeros(shape, kind) for kind in (bool, float, bool))
    is_missing = np.ones(shape[:2], bool)
    for _ in range(200):
        sampled = rng.random(shape) < p[:, None, None]
        cut = sampled & (rng.random(shape[:2]) < choice.too_long)[..., None]
        right = rng.random(shape) < np.where(sampled, choice.right_b, choice.right_a)
        right = (right & ~cut) | (rng.random(shape[:2]) < choice.trivial)[..., None]
        for kept, new in ((is_b, sampled), (rewards, right), (is_cut, cut)):
            kept[is_missing] = new[is_missing]
        is_missing &= rewards.min(axis=-1) == rewards.max(axis=-1)
        if not choice.resampled or not is_missing.any():
            break
    spread = rewards.std(axis=-1, keepdims=True)
    advantages = np.where(
        spread > 0,
        (rewards - rewards.mean(axis=-1, keepdims=True)) / np.maximum(spread, _EPSILON),
        0,
    )
    weights = np.ones(shape)
    # every token of the minibatch counts alike: a response by its length over the mean length
    if choice.per_token:
        lengths = np.where(is_b, choice.length_b, choice.length_a).astype(float)
        weights = 1 / lengths.mean(axis=(1, 2), keepdims=True) * np.ones(shape)
    else:
        weights = 1 / np.where(is_b, choice.length_b, choice.length_a)
    return is_b, advantages, np.where(is_cut & choice.filtered, 0.0, weights)


def _gradient(
    choice: Choice, z: Floats, old: Floats, is_b: Flags, advantages: Floats, weights: Floats
) -> Floats:
    """The gradient of each seed's logit, of a loss that is a mean over responses. [seeds]"""
    p = _sigmoid(z)[:, None, None]
    before = old[:, None, None]
    ratios = np.where(is_b, p / before, (1 - p) / (1 - before))
    is_stopped = ((advantages > 0) & (ratios > 1 + choice.clip_high)) | (
        (advantages < 0) & (ratios < 1 - choice.clip_low)
    )
    terms = weights * ratios * advantages * (is_b - p) * ~is_stopped
    scale = min(choice.length_a, choice.length_b)
    return scale * terms.mean(axis=(1, 2))


class _Optimizer:
    """Momentum, and AdamW's division by the root of the mean square."""

    def __init__(self, choice: Choice, seeds: int) -> None:
        self.choice = choice
        self.count = 0
        self.first = np.zeros(seeds)
        self.second = np.zeros(seeds)

    def step(self, gradient: Floats) -> Floats:
        """The change of the logits."""
        self.count += 1
        momentum = self.choice.momentum
        self.first = momentum * self.first + (1 - momentum) * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first = self.first / (1 - momentum**self.count)
        if self.choice.optimizer == "plain":
            return self.choice.rate * self.first
        return (
            self.choice.rate * first / (np.sqrt(self.second / (1 - 0.999**self.count)) + _EPSILON)
        )


def crossing(shares: Floats, bound: float, *, falling: bool = False) -> Floats:
    """The step at which each seed's share passes a bound, interpolated; the last step if it never
    does.

    [seeds]
    """
    values, target = (-shares, -bound) if falling else (shares, bound)
    found = np.full(values.shape[1], float(len(values)))
    for seed in range(values.shape[1]):
        after = np.flatnonzero(values[:, seed] >= target)
        if len(after):
            last = int(after[0])
            low, high = (values[last - 1, seed], values[last, seed]) if last else (0.0, 1.0)
            found[seed] = last + (target - low) / (high - low) if last else 1.0
    return found


def _sigmoid(z: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(z, -30, 30)))
