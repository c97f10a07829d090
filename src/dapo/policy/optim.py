"""AdamW on full-precision master weights, with a schedule and a check for bad gradients.

A bfloat16 model holds rounded copies of float32 master weights: its gradients are added up in
float32, and the copies are synced from them after each update. In float32 and float64 the model's
own weights are the master weights.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dapo.config import OptimConfig
from dapo.core.errors import NumericsError
from dapo.core.portable_math import cos
from dapo.libs.cpu_kernels import add_gradient_, use_sparse_embeddings
from dapo.policy.hf_io import tied_names

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    schedule: Schedule = "constant",
    num_steps: int = 0,
    min_fraction: float = 0.0,
) -> float:
    """Return the rate of a step: linear warm-up, then `lr`, or a decay from it.

    Args:
        step: the training step, from 1.
        lr: the rate after the warm-up.
        warmup_steps: the number of steps of the warm-up.
        schedule: `linear` and `cosine` decay; `constant` does not.
        num_steps: the step in which the decay ends.
        min_fraction: the end of the decay, as a fraction of `lr`.
    """
    if step < 1:
        raise ValueError(f"training steps count from 1, got {step}")
    if step < warmup_steps:
        return lr * step / warmup_steps
    # `lr` itself: the quotient of the last step of the warm-up could round
    if step == warmup_steps:
        return lr
    if schedule == "constant":
        return lr
    over = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        share = 1 - over
    else:
        share = (1 + cos(math.pi * over)) / 2
    return lr * (min_fraction + (1 - min_fraction) * share)


def schedule_of(optim: OptimConfig, num_steps: int) -> dict[str, Any]:
    """Return the keyword arguments of `learning_rate` from the options, except `lr`."""
    return {
        "warmup_steps": optim.warmup(num_steps),
        "schedule": optim.decay[0],
        "num_steps": num_steps,
        "min_fraction": optim.decay[1],
    }


class MasterAdamW:
    """AdamW over all trained parameters.

    Like the released code it decays all of them, norms included.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: OptimConfig,
        *,
        lora: Mapping[str, float] | None = None,
        advice: str = "lower optim.lr, or look at loss/* and optim/grad_norm",
    ) -> None:
        """Train the weights of a model that require gradients.

        Args:
            model: the model, whose weights are updated in place.
            config: the section `optim`.
            lora: rank and alpha of adapters; checkpoints record them, and only equal ones can be
                loaded. None: all weights are trained.
            advice: what the error for weights that are not finite tells users to do.
        """
        self._config = config
        self._advice = advice
        self.lora = lora
        # by name, in the model's type: `master_weights`, rounded
        self.model_weights = self._trained(model)
        self.master_weights = {}
        self._copies: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        """The weights of a narrower type, each with its master weight."""
        for name, weight in self.model_weights.items():
            master = _master_weight(weight)
            self.master_weights[name] = master
            if master is not weight:
                self._copies.append((weight, master))
        # a frozen weight has no state to store
        self.tied = {
            name: target
            for name, target in tied_names(model).items()
            if target in self.model_weights
        }
        if self._copies:
            use_sparse_embeddings(model)  # `_move_gradient` adds their rows
        for weight, master in self._copies:
            weight.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        weights = list(self.master_weights.values())
        decay = config.weight_decay
        self._adamw = torch.optim.AdamW(
            weights, lr=config.lr, betas=config.betas, weight_decay=decay, fused=True
        )
        self._not_finite: Tensor | None = None
        """Whether a weight was infinite or NaN after the last update; None before the first."""
        self.num_updates = 0  # the number of updates, without skipped ones
        self.skipped_in_a_row = 0

    def _trained(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def zero_grad(self) -> None:
        """Drop all gradients, including those of an aborted update."""
        for parameter in (*self.model_weights.values(), *self.master_weights.values()):
            parameter.grad = None

    def measure(self) -> dict[str, Tensor]:
        """Return the squared norm of the gradients, and whether a weight is not finite.

        They are the measurements for `update`.

        Both stay on the device and add up over ranks, like the sums of the loss: an update waits
        for the device once.
        """
        gradients = []
        for master in self.master_weights.values():
            if master.grad is None:  # no sample reached it: decay and momentum continue
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        # squares add up over ranks
        measured = {"squared_norm": get_total_norm(gradients).double().square()}
        if self._not_finite is not None:
            measured["not_finite"] = self._not_finite
        return measured

    def update(
        self, lr: float, measured: Mapping[str, float], *, is_valid: bool = True
    ) -> tuple[float, bool]:
        """Make one AdamW step on the accumulated gradients, which are then freed.

        Returns the global norm before clipping, and whether the update was skipped, because that
        norm is not finite or `is_valid` is false.

        Args:
            lr: the learning rate.
            measured: `measure` after the backward, added over all ranks.
            is_valid: whether the loss allows the update.

        Raises:
            NumericsError: the previous update made a weight infinite or NaN: the weights are lost.
        """
        if measured.get("not_finite"):
            self.require_finite()
        norm = math.sqrt(measured["squared_norm"])
        if skipped := not (is_valid and norm < float("inf")):
            self.skipped_in_a_row += 1
        else:
            # made on the device, so that nothing waits for a copy
            weight = next(iter(self.master_weights.values()))
            total_norm = torch.full((), norm, dtype=weight.dtype, device=weight.device)
            clip_grads_with_norm_(
                self.master_weights.values(), self._config.max_grad_norm, total_norm
            )
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            # stays on the device: the next update's measurements bring it along
            self._not_finite = self._sums().isfinite().all().logical_not()
            self.sync_from_master()
            self.num_updates += 1
            self.skipped_in_a_row = 0
        self.zero_grad()
        return norm, skipped

    def require_finite(self) -> None:
        """Raise NumericsError, naming the weight, unless all weights are finite."""
        lost = self._names_not_finite()
        if lost:
            raise NumericsError(
                f"the weights are not finite after {self.num_updates} updates (the first is"
                f" {lost[0]}), so they are neither saved nor sampled from; {self._advice} of the"
                " steps before"
            )

    @torch.no_grad()
    def _names_not_finite(self) -> list[str]:
        if self._sums().isfinite().all():
            return []
        return [name for name, master in self.master_weights.items() if not master.isfinite().all()]

    @torch.no_grad()
    def _sums(self) -> Tensor:
        """Sum each weight, which shows inf and nan in a fast pass; finite weights may overflow."""
        return torch.stack([master.sum() for master in self.master_weights.values()])

    @torch.no_grad()
    def sync_from_master(self) -> None:
        """Round the master weights into the model's, if those are copies."""
        if self._copies:
            working, master = zip(*self._copies, strict=True)
            torch._foreach_copy_(working, master)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return `exp_avg` and `exp_avg_sq` by parameter name; empty before the first update."""
        moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in MOMENTS}
        for name, master in self.master_weights.items():
            state = self._adamw.state.get(master)
            if state is not None:
                for kind in MOMENTS:
                    moments[kind][name] = state[kind]
        return moments

    @torch.no_grad()
    def restore(
        self,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Mapping[str, Tensor]],
        *,
        num_updates: int,
        skipped_in_a_row: int,
    ) -> None:
        """Set weights, moments and counters to saved values; every tensor is copied.

        Args:
            weights: `master_weights` by name.
            moments: `moments()` by kind and name.
            num_updates: the number of updates so far.
            skipped_in_a_row: the number of skipped updates since the last one.
        """
        for name, master in self.master_weights.items():
            master.copy_(weights[name])
        self.sync_from_master()
        self.zero_grad()
        state = {}
        if num_updates:
            for i, name in enumerate(self.master_weights):
                state[i] = {kind: values[name].clone() for kind, values in moments.items()}
                # AdamW counts per parameter, in a tensor
                state[i]["step"] = torch.tensor(float(num_updates))
        # the groups stay: their options are those of this run
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state, "param_groups": groups})
        self._not_finite = None
        self.num_updates = num_updates
        self.skipped_in_a_row = skipped_in_a_row


def _master_weight(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a weight of full precision itself, or a float32 copy of a narrower one."""
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    return torch.nn.Parameter(weight.detach().float())


def _move_gradient(master: torch.nn.Parameter, working: Tensor) -> None:
    """Add a weight's new gradient to its master weight's, in that type, and free it."""
    assert working.grad is not None
    if master.grad is None:
        master.grad = working.grad.to_dense().to(master.dtype)
    else:
        add_gradient_(master.grad, working.grad)
    working.grad = None
