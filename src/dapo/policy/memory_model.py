"""Computes the memory of a training process, which resolves `auto` and which `dapo check` prints.

Nothing is allocated or measured. `tests/policy/test_memory_model.py` compares the activations with
the tensors that autograd saves in a forward, for every family of models.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from dapo.config import Config, GpuShares
from dapo.config.data_spec import kinds
from dapo.config.lengths import lower_lengths
from dapo.core.errors import ConfigError
from dapo.core.memory import GIB
from dapo.policy.gpu_layers import liger_functions
from dapo.policy.logprobs import chunk_bytes, chunk_tokens
from dapo.policy.model_dimensions import ModelDimensions, find_dimensions

RESERVE = 0.1
"""The fraction of a device's memory that `auto` leaves free for the allocator's fragments, NCCL's
buffers, kernels' workspaces, and everything that this model does not count.
"""
USEFUL_TOKENS = 8192
"""Below this microbatch size, which leaves a GPU idle between kernels, `auto` recomputes."""
MAX_TOKENS = 32768  # the largest microbatch of `auto`: more tokens make no GPU faster
ROUNDED_TO = 1024
SLEEPING_BYTES = 4 * GIB
"""The bytes that a process always keeps on a GPU: CUDA's context, kernels, captured graphs."""
TRANSIENT = (
    "gradients",
    "all-gathered layers, embedding and head",
    "unsharded gradients, before the reduce-scatter",
)
"""The parts of a trainer's state that exist during an update only."""
CPU_TOKENS = 16384  # the value of `auto` on a CPU, without recomputation


@dataclass(frozen=True)
class ResponseLengths:
    """Tokens of a prompt and of a response, on average."""

    prompt: float
    response: float

    @classmethod
    def expected(cls, config: Config) -> "ResponseLengths":
        """Assumed lengths, before any are measured."""
        limit = config.rollout.max_response_tokens
        prompt = 64 if kinds(config.data.train_source) <= {"builtin", "gym"} else 256
        # few responses reach a long limit; a short limit is close to the task's length
        response = max(1, round((0.3 if limit > 1024 else 0.7) * limit))
        return cls(min(prompt, config.data.max_prompt_tokens), response)


@dataclass(frozen=True)
class TrainerMemory:
    """The memory of a training process, for a configuration with a resolved `model.dtype`."""

    config: Config
    dimensions: ModelDimensions
    lengths: ResponseLengths
    device_type: str = "cuda"
    # whether a gate is one function (`policy.gpu_layers`); not known of another machine's GPU
    has_fused_gate: bool = field(default_factory=lambda: liger_functions() is not None)

    @property
    def ranks(self) -> int:
        """Return the number of processes that the policy is sharded over."""
        return self.config.distributed.trainer_ranks

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights and activations."""
        return getattr(torch, self.config.model.dtype)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a number in `dtype`."""
        return self.dtype.itemsize

    @property
    def master_bytes(self) -> int:
        """Return the bytes of a master weight, of a gradient, and of each moment of AdamW."""
        return max(4, self.element_bytes)

    @property
    def trainable_parameters(self) -> int:
        """Return the number of trained parameters: the model's, or its adapters'."""
        lora = self.config.model.lora
        if lora is None:
            return self.dimensions.parameters
        return self.dimensions.lora_parameters(lora.rank)

    @property
    def critic_parameters(self) -> int:
        """Return the number of parameters of the critic, whose head has one output, or 0."""
        if not self.config.has_critic:
            return 0
        dimensions = self.dimensions
        head = 0 if dimensions.tied else dimensions.vocabulary * dimensions.hidden
        return dimensions.parameters - head + dimensions.hidden + 1

    @property
    def longest_sequence(self) -> int:
        """Return the tokens of the longest sequence, which a microbatch must hold uncut."""
        limits = self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens
        limits += self.config.max_observed_tokens
        return min(limits, self.dimensions.max_positions or limits)

    def breakdown(self, tokens: int, *, recompute: bool) -> dict[str, float]:
        """Return the bytes by part at the peak of an update in microbatches of `tokens`."""
        logit_tokens = min(tokens, chunk_tokens(self.dimensions.vocabulary, self.device_type))
        position_bytes = chunk_bytes(self.dimensions.vocabulary, self.device_type, self.dtype)
        logits = logit_tokens * position_bytes
        head_gradient = self.element_bytes * self.dimensions.vocabulary * self.dimensions.hidden
        return self.state() | {
            "activations": tokens * self.activation_bytes(recompute=recompute),
            "gradients of activations": tokens * self.gradient_bytes(),
            "logits (one chunk)": logits + head_gradient,
        }

    def state(self) -> dict[str, float]:
        """Return the bytes by part that persist: weights, gradients, moments."""
        dimensions = self.dimensions
        n = self.ranks
        e = self.element_bytes
        master = self.master_bytes
        trained = self.trainable_parameters
        lora = self.config.model.lora
        breakdown: dict[str, float] = {}
        if lora is not None:
            breakdown["frozen weights"] = e * dimensions.parameters / n
        if n == 1 and e < master:
            breakdown["compute weights"] = e * trained
        breakdown["master weights"] = master * trained / n
        breakdown["gradients"] = master * trained / n
        breakdown["AdamW's moments"] = 2 * master * trained / n
        teacher = self._teacher_parameters()
        if self.config.has_kl and self.config.loss.server is None and (lora is None or teacher):
            breakdown["reference for the KL term"] = e * (teacher or dimensions.parameters) / n
        if self.config.has_critic:
            # master weights, gradients and two moments, and rounded weights if those are copies
            copies = 4 * master
            if e < master:
                copies += e
            breakdown["the critic: weights, gradients, moments"] = copies * self.critic_parameters
        if n > 1:
            layer = dimensions.layer_parameters
            ends = dimensions.embedding_parameters
            # two layers, because the next one is gathered ahead; embedding and head stay to the end
            # of the backward
            breakdown["all-gathered layers, embedding and head"] = e * (2 * layer + ends)
            unsharded = max(layer, ends)
            breakdown["unsharded gradients, before the reduce-scatter"] = (e + master) * unsharded
        return breakdown

    def _teacher_parameters(self) -> int:
        """Return the number of parameters of `loss.reference.model`, or 0.

        If its sizes are unknown, the number is the policy's.
        """
        name = self.config.loss.teacher
        if name is None:
            return 0
        dimensions = find_dimensions(self.config.model.model_copy(update={"name": name}))
        return (dimensions or self.dimensions).parameters

    def kept_bytes(self) -> float:
        """Return the bytes that a trainer keeps on its GPU while engines sample."""
        persistent = [size for name, size in self.state().items() if name not in TRANSIENT]
        return SLEEPING_BYTES + sum(persistent)

    def paged_engine_bytes(self) -> float | None:
        """Return an engine's bytes per GPU if its paged cache has a given size, otherwise None."""
        rollout = self.config.rollout
        cache = getattr(rollout.engine_options, "cache_gib", None)
        if cache is None:
            return None
        weights = self.element_bytes * self.dimensions.parameters / self.config.gpus_per_engine
        return weights + cache * GIB + SLEEPING_BYTES

    def activation_bytes(self, *, recompute: bool) -> float:
        """Return the bytes per token that autograd keeps from the forward to the backward."""
        dimensions = self.dimensions
        e = self.element_bytes
        layer = self._layer_bytes()
        # cosines and sines of the positions, shared by all layers; and the last norm without its
        # output
        angles = 2 * e * dimensions.head_dim
        last_norm = self._norm_bytes(dimensions.hidden) - e * dimensions.hidden
        around = angles + last_norm
        if not recompute:
            return around + dimensions.layers * layer
        # each layer's input, and one layer again
        return around + dimensions.layers * e * dimensions.hidden + layer

    def gradient_bytes(self) -> float:
        """Return the bytes per token of the gradients in memory at a time.

        These are the gradients of three products of a feed-forward layer, of its input, of the
        residual and of the last hidden states, and the last hidden states themselves.
        """
        return self.element_bytes * (3 * self.dimensions.intermediate + 4 * self.dimensions.hidden)

    def _layer_bytes(self) -> float:
        """Return the bytes per token that a layer of transformers keeps with packed attention."""
        dimensions = self.dimensions
        e = self.element_bytes
        queries = dimensions.heads * dimensions.head_dim
        keys = dimensions.kv_heads * dimensions.head_dim
        norms = 2 * self._norm_bytes(dimensions.hidden)
        if dimensions.gemma_norms:  # their outputs are added to the residual and not kept
            norms += 2 * (self._norm_bytes(dimensions.hidden) - e * dimensions.hidden)
        if dimensions.qk_norm:  # their outputs are rotated and not kept
            norms += self._norm_bytes(queries + keys) - e * (queries + keys)
        products = self._num_products() * e * dimensions.intermediate
        return norms + self._attention_bytes(queries, keys) + products

    def _num_products(self) -> int:
        """Return how many products of a feed-forward layer are kept.

        They are the gate, activated, the other one, and both together. A fused gate keeps the first
        and the third, and for an adapter the last, too.
        """
        is_fused = self.has_fused_gate and self.device_type == "cuda"
        if not is_fused or self.dimensions.gemma_norms:
            return 4
        return 2 if self.config.model.lora is None else 3

    def _attention_bytes(self, queries: int, keys: int) -> float:
        """Return the bytes per token that attention keeps, with a float32 number per head."""
        e = self.element_bytes
        log_sums = 4 * self.dimensions.heads
        # queries, outputs, keys and values, each once (varlen_attention.py)
        if self.device_type == "cuda" and e == 2:
            return e * (2 * queries + 2 * keys) + log_sums
        # outputs in the order of the padded batches and of the stream; a prompt's keys once per
        # response
        return e * (3 * queries + 2 * keys * self._repeated_keys()) + log_sums

    def _norm_bytes(self, width: int) -> float:
        """Return the bytes per token that an RMSNorm keeps: input, normed values and output.

        The input is widened to float32; Gemma also multiplies by the weights in float32. A GPU's
        kernel keeps the input and the output (`cpu_kernels.fuse_layers`), but Gemma has none.
        """
        e = self.element_bytes
        wide = self.master_bytes
        if self.dimensions.gemma_norms:
            return width * (2 * wide + e)
        if self.device_type == "cuda":
            return width * 2 * e
        return width * (wide + 2 * e)

    def _repeated_keys(self) -> float:
        """Return the keys per token: prompts are packed once, but responses gather their keys."""
        size = self.config.rollout.group_size
        prompt = self.lengths.prompt
        response = self.lengths.response
        return size * (prompt + response) / (prompt + size * response)


def trainer_bytes(shares: GpuShares, capacity: float, memory: TrainerMemory | None) -> float:
    """Return the bytes of a GPU that each trainer rank may fill; `memory` None: sizes unknown."""
    if shares.alternates:
        return max(0.0, capacity - shares.engines * SLEEPING_BYTES) / shares.trainers
    if shares.is_shared and memory is not None:
        held = memory.paged_engine_bytes()
        if held is not None:
            return max(0.0, capacity - shares.engines * held) / shares.trainers
    return capacity / shares.processes


@dataclass(frozen=True)
class FreeMemory:
    """The GPU memory that is available to a training process."""

    available: float
    """The bytes before the reserve: the free memory, or the process's share of a device."""
    origin: str  # the origin of the number, for messages


def resolve_microbatches(
    config: Config,
    dimensions: ModelDimensions | None,
    gpu: FreeMemory | None,
    lengths: ResponseLengths | None = None,
) -> tuple[Config, str | None]:
    """Resolve `train.microbatch_tokens` and `train.recompute`; return also the reason, a line.

    Args:
        config: the configuration, with `model.dtype` resolved.
        dimensions: the sizes of the model; None if they are unknown: CPU_TOKENS with recomputation.
        gpu: the memory to fill; None: the policy trains on a CPU, where `auto` has fixed values.
        lengths: mean lengths; None: the expected ones.

    There is no recomputation if a useful microbatch (USEFUL_TOKENS, and the longest sequence) fits;
    then as many tokens as fit. Raises ConfigError if nothing fits.
    """
    tokens = config.train.microbatch_tokens
    recompute = config.train.recompute
    if tokens is not None and recompute is not None:
        return config, None
    if gpu is None or dimensions is None:
        tokens = tokens or CPU_TOKENS
        if recompute is None:
            # a GPU of unknown room: the choice that needs least
            recompute = gpu is not None
        reason = None
        if gpu is not None:
            reason = f"{_chosen(tokens, recompute)}: the sizes of {config.model.name} are unknown"
    else:
        memory = TrainerMemory(config, dimensions, lengths or ResponseLengths.expected(config))
        tokens, recompute = _largest_microbatch(memory, gpu)
        reason = _reason(memory, gpu, tokens, recompute)
    return config.changed("train", microbatch_tokens=tokens, recompute=recompute), reason


def _largest_microbatch(memory: TrainerMemory, gpu: FreeMemory) -> tuple[int, bool]:
    """Return the tokens of a microbatch and whether to recompute; one of them may be set."""
    configured = memory.config.train.microbatch_tokens
    minimum = max(configured or 0, memory.longest_sequence)
    choices = [False, True]
    if memory.config.train.recompute is not None:
        choices = [memory.config.train.recompute]
    for recompute in choices:
        fitting = fitting_tokens(memory, gpu, recompute=recompute)
        least = minimum
        # smaller microbatches cost more than recomputing larger ones
        if recompute != choices[-1] and not configured:
            least = max(minimum, USEFUL_TOKENS)
        if fitting >= least:
            rounded = min(MAX_TOKENS, fitting // ROUNDED_TO * ROUNDED_TO)
            return configured or max(rounded, memory.longest_sequence), recompute
    raise ConfigError(_too_little(memory, gpu, minimum, choices[-1]))


def fitting_tokens(memory: TrainerMemory, gpu: FreeMemory, *, recompute: bool) -> int:
    """Return the tokens of the largest microbatch that fits, at least 0."""
    available = (1 - RESERVE) * gpu.available
    low = 0
    high = 10**8
    while low < high:  # bisection: the head's chunk stops growing, so the sum is not linear
        middle = (low + high + 1) // 2
        parts = _update_bytes(memory, middle, recompute=recompute)
        if sum(parts.values()) <= available:
            low = middle
        else:
            high = middle - 1
    return low


def _update_bytes(memory: TrainerMemory, tokens: int, *, recompute: bool) -> dict[str, float]:
    """Return the bytes by part during an update, with an engine's weights but an empty cache."""
    parts = memory.breakdown(tokens, recompute=recompute)
    if not memory.config.is_multiprocess:
        parts["the engine's weights"] = memory.element_bytes * memory.dimensions.parameters
    return parts


def _chosen(tokens: int, recompute: bool) -> str:
    return f"auto: train.microbatch_tokens={tokens}, train.recompute={str(recompute).lower()}"


def _reason(memory: TrainerMemory, gpu: FreeMemory, tokens: int, recompute: bool) -> str:
    total = sum(_update_bytes(memory, tokens, recompute=recompute).values())
    per_token = memory.activation_bytes(recompute=recompute) / 1e6
    return (
        f"{_chosen(tokens, recompute)}: an update takes {total / GIB:.1f} GiB ({per_token:.2f} MB"
        f" of activations per token) of {_kept(gpu)}"
    )


def _too_little(memory: TrainerMemory, gpu: FreeMemory, tokens: int, recompute: bool) -> str:
    parts = _update_bytes(memory, tokens, recompute=recompute)
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"an update with train.microbatch_tokens={tokens} and"
        f" train.recompute={str(recompute).lower()} takes {sum(parts.values()) / GIB:.1f} GiB (the"
        f" largest part is {largest}, {parts[largest] / GIB:.1f} GiB), but only {_kept(gpu)} are"
        f" available: {', '.join(_ways_out(memory, recompute))}; or set both"
        " train.microbatch_tokens and train.recompute to skip this check"
    )


def _kept(gpu: FreeMemory) -> str:
    return f"{gpu.available / GIB:.1f} GiB ({gpu.origin}), less {RESERVE:.0%} in reserve"


def _ways_out(memory: TrainerMemory, recompute: bool) -> Iterator[str]:
    if not recompute:
        yield "set train.recompute=true"
    config = memory.config
    # a critic trains in one process, and all of its weights
    if config.model.lora is None and not config.has_critic:
        yield (
            "raise distributed.trainer_ranks where there are more GPUs, train adapters (model.lora)"
        )
    limits = (config.rollout.max_response_tokens, config.data.max_prompt_tokens)
    yield lower_lengths(config, *limits)
    if memory.config.train.microbatch_tokens is not None:
        yield "lower train.microbatch_tokens"
