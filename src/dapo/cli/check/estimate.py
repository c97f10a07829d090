"""What each process of a run holds in memory, and how long a step takes: estimated from stated numbers.

Pure arithmetic on a configuration, a model's dimensions and a hardware profile. Nothing is loaded or started.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, Self

from dapo.cli.check.hardware_profile import HardwareProfile
from dapo.cli.check.speed import (
    GB,
    Decoding,
    GenerationTime,
    UpdateKind,
    UpdateTime,
    decode_kind,
    generation_time,
    response_lengths,
)
from dapo.config import Config
from dapo.engines.native.device_memory import CACHE_SHARE, SAMPLING_FLOATS
from dapo.engines.vllm.start import CPU_CACHE_GIB, GPU_MEMORY, MAX_SEQUENCES
from dapo.policy.logprobs import chunk_tokens
from dapo.policy.memory_model import GIB, ResponseLengths, TrainerMemory
from dapo.policy.model_dimensions import ModelDimensions

CUDA_PROCESS_BYTES = 3 * GIB  # main memory of a process that computes on a GPU, without any weights
UPDATE_PARTS = ("activations", "gradients of activations", "logits (one chunk)")


@dataclass(frozen=True)
class LoadEstimate:
    """What it takes the trainer ranks to load the model, each of them its own rows."""

    read_bytes: float
    """Bytes that one rank reads."""
    host_bytes: float
    """Bytes of main memory for all ranks of a node; the page cache, which gives way, is not counted."""
    seconds: float


@dataclass(frozen=True)
class ResourceEstimate:
    """A run's processes and sizes, from which everything else follows; `model.dtype` is settled."""

    config: Config
    dimensions: ModelDimensions
    profile: HardwareProfile

    def changed(self, section: str, **values: Any) -> Self:
        """The estimate for a configuration that differs in some options of a section."""
        return replace(self, config=self.config.changed(section, **values))

    @property
    def memory(self) -> TrainerMemory:
        """The model of memory for a process that trains."""
        lengths = ResponseLengths(self.profile.prompt_tokens, self.profile.mean_response_tokens)
        device_type = "cpu" if self.profile.device == "cpu" else "cuda"
        return TrainerMemory(self.config, self.dimensions, lengths, device_type)

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in `model.dtype`, in which trainer and engine compute."""
        return self.memory.element_bytes

    @property
    def ranks(self) -> int:
        """Processes that the policy is sharded over."""
        return self.config.distributed.trainer_ranks

    @property
    def is_colocated(self) -> bool:
        """Policy and engine are in one process, on one device."""
        return not self.config.is_multiprocess

    @property
    def devices(self) -> int:
        """GPUs in all; on CPUs 1, the machine."""
        if self.profile.device == "cpu" or self.is_colocated:
            return 1
        return self.ranks + max(1, self.config.engine_processes) * self.config.gpus_per_engine

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt and a response at their limits."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def microbatch_tokens(self) -> int:
        """The most tokens that one backward pass can have: longer sequences go alone, uncut."""
        mean_prompt = round(self.profile.prompt_tokens) + self.config.rollout.max_response_tokens
        return max(self.config.microbatch_tokens, mean_prompt)

    def trainer_memory(self) -> dict[str, float]:
        """Bytes on the device of a trainer rank, by part, at the peak of an update."""
        return self.memory.breakdown(self.microbatch_tokens, recompute=bool(self.config.train.recompute))

    def engine_memory(self) -> dict[str, float]:
        """Bytes on the device of an engine, by part."""
        dimensions, e, tp = self.dimensions, self.element_bytes, self.config.gpus_per_engine
        breakdown = {"weights": e * dimensions.parameters / tp}
        if self.config.rollout.engine == "vllm":
            overhead = self.profile.engine_overhead_gib * GIB
            return breakdown | {"cache": self.vllm_cache(breakdown["weights"] + overhead), "vLLM overhead": overhead}
        if self.profile.device == "cpu" and dimensions.tied:
            breakdown["prepacked head"] = e * dimensions.embedding_parameters
        native = self.config.rollout.native
        # slots grow to the longest sequence that lives: a typical prompt's
        longest = self.profile.prompt_tokens + self.config.rollout.max_response_tokens
        cache = self.cached_token_bytes * native.slots * longest
        logits = SAMPLING_FLOATS * 4 * native.slots * dimensions.vocabulary
        if self.profile.device == "gpu":
            resident = sum(self.memory.state().values()) if self.is_colocated else 0
            free = self.profile.memory_gib * GIB - resident - breakdown["weights"] - logits
            cache = min(cache, max(self.cached_token_bytes, CACHE_SHARE * free))
        return breakdown | {"cache": cache, "logits": logits}

    def vllm_cache(self, others: float) -> float:
        """Bytes of vLLM's cache on each device, of which it takes `others` bytes for the rest."""
        given = self.config.rollout.vllm.cache_gib
        if given is None and self.profile.device == "gpu":
            return max(0.0, GPU_MEMORY * self.profile.memory_gib * GIB - others)
        return (given or CPU_CACHE_GIB) * GIB

    def load(self) -> LoadEstimate:
        """Loading of a model that is stored in 16 bits and sharded over GPUs: what limits it is the storage."""
        stored = 2 * self.dimensions.parameters
        # the largest weight's rows, as read and in the type to compute in
        rows = (2 + self.element_bytes) * self.dimensions.vocabulary * self.dimensions.hidden / self.ranks
        on_node = min(self.ranks, self.profile.devices_per_node)
        seconds = stored / (self.profile.storage_gb_s * GB)
        return LoadEstimate(stored / self.ranks, on_node * (CUDA_PROCESS_BYTES + rows), seconds)

    @property
    def cached_token_bytes(self) -> int:
        """Bytes of a token's keys and values, over all GPUs of an engine."""
        return self.dimensions.cache_bytes(self.element_bytes)

    @property
    def cache_tokens(self) -> int:
        """Tokens that an engine's cache holds, over all its GPUs."""
        return int(self.engine_memory()["cache"] * self.config.gpus_per_engine / self.cached_token_bytes)

    def process_memory(self) -> dict[str, float]:
        """Bytes of the one process that samples and trains, by part; the larger of the two phases counts."""
        trainer, engine = self.trainer_memory(), self.engine_memory()
        training = {name: trainer.pop(name) for name in UPDATE_PARTS}
        sampling = {name: engine.pop(name) for name in ("cache", "logits")}
        breakdown = trainer | {f"engine: {name}": value for name, value in engine.items()}
        breakdown |= training if sum(training.values()) > sum(sampling.values()) else sampling
        if self.profile.device == "cpu":
            breakdown["a copy of the state, from the first checkpoint on"] = self.checkpoint_copy_bytes()
            breakdown["Python and its libraries"] = self.profile.process_gib * GIB
        return breakdown

    def checkpoint_copy_bytes(self) -> float:
        """Bytes of weights and moments in main memory, from which a checkpoint is written while training goes on."""
        parameters = self.memory.trainable_parameters + self.memory.critic_parameters
        return 0 if not self.config.train.save_every else 3 * self.memory.master_bytes * parameters

    @property
    def sync_bytes(self) -> int:
        """Bytes of the weights that engines get per step, in the type that the trainer computes in."""
        return self.element_bytes * self.dimensions.parameters

    @property
    def sync_copies(self) -> int:
        """Complete copies that leave the trainer: one per node with engines."""
        return max(1, ceil(self.config.engine_processes * self.config.gpus_per_engine / self.profile.devices_per_node))

    @property
    def generated_responses(self) -> float:
        """Responses per step, whatever becomes of their groups."""
        rollout = self.config.rollout
        wanted = rollout.prompts_per_step / self.profile.keep_rate
        return min(wanted, self.config.max_groups_per_step) * rollout.group_size

    @property
    def running_sequences(self) -> float:
        """Sequences in one engine, on average: bounded by its slots and by its cache.

        vLLM's are half grown; the native engine keeps room for the longest response of each.
        """
        rollout, prompt = self.config.rollout, self.profile.prompt_tokens
        if rollout.engine == "vllm":
            bound, length = MAX_SEQUENCES, prompt + self.profile.mean_response_tokens / 2
        else:
            bound, length = rollout.native.slots, prompt + rollout.max_response_tokens
        held = self.cache_tokens / length
        return max(1.0, min(bound, held, self.generated_responses / max(1, self.config.engine_processes)))

    def decode_seconds(self, running: float) -> float:
        """Seconds for one token of each of `running` sequences on a CPU: reading weights and cache, or computing."""
        dimensions, profile = self.dimensions, self.profile
        length = profile.prompt_tokens + profile.mean_response_tokens / 2
        read = self.element_bytes * dimensions.parameters + running * length * self.cached_token_bytes
        flop = running * (2 * dimensions.parameters + self._attention_flop(length))
        at_rate = profile.generate_utilisation / max(1, self.config.engine_processes)  # the processor is shared by all
        return max(read / (profile.bandwidth_gb_s * GB), flop / (profile.tflops * 1e12)) / at_rate

    @property
    def decoding(self) -> Decoding:
        """Decode steps of an engine on GPUs."""
        gpus = self.config.gpus_per_engine
        return Decoding(self.dimensions, self.element_bytes, self.profile, decode_kind(self.config), gpus)

    @cached_property
    def generation(self) -> GenerationTime:
        """The generation phase of one engine, whose part of the responses has log-normal lengths."""
        profile, slots = self.profile, int(self.running_sequences)
        number = ceil(self.generated_responses / max(1, self.config.engine_processes))
        limit = self.config.rollout.max_response_tokens
        lengths = response_lengths(number, profile.mean_response_tokens, profile.length_spread, limit)
        if profile.device == "gpu":
            return generation_time(lengths, profile.prompt_tokens, slots, self.decoding.step_seconds)
        return generation_time(lengths, profile.prompt_tokens, slots, lambda rows, *_: self.decode_seconds(rows))

    @property
    def update_time(self) -> UpdateTime:
        """An update on a GPU."""
        length = self.profile.prompt_tokens + self.profile.mean_response_tokens / 2
        kept = self.memory.activation_bytes(recompute=False)
        kind = UpdateKind(chunk_tokens=chunk_tokens(self.dimensions.vocabulary, "cuda"))
        return UpdateTime(self.dimensions, self.element_bytes, self.profile, kept, length, kind)

    def step_seconds(self) -> dict[str, float]:
        """Seconds of one step, by phase."""
        profile = self.profile
        phases = {
            "weight sync": self.sync_bytes * self.sync_copies / (profile.link_gb_s * GB),
            "generation": self.generation.full_s,
            "long-tail responses": self.generation.draining_s,
        }
        if self.is_colocated:
            phases["weight sync"] = self.sync_bytes / (profile.bandwidth_gb_s * GB)
        return phases | self._training_seconds()

    def _training_seconds(self) -> dict[str, float]:
        recompute = bool(self.config.train.recompute)
        recorded = 1 - 1 / self.config.updates_per_step  # the first update computes its own
        if self.profile.device == "gpu":
            update = sum(self.update_time.parts(recompute=recompute).values())
            forward, tokens = self.update_time.forward_seconds(), self.trained_tokens / self.ranks
            phases = {"old log-probabilities": recorded * forward * tokens, "update": update * tokens}
            phases["critic"] = (forward + update) * tokens * self.config.has_critic
            return {name: seconds for name, seconds in phases.items() if seconds}
        # on CPUs the one machine computes an update, however many ranks share it
        rate = self.profile.tflops * 1e12 * self.profile.train_utilisation
        passes = {"old log-probabilities": recorded, "update": 4 if recompute else 3}
        passes["critic"] = (1 + passes["update"]) * self.config.has_critic  # its values, and its update
        return {name: count * self._forward_flop() / rate for name, count in passes.items() if count}

    @property
    def trained_tokens(self) -> float:
        """Tokens of the step's batch; a group's prompt counts once."""
        rollout, profile = self.config.rollout, self.profile
        responses = rollout.prompts_per_step * rollout.group_size * profile.mean_response_tokens
        return responses + rollout.prompts_per_step * profile.prompt_tokens

    def _forward_flop(self) -> float:
        """FLOP of one forward pass over the step's batch."""
        length = self.profile.prompt_tokens + self.profile.mean_response_tokens / 2
        return self.trained_tokens * (2 * self.dimensions.parameters + self._attention_flop(length))

    def _attention_flop(self, length: float) -> float:
        return 4 * self.dimensions.layers * self.dimensions.heads * self.dimensions.head_dim * length
