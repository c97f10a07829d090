"""A custom loss (`loss.function`): loaded, checked on an example, differentiated in parts."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dapo.core.errors import ConfigError, DapoError, LossFailed
from dapo.core.loading import Failure, call_text, load_callable, own_name, try_call
from dapo.core.rng import keyed_seed, keyed_uniforms

LossFunction: TypeAlias = Callable[..., tuple[Tensor, Mapping[str, Any]]]
"""The function that `CustomLoss` describes."""

ARGUMENTS = ("logprobs", "old_logprobs", "advantages", "mask", "weights")
EXAMPLE_TOKENS = 12
SUM_TOLERANCE = 1e-4
RESERVED = (
    "policy",
    "kl",
    "entropy",
    "ratio_mean",
    "approx_kl",
    "token_prob_mean",
    "engine_weight_mean",
    "engine_weight_truncated_fraction",
)
"""Names that a metric of a custom loss must not have, because the trainer logs them as `loss/NAME`.
"""


@dataclass(frozen=True)
class CustomLoss:
    """A loss in place of Eq. 8.

    It has the arguments `(logprobs, old_logprobs, advantages, mask, weights)` and returns `(loss,
    metrics)`.

    It is called with the response tokens of a part of a minibatch, packed into tensors `[T]` of one
    floating type. It returns the scalar to minimise and numbers by name, which are logged as
    `loss/NAME`. Both are added over the parts, so both must be sums over tokens, `(weights *
    per_token).sum()`. `dapo show docs losses` describes the arguments and what is guaranteed about
    them.
    """

    function: LossFunction
    name: str

    def __post_init__(self) -> None:
        """Raise ConfigError unless the function returns a trainable loss for 12 example tokens."""
        self._verify(_example())

    def differentiate(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Return `[T]` derivatives of the loss by the log-probabilities, and loss and metrics.

        The derivative is 0 where the mask is false or the weight is 0; the function sees a false
        mask in both cases.

        A loss that is not finite is not detected here, which would wait for the device: it makes
        the loss of the whole update not finite, and the update is skipped.

        Args:
            logprobs: `[T]`, the only ones with a gradient.
            old_logprobs: `[T]` of pi_old.
            advantages: `[T]`.
            mask: `[T]` booleans.
            weights: `[T]` loss weights.

        Raises:
            LossFailed: the function raises, or returns anything but a loss and metrics.
        """
        leaf = logprobs.detach().clone().requires_grad_()
        weights = torch.where(mask, weights, 0.0)
        # a token of weight 0 does not train, whatever the function makes of its weight
        mask = mask & (weights != 0)
        loss, metrics = self._call(
            leaf, old_logprobs.detach(), advantages, mask, weights, error=LossFailed
        )
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            raise LossFailed(f"{self.name}: the loss does not depend on logprobs")
        values: dict[str, Tensor | float] = {"loss": loss.detach()}
        for name, value in metrics.items():
            values[f"custom/{name}/"] = self._number(name, value, LossFailed)
        return torch.where(mask, gradient, 0.0), values

    def _call(self, *tokens: Tensor, error: type[DapoError]) -> tuple[Tensor, Mapping[str, Any]]:
        returned = try_call(lambda: self.function(*tokens))
        if isinstance(returned, Failure):
            raise error(f"{self.name} {returned.reason}")
        if (
            not isinstance(returned, tuple)
            or len(returned) != 2
            or not isinstance(returned[1], Mapping)
        ):
            raise error(
                f"{self.name} returned a {type(returned).__name__}: expected (loss, metrics), a"
                " scalar tensor and a dict"
            )
        loss, metrics = returned
        if not isinstance(loss, Tensor) or loss.ndim:
            actual = f"a {type(loss).__name__}"
            if isinstance(loss, Tensor):
                actual = f"a tensor of shape {list(loss.shape)}"
            raise error(
                f"{self.name}: the loss is {actual}: expected a scalar tensor, such as (weights *"
                " x).sum()"
            )
        if not loss.requires_grad:
            raise error(
                f"{self.name}: the loss has no gradient: compute it from logprobs, without detach()"
                " or item()"
            )
        return loss, metrics

    def _number(self, name: Any, value: Any, error: type[DapoError]) -> Tensor | float:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name) or name in RESERVED:
            why = "needs a name of letters, digits, underscores"
            if name in RESERVED:
                why = "is reserved for the trainer"
            raise error(f"{self.name}: the metric {name!r} {why}; rename it")
        if isinstance(value, Tensor) and not value.ndim:
            return value.detach()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise error(
            f"{self.name}: the metric {name!r} is a {type(value).__name__}: expected a number"
        )

    def _verify(self, tokens: Sequence[Tensor]) -> None:
        """Raise ConfigError unless loss and metrics are finite and add up over parts."""
        self._require_signature()
        totals = self._values(tokens)
        parts = []
        for start in range(0, EXAMPLE_TOKENS, 5):
            part = [values[start : start + 5] for values in tokens]
            parts.append(self._values(part))
        for name, value in totals.items():
            if not math.isfinite(value):
                raise ConfigError(
                    f"{self.name}: {name} is {value} for an example of {EXAMPLE_TOKENS} tokens"
                )
            part_values = [part.get(name, 0.0) for part in parts]
            total = sum(part_values)
            # relative to the parts: they may cancel
            largest = max(1.0, *map(abs, part_values))
            if abs(total - value) > SUM_TOLERANCE * largest:
                raise ConfigError(
                    f"{self.name}: {name} is not a sum over tokens: {value:.4g} for an example of"
                    f" {EXAMPLE_TOKENS} tokens at once, but {total:.4g} in three parts; a minibatch"
                    " is computed in parts, so return (weights * x).sum() for the mean of x"
                )

    def _require_signature(self) -> None:
        """Raise ConfigError unless the function can be called with the five tensors."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # of a compiled function
            return
        try:
            signature.bind(*ARGUMENTS)
        except TypeError:
            function = call_text(self.name, self.function)
            expected = f"def {self.name.rpartition(':')[2]}({', '.join(ARGUMENTS)})"
            raise ConfigError(
                f"{function}: a loss is called with {len(ARGUMENTS)} tensors and returns (loss,"
                f" metrics): {expected}"
            ) from None

    def _values(self, tokens: Sequence[Tensor]) -> dict[str, float]:
        logprobs = tokens[0].clone().requires_grad_()
        loss, metrics = self._call(logprobs, *tokens[1:], error=ConfigError)
        (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
        if gradient is None or gradient.shape != logprobs.shape:
            raise ConfigError(f"{self.name}: the loss does not depend on logprobs")
        if not bool(gradient.isfinite().all()):
            raise ConfigError(
                f"{self.name}: the gradient is not finite for an example of {EXAMPLE_TOKENS} tokens"
            )
        numbers = {"the loss": float(loss.detach())}
        for name, value in metrics.items():
            numbers[f"the metric {name!r}"] = float(self._number(name, value, ConfigError))
        return numbers


def load_loss(name: str | None) -> CustomLoss | None:
    """Return the checked loss of `loss.function`; None if `name` is None. Raises ConfigError."""
    if name is None:
        return None
    option = "loss.function="
    own = own_name(name)
    # a function of a notebook or a script has its own name in messages
    shown = f"{option}{name}" if own == name else own
    return CustomLoss(load_callable(name, error=ConfigError, option=option), shown)


def custom_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `loss/NAME` of a custom loss among the sums of a minibatch.

    Raises LossFailed if one of them is not finite although the loss is.
    """
    metrics = {}
    for name, value in sums.items():
        match = _KEY.fullmatch(name)
        if match:
            metrics[f"loss/{match[1]}"] = value
    for name, value in metrics.items():
        # with a loss that is not finite the whole update is skipped
        if not math.isfinite(value) and math.isfinite(sums["loss"]):
            raise LossFailed(
                f"loss.function returned {value} for the metric {name}: expected a finite number"
            )
    return metrics


_KEY = re.compile(r"custom/(\w+)/")


def _example() -> tuple[Tensor, ...]:
    """Return tokens of two responses, with ratios on both sides of 1; some do not train."""
    uniforms = keyed_uniforms(keyed_seed("custom loss"), 2 * EXAMPLE_TOKENS)
    logprobs = torch.tensor([-3.0 * u - 0.05 for u in uniforms[:EXAMPLE_TOKENS]])
    old = logprobs + torch.tensor([u - 0.5 for u in uniforms[EXAMPLE_TOKENS:]])
    index = torch.arange(EXAMPLE_TOKENS)
    mask = index % 5 != 3
    advantages = torch.where(index < 7, 1.25, -0.75)
    return logprobs, old, advantages, mask, torch.where(mask, 1 / mask.sum(), 0.0)
