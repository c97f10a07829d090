"""The trained model: its log-probabilities before a step, and the optimiser updates of Algorithm 1, line 11."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.algo.loss import aggregation_weights, engine_weights, kl_penalty, policy_loss
from dapo.config import LoraConfig, LossConfig, OptimConfig
from dapo.core.errors import ConfigError
from dapo.core.packed import array_of
from dapo.policy.checkpoint import OptimizerCopy, load_optimizer, save_optimizer
from dapo.policy.logprobs import chunks, hidden_states, score_tokens, token_logprobs, use_packed_forward
from dapo.policy.lora import MergedWeights, add_adapters
from dapo.policy.model import LoadedModel
from dapo.policy.optim import MasterAdamW, learning_rate
from dapo.policy.packing import Microbatch, in_callers_order, pack
from dapo.types import Sample


def recompute_layers(model: PreTrainedModel) -> int:
    """Have every decoder layer of `model` keep nothing but its input for the backward; returns how many.

    Gradients are the same to the bit. Not transformers' own switch, which works in training mode only: a policy is in
    evaluation mode, without dropout. Before the layers are sharded. Raises ConfigError for a model without such layers.
    """
    layers: list[torch.nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"train.recompute: no layers to compute again were found in a {type(model).__name__}")
    for layer in layers:
        # the packed forward draws no random numbers
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = again
    return len(layers)


@dataclass(frozen=True)
class MasterWeights:
    """A policy's weights as they are when they are read, in the precision of the optimiser."""

    master_weights: Mapping[str, Tensor]
    tied: Mapping[str, str]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, tied ones under each of their names."""
        for name, master in self.master_weights.items():
            yield name, master.detach()
        for name, stored in self.tied.items():
            yield name, self.master_weights[stored].detach()


class PolicyCore:
    """pi_theta with its optimiser: what is the same on one process and on several."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        loss: LossConfig,
        optim: OptimConfig,
        temperature: float,
        lora: LoraConfig | None = None,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        """`temperature`: of the rollout, divides the logits; `recompute`: the backward computes activations again.

        Where `loss.kl_coef` is positive, the model as it is now becomes the frozen reference, in a copy: to resume,
        make the policy from the initial model and then `load`. With `lora`, adapters are trained (drawn by `seed`), and
        the reference is the model without them. Raises ConfigError for models that cannot be packed or adapted so.
        """
        self._model: Any = loaded.model
        self._adapters = None if lora is None else add_adapters(self._model, lora, seed=seed)
        use_packed_forward(self._model)
        self._reference = self._frozen_reference() if loss.kl_coef > 0 else None
        if recompute:
            recompute_layers(self._model)
        self._optimizer = self._make_optimizer(optim)
        self._copy = OptimizerCopy(self._optimizer)
        self._loss, self._optim = loss, optim
        self._temperature = temperature

    @property
    def skipped_in_a_row(self) -> int:
        """Updates that were not made since the last that was."""
        return self._optimizer.skipped_in_a_row

    def _make_optimizer(self, optim: OptimConfig) -> MasterAdamW:
        return MasterAdamW(self._model, optim, lora=None if self._adapters is None else self._adapters.settings)

    def _frozen_reference(self) -> Callable[[Microbatch], Tensor]:
        """The log-probabilities `[S]` of the model as it is now; adapters, switched off, save the copy."""
        adapters = self._adapters
        model = copy.deepcopy(self._model).requires_grad_(False) if adapters is None else self._model

        def score(microbatch: Microbatch) -> Tensor:
            with nullcontext() if adapters is None else adapters.disabled():
                return token_logprobs(model, microbatch, temperature=self._temperature)

        return score

    def _update(self, passes: Iterable[tuple[Microbatch, Sequence[Sample], Tensor]], *, step: int) -> dict[str, float]:
        """One optimiser update on microbatches, each with the samples that it was packed from and their weights."""
        rate = learning_rate(step, lr=self._optim.lr, warmup_steps=self._optim.warmup_steps)
        self._optimizer.zero_grad()
        microbatch_sums = [
            part for microbatch, rows, weights in passes for part in self._backward(microbatch, rows, weights)
        ]
        metrics = _token_metrics(self._sum_metrics(microbatch_sums), self._loss)
        norm, skipped = self._optimizer.update(rate, is_valid=_is_valid_update(metrics, self._loss))
        return metrics | {"optim/grad_norm": norm, "optim/lr": rate, "optim/skipped": float(skipped)}

    def _sum_metrics(self, microbatch_sums: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        return sum_metrics(microbatch_sums)

    @contextmanager
    def _head(self) -> Iterator[Any]:
        """The layer whose weights the chunks of a microbatch are scored with; their gradients are whole at the end."""
        yield self._model.get_output_embeddings()

    def _backward(self, microbatch: Microbatch, samples: Sequence[Sample], weights: Tensor) -> list[dict[str, Tensor]]:
        """Add the gradient of a microbatch's loss to what is there; returns sums over its trained tokens, by chunk.

        The loss is a sum over tokens, so each chunk of tokens goes through the head, the loss and back to the hidden
        states on its own, and the layers follow with all of them.
        """
        tokens = self._per_token(microbatch, samples, weights)
        hidden = hidden_states(self._model, microbatch)  # [S, hidden]
        gradient = torch.empty_like(hidden)
        sums = []
        with self._head() as head:
            for part in chunks(len(hidden), len(head.weight)):
                inputs = hidden.detach()[part].requires_grad_()
                logprobs, entropies = score_tokens(
                    inputs,
                    head,
                    microbatch.targets[part],
                    temperature=self._temperature,
                    differentiable_entropy=self._loss.entropy_coef > 0,
                )
                chunk = {name: values[part] for name, values in tokens.items()}
                loss, chunk_sums = _objective(logprobs, entropies, chunk, self._loss)
                loss.backward()
                assert inputs.grad is not None
                gradient[part] = inputs.grad
                sums.append(chunk_sums)
        hidden.backward(gradient)
        return sums

    def _per_token(self, microbatch: Microbatch, samples: Sequence[Sample], weights: Tensor) -> dict[str, Tensor]:
        """`[S]` each: what the loss needs beside the log-probabilities; keys are missing where nothing is known."""
        rows = [samples[i] for i in microbatch.indices]
        device, dtype = self._model.device, torch.promote_types(self._model.dtype, torch.float32)
        lengths = torch.tensor(microbatch.lengths)

        def of_rows(values: Tensor) -> Tensor:
            return values.to(dtype).repeat_interleave(lengths).to(device)

        def of_tokens(values: Sequence[Sequence[float]]) -> Tensor:
            return torch.from_numpy(np.concatenate([array_of(row) for row in values])).to(device, dtype)

        tokens = {
            "advantages": of_rows(torch.tensor([row.advantage for row in rows], dtype=torch.float64)),
            "weights": of_rows(weights[list(microbatch.indices)]),
            "mask": of_tokens([row.mask for row in rows]).bool(),
        }
        old = [row.old_logprobs for row in rows if row.old_logprobs is not None]
        if old:
            tokens["old"] = of_tokens(old)
        if all(row.engine_logprobs for row in rows):
            tokens["engine"] = of_tokens([row.engine_logprobs for row in rows])
        elif self._loss.engine_correction is not None:
            raise ValueError("loss.engine_correction=tis needs engine_logprobs for all samples")
        if self._reference is not None:
            tokens["reference"] = self._reference(microbatch)
        if any(len(values) != sum(microbatch.lengths) for values in tokens.values()):
            raise ValueError("mask, old_logprobs and engine_logprobs must have one value for each response token")
        return tokens


class Policy(PolicyCore):
    """A policy in one process. Takes over `loaded.model`: it is trained in place."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        loss: LossConfig,
        optim: OptimConfig,
        temperature: float,
        microbatch_tokens: int,
        max_response_tokens: int,
        lora: LoraConfig | None = None,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        """As `PolicyCore`; `max_response_tokens`: for `loss.aggregate=constant`."""
        super().__init__(
            loaded, loss=loss, optim=optim, temperature=temperature, lora=lora, seed=seed, recompute=recompute
        )
        self._microbatch_tokens = microbatch_tokens
        self._max_response_tokens = max_response_tokens

    def weights(self, *, version: int) -> MasterWeights | MergedWeights:
        """For engines and export; reads the weights as they are at that moment, adapters merged.

        `version` names weights that are written to a file; here they are read in place.
        Raises NumericsError where a weight is not finite.
        """
        self._optimizer.require_finite()
        if self._adapters is not None:
            return self._adapters.merged(self._optimizer.master_weights)
        return MasterWeights(self._optimizer.master_weights, self._optimizer.tied)

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same samples in the same order with `old_logprobs`: pi_old of a step with several updates (Eq. 6)."""
        microbatches = self._pack(samples)
        scores = [token_logprobs(self._model, m, temperature=self._temperature) for m in microbatches]
        rows = in_callers_order(microbatches, scores, len(samples))
        return [replace(sample, old_logprobs=row) for sample, row in zip(samples, rows, strict=True)]

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]:
        """One optimiser update on whole groups, at the learning rate of training step `step` (from 1).

        Samples without `old_logprobs` are on policy: their ratio is 1. Rows whose advantage is exactly 0 are not
        computed unless KL or entropy need them; they count in the loss weights (Eq. 12) all the same. Returns metrics;
        all but `optim/grad_norm`, `optim/lr` and `optim/skipped` describe the `optim/update_tokens` tokens that were
        computed and train, and means are left out where there are none:

        - `loss/policy`: Eq. 8, negated; `loss/kl`: the estimate of D_KL to the reference, before its coefficient;
        - `loss/entropy`: nats a token; `loss/ratio_mean`; `loss/approx_kl` to the old policy; `loss/token_prob_mean`;
        - `loss/clip_low_fraction`, `loss/clip_high_fraction`: tokens that the clip robs of their gradient;
          `loss/clip_dual_fraction` where there is a dual clip; `loss/clipped_high_prob_mean` where any is up-clipped;
        - `rollout/engine_logprob_gap_mean`, `_max`: |engine - old| in nats, where the engine's are known;
        - `loss/engine_weight_mean`, `loss/engine_weight_truncated_fraction` with `loss.engine_correction: tis`;
        - `optim/grad_norm` before clipping; `optim/lr`; `optim/skipped`: 1 if the update was not made, because the loss
          or that norm is not finite, or `loss/approx_kl` above `loss.max_approx_kl`; else 0.

        Raises NumericsError where the update has led the weights out of the finite numbers.
        """
        rows, weights = rows_to_compute(minibatch, self._loss, max_response_tokens=self._max_response_tokens)
        return self._update(((microbatch, rows, weights) for microbatch in self._pack(rows)), step=step)

    def save(self, directory: str | Path) -> None:
        """Write what trains, AdamW's moments and counters into `directory`, which exists.

        Raises NumericsError, and writes nothing, where a weight is not finite.
        """
        self._optimizer.require_finite()
        save_optimizer(self._optimizer, Path(directory))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state; the result writes the copy like `save`, in any thread, until the next snapshot is taken.

        Raises NumericsError where a weight is not finite.
        """
        self._optimizer.require_finite()
        return self._copy.take()

    def load(self, directory: str | Path) -> None:
        """Continue from what `save` wrote, bit for bit. Raises CheckpointError; the reference stays as it is."""
        load_optimizer(self._optimizer, Path(directory))

    def _pack(self, samples: Sequence[Sample]) -> list[Microbatch]:
        return pack(samples, max_tokens=self._microbatch_tokens, device=self._model.device)


def rows_to_compute(
    minibatch: Sequence[Sample], loss: LossConfig, *, max_response_tokens: int
) -> tuple[list[Sample], Tensor]:
    """The samples that can carry a gradient, and `[N]` their loss weights among all of the minibatch (Eq. 12)."""
    if len({sample.old_logprobs is None for sample in minibatch}) > 1:
        raise ValueError("old_logprobs must be there for all samples of a minibatch or for none of them")
    lengths = torch.tensor([sample.num_trained_tokens for sample in minibatch])
    weights = aggregation_weights(
        lengths,
        torch.tensor([sample.group_id for sample in minibatch]),
        aggregate=loss.aggregate,
        max_length=max_response_tokens,
    )
    every_row = loss.kl_coef > 0 or loss.entropy_coef > 0
    chosen = [
        i
        for i, (sample, length) in enumerate(zip(minibatch, lengths.tolist(), strict=True))
        if length and (every_row or sample.advantage != 0)
    ]
    return [minibatch[i] for i in chosen], weights[chosen]


def _objective(
    logprobs: Tensor, entropies: Tensor, tokens: Mapping[str, Tensor], config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of `[n]` tokens, each a response of its own with its response's advantage and weight, and their sums."""
    mask, weights = tokens["mask"], tokens["weights"]
    old = tokens.get("old", logprobs.detach())
    correction, corrected = _engine_correction(old, tokens, config)
    loss, sums = policy_loss(
        logprobs[:, None],
        old[:, None],
        tokens["advantages"],
        mask[:, None],
        weights * correction,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    sums |= corrected
    sums["loss"] = loss.detach()
    sums["entropy"] = entropies.detach()[mask].sum()
    if "engine" in tokens:
        gaps = (tokens["engine"] - old).abs()[mask]
        sums["gap"], sums["gap_tokens"] = gaps.sum(), mask.sum()
        sums["gap_max"] = gaps.max() if len(gaps) else gaps.sum()
    if "reference" in tokens:
        kl = kl_penalty(logprobs[:, None], tokens["reference"][:, None], mask[:, None], weights)
        sums["kl"] = kl.detach()
        loss = loss + config.kl_coef * kl
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (weights * entropies)[mask].sum()
    return loss, sums


def _engine_correction(
    old: Tensor, tokens: Mapping[str, Tensor], config: LossConfig
) -> tuple[Tensor | float, dict[str, Tensor]]:
    """`[n]` what `loss.engine_correction` multiplies each token's policy loss by, and its sums."""
    mask, cap = tokens["mask"], config.engine_correction
    if cap is None:
        return 1.0, {}
    correction = engine_weights(old[:, None], tokens["engine"][:, None], mask[:, None], cap=cap)[:, 0]
    return correction, {
        "engine_weight": correction[mask].sum(dtype=torch.float64),
        "engine_truncated": (correction[mask] >= cap).sum(),
    }


def _is_valid_update(metrics: Mapping[str, float], config: LossConfig) -> bool:
    """Is the loss finite, and the policy still near the one whose tokens it learns from?"""
    approx_kl, limit = metrics.get("loss/approx_kl", 0.0), config.max_approx_kl
    return math.isfinite(metrics["loss/policy"]) and (limit is None or approx_kl <= limit)


def sum_metrics(microbatch_sums: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Sums of what is told of each part by name, largest values of what ends in `_max`; 0 for any other name."""
    sums: dict[str, float] = defaultdict(float)
    for part in microbatch_sums:
        for name, value in part.items():
            sums[name] = max(sums[name], float(value)) if name.endswith("_max") else sums[name] + float(value)
    return sums


def _token_metrics(sums: Mapping[str, float], config: LossConfig) -> dict[str, float]:
    """Sums turned into means over the trained tokens."""
    count = sums["tokens"]
    metrics = {"loss/policy": sums["loss"], "optim/update_tokens": count}
    if "kl" in sums:
        metrics["loss/kl"] = sums["kl"]
    if not count:
        return metrics
    means = {
        "loss/entropy": "entropy",
        "loss/ratio_mean": "ratio_sum",
        "loss/approx_kl": "approx_kl_sum",
        "loss/token_prob_mean": "prob_sum",
        "loss/clip_low_fraction": "clipped_low",
        "loss/clip_high_fraction": "clipped_high",
    }
    if config.dual_clip is not None:
        means["loss/clip_dual_fraction"] = "clipped_dual"
    if config.engine_correction is not None:
        means["loss/engine_weight_mean"] = "engine_weight"
        means["loss/engine_weight_truncated_fraction"] = "engine_truncated"
    metrics |= {name: sums[key] / count for name, key in means.items()}
    if sums["clipped_high"]:
        metrics["loss/clipped_high_prob_mean"] = sums["clipped_high_prob_sum"] / sums["clipped_high"]
    if sums["gap_tokens"]:
        metrics["rollout/engine_logprob_gap_mean"] = sums["gap"] / sums["gap_tokens"]
        metrics["rollout/engine_logprob_gap_max"] = sums["gap_max"]
    return metrics
