"""A policy whose weights, gradients and optimiser are sharded over ranks (FSDP2): what one of the ranks does.

Every rank holds the same part of each weight and calls the same methods in the same order; most of them are collective.
A layer's weights are gathered when it computes. Those of the embedding, the last norm and the head stay gathered from
the forward to the end of the backward, so that between the two the head can be applied chunk by chunk.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from dapo.config import OptimConfig
from dapo.core.errors import CheckpointError, ConfigError
from dapo.policy.checkpoint import (
    as_checkpoint_error,
    counters_of,
    load_optimizer,
    require_same,
    stored_at,
    write_counters,
)
from dapo.policy.fsdp.partition import DUMMY_MICROBATCH, RankMicrobatch
from dapo.policy.fsdp.tensors import read_shards, stored_like, write_shards
from dapo.policy.logprobs import token_logprobs
from dapo.policy.optim import MasterAdamW
from dapo.policy.packing import Microbatch, in_callers_order, pack
from dapo.policy.policy import PolicyCore, sum_metrics


class Ranks:
    """The processes that a model is sharded over, as one of them sees it; torch.distributed is initialised."""

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """Every rank makes one. `device`: of this rank's shards; `timeout_s`: for the slowest of the others."""
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.size,))
        self.host_mesh = self.mesh if device.type == "cpu" else init_device_mesh("cpu", (self.size,))
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # a checkpoint is written in another thread, whose messages must not get between those of the updates
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's value, in their order, on all of them."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group or self._group)
        return values


class ShardedModel(nn.Module):
    """A model whose layers are sharded one by one, and what is around them together.

    Its forward runs whatever part of the model it is given, with all that is around the layers gathered: until the end
    of the backward, or until `reshard`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns."""
        return compute()

    def base_model(self, **inputs: Any) -> Any:
        """As the model's own, with nothing but the last hidden state."""
        return SimpleNamespace(last_hidden_state=self(lambda: self.model.base_model(**inputs).last_hidden_state))

    def get_output_embeddings(self) -> Any:
        """The head; its weights are whole between `base_model` and the end of the backward."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Of the shards."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the shards, which are the masters."""
        return next(self.model.parameters()).dtype


def shard(model: PreTrainedModel, ranks: Ranks) -> ShardedModel:
    """Take `model` apart, in place: its type is what it computes in, its trained shards are float32 (or float64).

    Gradients are summed over the ranks, in the shards' type. Raises ConfigError where the layers cannot be told.
    """
    compute = model.dtype
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute not in (torch.float32, torch.float64):
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in _layers(model):
        _widen(layer)
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision)
    sharded = ShardedModel(model)
    _widen(sharded)
    fully_shard(sharded, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            # the weights of the loss are exact already; and gloo knows no reduction but sums
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer's layers, by their number in the configuration."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"models of type {model.config.model_type} cannot be sharded: their {count} layers are not found in one list; "
        "use distributed.trainer_ranks=1"
    )


def _widen(module: nn.Module) -> None:
    """Weights that train become float32, unless they are sharded already; AdamW's steps are too small for less."""
    for weight in module.parameters():
        if weight.requires_grad and not isinstance(weight, DTensor) and weight.dtype != torch.float64:
            weight.data = weight.data.float()


class ShardedAdamW(MasterAdamW):
    """AdamW on this rank's shards; what it decides, all ranks decide alike."""

    def __init__(
        self, sharded: ShardedModel, config: OptimConfig, ranks: Ranks, *, lora: Mapping[str, float] | None = None
    ) -> None:
        self._ranks = ranks
        self.shards = {name: p for name, p in sharded.model.named_parameters() if p.requires_grad}
        """What trains, as DTensors."""
        super().__init__(sharded.model, config, lora=lora)

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(_local(weight)) for name, weight in self.shards.items()}

    def zero_grad(self) -> None:
        """As MasterAdamW."""
        super().zero_grad()
        for weight in self.shards.values():
            weight.grad = None

    def update(self, lr: float, *, is_valid: bool = True) -> tuple[float, bool]:
        """As MasterAdamW; the norm is that of the whole gradient."""
        for name, weight in self.shards.items():
            if weight.grad is not None:
                self.master_weights[name].grad = _local(weight.grad)
        return super().update(lr, is_valid=is_valid)

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        own = get_total_norm(gradients)
        norms = self._ranks.gather(float(own))
        return own.new_tensor(sum(norm * norm for norm in norms) ** 0.5)

    def _not_finite(self) -> list[str]:
        return sorted({name for names in self._ranks.gather(super()._not_finite()) for name in names})


class ShardedPolicy(PolicyCore):
    """A rank of a policy. Takes over `loaded.model`, which is whole and the same on every rank."""

    def __init__(self, loaded: Any, ranks: Ranks, **options: Any) -> None:
        """`options`: those of PolicyCore. `loaded.model` may be on any device and has the type to compute in."""
        self._ranks = ranks
        self._compute_dtype: torch.dtype = loaded.model.dtype
        self._snapshot: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None = None
        super().__init__(loaded, **options)
        self._optimizer: ShardedAdamW
        # FSDP settles at the first forward what trains: it must not be one without adapters, for the reference
        self.logprobs([DUMMY_MICROBATCH])

    def _make_optimizer(self, optim: OptimConfig) -> ShardedAdamW:
        names = {weight: name for name, weight in self._model.named_parameters()}
        frozen = {} if self._adapters is None else {name: names[w] for name, w in self._adapters.frozen.items()}
        self._model = shard(self._model, self._ranks)
        weights = dict(self._model.model.named_parameters())
        if self._adapters is not None:
            self._adapters = replace(self._adapters, frozen={name: weights[at] for name, at in frozen.items()})
        return ShardedAdamW(
            self._model, optim, self._ranks, lora=None if self._adapters is None else self._adapters.settings
        )

    def _frozen_reference(self) -> Callable[[Microbatch], Tensor]:
        adapters = self._adapters
        own = None
        if adapters is None:
            own = shard(copy.deepcopy(self._model).requires_grad_(False), self._ranks)

        def score(microbatch: Microbatch) -> Tensor:
            model: Any = self._model if own is None else own
            with nullcontext() if adapters is None else adapters.disabled():
                scores = token_logprobs(model, microbatch, temperature=self._temperature)
            model.reshard()
            return scores

        return score

    def update(self, rank_microbatches: Sequence[RankMicrobatch], *, step: int) -> dict[str, float]:
        """One optimiser update, of which this rank computes `rank_microbatches`; metrics of all, as of `Policy.update`.

        Every rank calls it, with as many portions.
        """
        passes = (
            (self._microbatch(p), p.samples, torch.tensor(p.weights, dtype=torch.float64)) for p in rank_microbatches
        )
        return self._update(passes, step=step)

    def logprobs(self, rank_microbatches: Sequence[RankMicrobatch]) -> list[list[Sequence[float]]]:
        """The log-probabilities of each sample of each portion. Every rank calls it, with as many portions."""
        rows = []
        for rank_microbatch in rank_microbatches:
            microbatch = self._microbatch(rank_microbatch)
            scores = token_logprobs(self._model, microbatch, temperature=self._temperature)
            rows.append(in_callers_order([microbatch], [scores], len(rank_microbatch.samples)))
        self._model.reshard()
        return rows

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, adapters merged, whole and in the type that the model computes in.

        Every rank iterates to the end. Tied weights follow the one they are stored with. Raises NumericsError where a
        weight is not finite.
        """
        self._optimizer.require_finite()
        if self._adapters is None:
            for name, weight in self._optimizer.shards.items():
                full = _full_tensor(weight.detach().to(self._compute_dtype))
                yield name, full
                yield from ((other, full) for other, stored in self._optimizer.tied.items() if stored == name)
        else:
            factors = {name: _full_tensor(weight) for name, weight in self._optimizer.shards.items()}
            merged = replace(self._adapters.merged(factors), frozen=_FullWeights(self._adapters.frozen))
            for name, tensor in merged.named_tensors():
                yield name, tensor.to(self._compute_dtype)

    def snapshot(self) -> None:
        """Copy the state into main memory, over the copy before. Raises NumericsError as `full_weights`."""
        self._optimizer.require_finite()
        self._snapshot = (self._copy.take_tensors(), counters_of(self._optimizer))

    def write(self, directory: Path) -> None:
        """Write what `snapshot` has copied, in any thread; every rank does. Raises OSError if it cannot be written."""
        assert self._snapshot is not None
        tensors, counters = self._snapshot
        if not all(self._ranks.gather(directory.is_dir(), self._ranks.checkpoint_group)):
            raise CheckpointError(
                f"{directory} is not there on every trainer rank: on several machines the run directory must be on a "
                "file system that all of them share"
            )
        for kind, parts in tensors.items():
            dtensors = {name: self._to_dtensor(name, part) for name, part in parts.items()}
            write_shards(dtensors, directory / kind, self._ranks.checkpoint_group)
        if self._ranks.rank == 0:
            write_counters(directory, counters)

    def load(self, directory: Path) -> None:
        """Continue from what any number of ranks, or a `Policy`, has saved: bit for bit. Raises CheckpointError."""
        load_optimizer(self._optimizer, directory, read=self._read)

    def _sum_metrics(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        return sum_metrics(self._ranks.gather(dict(super()._sum_metrics(parts))))

    @contextmanager
    def _head(self) -> Iterator[Any]:
        """The gathered head.

        Where it is of low precision the chunks' gradients are added up in float32 beside it, and rounded once.
        """
        head = self._model.get_output_embeddings()
        if not head.weight.requires_grad or head.weight.dtype in (torch.float32, torch.float64):
            yield head
            return
        names = [name for name, _ in head.named_parameters()]
        gathered: dict[str, nn.Parameter] = {name: getattr(head, name) for name in names}
        copies = {name: weight.detach().requires_grad_() for name, weight in gathered.items()}
        sums: dict[str, Tensor] = {}
        for name, weight in copies.items():
            weight.register_post_accumulate_grad_hook(partial(_add_up, sums, name))
        yield SimpleNamespace(**copies)
        for name, weight in gathered.items():
            weight.grad = sums[name].to(weight.dtype)

    def _microbatch(self, rank_microbatch: RankMicrobatch) -> Microbatch:
        # room for all of it, and for every prompt twice
        room = sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in rank_microbatch.samples)
        (microbatch,) = pack(rank_microbatch.samples, max_tokens=room, device=self._ranks.device)
        return microbatch

    def _to_dtensor(self, name: str, part: Tensor) -> DTensor:
        """A trained weight's shape and layout, for this rank's part of something of its kind in main memory."""
        weight: Any = self._optimizer.shards[name]
        return DTensor.from_local(
            part,
            self._ranks.host_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )

    def _read(self, directory: Path, kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        path = stored_at(directory, kind)
        parts = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in like.items()}
        dtensors = {name: self._to_dtensor(name, part) for name, part in parts.items()}
        with as_checkpoint_error(path):
            require_same(path, stored_like(path), dtensors)
            read_shards(path, dtensors, self._ranks.checkpoint_group)
        return parts


class _FullWeights(Mapping[str, Tensor]):
    """Sharded weights, each gathered when it is looked at."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> Tensor:
        return _full_tensor(self._shards[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


@torch.no_grad()
def _full_tensor(weight: Any) -> Tensor:
    return weight.detach().full_tensor()


@torch.no_grad()
def _local(weight: Any) -> Tensor:
    """This rank's part, in the same memory."""
    return weight.detach().to_local()


def _add_up(sums: dict[str, Tensor], name: str, weight: Tensor) -> None:
    assert weight.grad is not None
    wide = weight.grad.float()
    sums[name] = sums[name].add_(wide) if name in sums else wide
    weight.grad = None
