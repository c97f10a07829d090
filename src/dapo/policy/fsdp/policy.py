"""One rank's part of a policy that is sharded over ranks (FSDP2).

Every rank holds a shard of each weight and calls the same methods in the same order; most of them
are collective. A layer's weights are gathered while it computes. Embedding, last norm and head stay
gathered from the forward to the end of the backward, so that the head can be applied chunk by
chunk.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dapo.config import Config, OptimConfig
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.memory import explain_out_of_memory
from dapo.policy.checkpoint import (
    State,
    as_checkpoint_error,
    require_same,
    stored_at,
    write_counters,
)
from dapo.policy.custom_loss import load_loss
from dapo.policy.fsdp.checkpoint import read_shards, stored_like, write_shards
from dapo.policy.fsdp.ranks import Ranks
from dapo.policy.hf_io import NamedWeights, StoredWeights, layout_of, rows_of_rank, tied_names
from dapo.policy.model import LESS_ON_A_GPU, LoadedModel, load_teacher
from dapo.policy.objective import add_sums
from dapo.policy.optim import MasterAdamW
from dapo.policy.packed_forward import check_packed_forward, prepare_packed_forward
from dapo.policy.packing import (
    DUMMY_MICROBATCH,
    Microbatch,
    RankMicrobatch,
    pack_microbatch,
    rows_of,
)
from dapo.policy.policy import SMALLER_MICROBATCHES, PolicyCore


class ShardedModel(nn.Module):
    """A model whose layers are sharded one by one, and the weights around them together.

    Its forward runs the given computation with the weights around the layers gathered; they stay
    gathered to the end of the backward, or until `reshard`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    def base_model(self, **inputs: Any) -> Any:
        """Run the model's own forward; return only the last hidden state."""

        def compute() -> Tensor:
            return self.model.base_model(**inputs).last_hidden_state

        return SimpleNamespace(last_hidden_state=self(compute))

    def get_output_embeddings(self) -> Any:
        """Return the head, gathered from `base_model` to the end of the backward."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype


def shard(model: PreTrainedModel, ranks: Ranks) -> ShardedModel:
    """Shard `model` in place; its trained shards become float32 (or float64).

    The model computes in its current type.

    A layer moves to the device before its weights are widened. Gradients are summed over the ranks,
    in the shards' type. Raises ConfigError if the layers cannot be found.
    """
    compute = model.dtype
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute not in (torch.float32, torch.float64):
        precision = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for layer in _layers(model):
        _widen(layer, ranks.device)
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision)
    sharded = ShardedModel(model)
    _widen(sharded, ranks.device)
    fully_shard(sharded, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            # the loss weights already count the whole minibatch, and gloo can only reduce to sums
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of the model's decoder layers, recognised by its length."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"models of type {model.config.model_type} cannot be sharded: no list of their {count}"
        " layers was found; use distributed.trainer_ranks=1"
    )


def _widen(module: nn.Module, device: torch.device) -> None:
    """Convert trained weights before sharding to float32 or more: AdamW's steps vanish in less."""
    for weight in module.parameters():
        if isinstance(weight, DTensor):  # of a layer that was sharded before
            continue
        if weight.requires_grad and weight.dtype != torch.float64:
            # a weight on the meta device has nothing to move
            if not weight.is_meta:
                weight.data = weight.data.to(device)
            weight.data = weight.data.float()


@torch.no_grad()
def read_shards_of(
    sharded: ShardedModel, read: Callable[[str, slice], Tensor], ranks: Ranks
) -> None:
    """Allocate a sharded model from the meta device, and fill in this rank's rows of every weight.

    Its buffers are on the CPU. `read` returns rows of a weight by its name in the model, in the
    type that the model computes in.
    """
    model = sharded.model
    tied = tied_names(model)
    buffers = dict(model.named_buffers())
    sharded.to_empty(device=ranks.device)
    for tied_name, source_name in tied.items():  # to_empty has untied them
        module, _, name = tied_name.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(source_name))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, weight in model.named_parameters():
        rows = rows_of_rank(weight.shape[0], ranks.rank, ranks.size)
        if rows.start < rows.stop:
            _local(weight).copy_(read(name, rows).to(ranks.device))  # widened on the device


class ShardedAdamW(MasterAdamW):
    """AdamW on this rank's shards; all ranks decide alike."""

    def __init__(
        self,
        sharded: ShardedModel,
        config: OptimConfig,
        ranks: Ranks,
        *,
        lora: Mapping[str, float] | None = None,
    ) -> None:
        """Train the shards of this rank.

        Args:
            sharded: the sharded model.
            config: the section `optim`.
            ranks: the ranks that hold the other shards.
            lora: rank and alpha of adapters; None: all weights are trained.
        """
        self._ranks = ranks
        self.shards: dict[str, Any] = {}
        """The trained weights as DTensors."""
        for name, weight in sharded.model.named_parameters():
            if weight.requires_grad:
                self.shards[name] = weight
        super().__init__(sharded.model, config, lora=lora)

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(_local(weight)) for name, weight in self.shards.items()}

    def zero_grad(self) -> None:
        super().zero_grad()
        for weight in self.shards.values():
            weight.grad = None

    def measure(self) -> dict[str, Tensor]:
        for name, weight in self.shards.items():
            if weight.grad is not None:
                self.master_weights[name].grad = _local(weight.grad)
        return super().measure()

    def _names_not_finite(self) -> list[str]:
        # one rank's shard suffices: all ranks must raise together
        names: set[str] = set()
        for rank_names in self._ranks.gather(super()._names_not_finite()):
            names.update(rank_names)
        return sorted(names)


def _rows_of(source: StoredWeights | None, dtype: torch.dtype, name: str, rows: slice) -> Tensor:
    assert source is not None, "a model on the meta device names its files"
    return source.rows(name, rows).to(dtype)


class ShardedPolicy(PolicyCore):
    """One rank's part of a policy."""

    @explain_out_of_memory(
        torch.OutOfMemoryError, "preparing a trainer rank", LESS_ON_A_GPU, then="start again"
    )
    def __init__(self, config: Config, loaded: LoadedModel, ranks: Ranks) -> None:
        """Take ownership of `loaded.model`, which is the same on every rank, on any device.

        For a model on the meta device each rank reads its own rows of `loaded.stored`. All ranks
        check together that the sharded model computes the same on packed sequences, and raise the
        same ConfigError.
        """
        self._ranks = ranks
        self._stored = loaded.stored
        self._names: dict[str, str] = {}
        self._snapshot: State | None = None
        # each rank is a process of its own
        super().__init__(config, loaded, load_loss(config.loss.function))
        self._optimizer: ShardedAdamW
        check_packed_forward(self._model.model, self._plain_attention, self._model)
        # FSDP decides at the first forward what trains: that must not be the reference's forward,
        # without adapters
        self.logprobs([DUMMY_MICROBATCH])

    def _use_packed_forward(self) -> None:
        self._plain_attention = prepare_packed_forward(self._model)

    def _make_optimizer(self) -> ShardedAdamW:
        adapters = self._adapters
        if adapters is None:
            self._model = self._distribute(self._model, self._read_rows)
            return ShardedAdamW(self._model, self._config.optim, self._ranks)
        # peft renames the model's own weights, but their files keep the names
        names = {weight: name for name, weight in self._model.named_parameters()}
        for file_name, weight in adapters.frozen.items():
            self._names[names[weight]] = file_name
        self._model = self._distribute(self._model, self._read_rows)
        # sharding has replaced the parameters
        weights = dict(self._model.model.named_parameters())
        frozen = {file_name: weights[name] for name, file_name in self._names.items()}
        self._adapters = replace(adapters, frozen=frozen)
        lora = adapters.settings
        return ShardedAdamW(self._model, self._config.optim, self._ranks, lora=lora)

    def _make_reference(self) -> ShardedModel:
        if self._config.loss.teacher is None:
            frozen = copy.deepcopy(self._model).requires_grad_(False)
            return self._distribute(frozen, self._read_rows)
        loaded = load_teacher(self._config, device=None, dtype=self._compute_dtype)
        teacher: Any = loaded.model.requires_grad_(False)
        plain = prepare_packed_forward(teacher)
        read_rows = partial(_rows_of, loaded.stored, self._compute_dtype)
        sharded = self._distribute(teacher, read_rows)
        check_packed_forward(sharded.model, plain, sharded)
        return sharded

    def _distribute(self, model: Any, read_rows: Callable[[str, slice], Tensor]) -> ShardedModel:
        """Shard a model; one without weights gets this rank's rows from their files."""
        sharded = shard(model, self._ranks)
        if any(weight.is_meta for weight in sharded.parameters()):
            read_shards_of(sharded, read_rows, self._ranks)
        return sharded

    def _local_weights(self, model: Any) -> dict[str, Tensor]:
        return {name: _local(weight) for name, weight in model.model.named_parameters()}

    def _read_rows(self, name: str, rows: slice) -> Tensor:
        """Return rows of a weight of the initial model, by its name in the model with adapters."""
        file_name = self._names.get(name, name)
        if self._adapters is not None and file_name not in self._adapters.frozen:
            return self._adapters.initial_factor(name)[rows].to(self._compute_dtype)
        return _rows_of(self._stored, self._compute_dtype, file_name, rows)

    def _score(self, microbatch: Microbatch, model: Any) -> Tensor:
        scores = super()._score(microbatch, model)
        # without a backward nothing else frees the gathered embedding and head
        model.reshard()
        return scores

    @contextmanager
    def _reference_states(self, microbatch: Microbatch) -> Iterator[tuple[Tensor, Any]]:
        with super()._reference_states(microbatch) as states:
            yield states  # its head stays gathered
        if self._reference is not None:
            self._reference.model.reshard()

    @explain_out_of_memory(
        torch.OutOfMemoryError, "an update of the policy on a trainer rank", SMALLER_MICROBATCHES
    )
    def update(self, rank_microbatches: Sequence[RankMicrobatch], *, step: int) -> dict[str, float]:
        """Update by this rank's `rank_microbatches`; return the metrics over all ranks.

        Every rank calls it, with the same number of rank microbatches. See `Policy.update`.
        """
        self._begin_step(step)
        self._optimizer.zero_grad()
        custom = self._custom_loss
        sums = [self._backward(rank_microbatch, custom) for rank_microbatch in rank_microbatches]
        rank_sums = add_sums([*sums, self._optimizer.measure()])
        metrics = self._apply_gradient(add_sums(self._ranks.gather(rank_sums)), step=step)
        self._freed_memory.trim_if_grown()
        return metrics

    @explain_out_of_memory(
        torch.OutOfMemoryError, "log-probabilities on a trainer rank", SMALLER_MICROBATCHES
    )
    def logprobs(self, rank_microbatches: Sequence[RankMicrobatch]) -> list[list[Sequence[float]]]:
        """Return the log-probabilities of each sample of each rank microbatch.

        Every rank calls it, with equally many.
        """
        return self._score_all(
            rank_microbatches, lambda microbatch: self._score(microbatch, self._model)
        )

    @explain_out_of_memory(
        torch.OutOfMemoryError,
        "the divergence to the reference on a trainer rank",
        SMALLER_MICROBATCHES,
    )
    def token_kl(
        self, rank_microbatches: Sequence[RankMicrobatch], *, step: int
    ) -> list[list[Sequence[float]]]:
        """Return `Policy.token_kl` of each sample of each rank microbatch.

        Every rank calls it, with equally many.
        """
        self._begin_step(step)
        return self._score_all(rank_microbatches, self._token_kl)

    def _score_all(
        self,
        rank_microbatches: Sequence[RankMicrobatch],
        score: Callable[[Microbatch], Tensor],
    ) -> list[list[Sequence[float]]]:
        """Return the scores of each sample's response tokens, by rank microbatch."""
        device = self._ranks.device
        microbatches = [pack_microbatch(content, device) for content in rank_microbatches]
        # all before the first is read, which waits for the device
        scores = [score(microbatch) for microbatch in microbatches]
        pairs = zip(scores, microbatches, strict=True)
        return [rows_of(values, microbatch) for values, microbatch in pairs]

    def weights(self) -> NamedWeights:
        """Return every weight by its name: adapters merged, unsharded, in the computing type.

        Every rank calls it and reads all weights; each is gathered when it is read. Raises
        NumericsError if a weight is not finite.
        """
        self._optimizer.require_finite()
        shards = self._optimizer.shards
        dtype = self._compute_dtype
        if self._adapters is not None:
            return self._adapters.merged(shards, dtype, full=_full_tensor)
        layout = layout_of(shards, self._optimizer.tied, dtype)

        def read() -> Iterator[tuple[str, Tensor]]:
            for name, weight in shards.items():
                # rounded before it is gathered: ranks send fewer bytes
                yield name, _full_tensor(weight.detach().to(dtype))

        return NamedWeights(read, layout)

    def snapshot(self) -> None:
        """Copy the state into main memory, over the previous copy.

        Raises NumericsError if a weight is not finite.
        """
        self._optimizer.require_finite()
        self._snapshot = self._copy.take(self._state())

    def write(self, directory: Path) -> None:
        """Write the last snapshot, in any thread.

        Every rank calls it. Raises OSError if writing fails.
        """
        assert self._snapshot is not None
        group = self._ranks.checkpoint_group
        if not all(self._ranks.gather(directory.is_dir(), group)):
            raise CheckpointError(
                f"some trainer ranks cannot see {directory}: on several machines the run directory"
                " must be on a file system that all of them share"
            )
        for kind, shards in self._snapshot.tensors.items():
            write_shards(self._to_dtensors(shards), directory / kind, group)
        # equal on all ranks, so one writes them
        if self._ranks.rank == 0:
            write_counters(directory, self._snapshot.counters)

    def load(self, directory: Path) -> None:
        """Restore a state saved by any number of ranks or by a `Policy`, bit for bit.

        Raises CheckpointError.
        """
        self._load(directory, read=self._read)

    @contextmanager
    def _head(self) -> Iterator[Any]:
        """Gather the head; narrow chunks' gradients add up in float32 and are rounded once."""
        head = self._model.get_output_embeddings()
        if not head.weight.requires_grad or head.weight.dtype in (torch.float32, torch.float64):
            yield head
            return
        names = [name for name, _ in head.named_parameters()]
        gathered: dict[str, nn.Parameter] = {name: getattr(head, name) for name in names}
        copies = {}
        sums: dict[str, Tensor] = {}
        for name, weight in gathered.items():
            # a leaf of its own, whose hook takes each chunk's gradient before it is rounded into a
            # sum
            leaf = weight.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_add_up, sums, name))
            copies[name] = leaf
        yield SimpleNamespace(**copies)
        for name, weight in gathered.items():
            weight.grad = sums[name].to(weight.dtype)

    def _peak_gpu_memory(self) -> dict[str, float]:
        # of the rank with most, which is the first to run out
        metrics = super()._peak_gpu_memory()
        return {name: max(self._ranks.gather(value)) for name, value in metrics.items()}

    def _to_dtensors(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards in main memory as DTensors, laid out like the weights."""
        mesh = self._ranks.host_mesh
        weights = self._optimizer.shards
        dtensors: dict[str, Tensor] = {}
        for name, tensor in shards.items():
            weight = weights[name]
            layout = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
            dtensors[name] = DTensor.from_local(tensor, mesh, weight.placements, **layout)
        return dtensors

    def _read(self, directory: Path, kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of a kind of stored tensors, of the shapes of `like`."""
        path = stored_at(directory, kind)
        shards = {}
        for name, tensor in like.items():
            shards[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        dtensors = self._to_dtensors(shards)
        with as_checkpoint_error(path):
            require_same(path, stored_like(path), dtensors)
            read_shards(path, dtensors, self._ranks.checkpoint_group)
        return shards


@torch.no_grad()
def _full_tensor(weight: Any) -> Tensor:
    return weight.detach().full_tensor()


@torch.no_grad()
def _local(weight: Any) -> Tensor:
    return weight.detach().to_local()


def _add_up(sums: dict[str, Tensor], name: str, weight: Tensor) -> None:
    """Add a chunk's gradient to the sum in float32, and free it."""
    assert weight.grad is not None
    gradient = weight.grad.float()
    if name in sums:
        sums[name].add_(gradient)
    else:
        sums[name] = gradient
    weight.grad = None
