"""Estimates the memory of each process of a run and the work of a step; starts nothing.

The inputs are a configuration, the model's sizes, and a profile of the hardware and the responses.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal, Self

import torch

from dapo.config import Config, GpuShares
from dapo.config.rollout_options import NativeConfig
from dapo.core.memory import GIB
from dapo.engines.native.device_memory import CACHE_SHARE, SAMPLING_FLOATS
from dapo.engines.vllm.start import CPU_CACHE_GIB, GPU_MEMORY
from dapo.policy.memory_model import ResponseLengths, TrainerMemory, trainer_bytes
from dapo.policy.model_dimensions import ModelDimensions

CUDA_PROCESS_BYTES = 3 * GIB  # main memory of a process that computes on a GPU, without any weights
TRANSFER_BYTES_PER_S = 25e9  # from GPU to GPU: half of a network link of 400 Gb/s
TRANSFER_CHUNK_S = 0.05  # the calls of trainer and engines for each chunk of 1 GiB
UPDATE_PARTS = ("activations", "gradients of activations", "logits (one chunk)")


@dataclass(frozen=True)
class HardwareProfile:
    """The machine that an estimate is for, and the lengths and the keep rate that it takes."""

    device: Literal["gpu", "cpu"] = "gpu"
    memory_gib: float = 80.0  # per GPU; on a CPU, of the machine
    devices_per_node: int = 8
    is_here: bool = False  # whether it is this machine; else the two numbers above are assumptions
    keep_rate: float = 1 / 3  # fraction of groups that carry a signal (Eq. 11)
    mean_response_tokens: float = 0.0
    prompt_tokens: float = 256.0
    process_gib: float = 0.6  # of a process without its tensors
    engine_overhead_gib: float = 4.0  # that vLLM takes for itself on each GPU


def hardware_profile_for(config: Config) -> HardwareProfile:
    """Return the profile of this machine, or of GPUs that the configuration names."""
    lengths = ResponseLengths.expected(config)
    profile = HardwareProfile(
        keep_rate=HardwareProfile.keep_rate if config.dynamic_sampling.enabled else 1.0,
        mean_response_tokens=lengths.response,
        prompt_tokens=lengths.prompt,
    )
    if _runs_on_cpu(config):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(
            profile,
            device="cpu",
            memory_gib=round(memory / GIB, 1),
            devices_per_node=1,
            is_here=not config.uses_ray,
            engine_overhead_gib=1.0,
        )
    if config.uses_ray:
        return profile
    if not torch.cuda.is_available():
        # one rank per GPU, which engines share
        return replace(profile, devices_per_node=config.distributed.trainer_ranks)
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return replace(
        profile, memory_gib=round(gib, 1), devices_per_node=torch.cuda.device_count(), is_here=True
    )


def _runs_on_cpu(config: Config) -> bool:
    if config.train.device == "auto":
        return config.launcher == "local" and not Path("/dev/nvidia0").exists()
    return config.train.device == "cpu"


@dataclass(frozen=True)
class ResourceEstimate:
    """The memory and the counts of a run, for a configuration whose `model.dtype` is resolved."""

    config: Config
    dimensions: ModelDimensions
    profile: HardwareProfile
    choices: Sequence[str] = ()
    """The lines of `resolve_auto`: the options that it chose, with reasons."""

    def changed(self, section: str, **values: Any) -> Self:
        return replace(self, config=self.config.changed(section, **values))

    @property
    def memory(self) -> TrainerMemory:
        lengths = ResponseLengths(self.profile.prompt_tokens, self.profile.mean_response_tokens)
        device_type = "cpu" if self.profile.device == "cpu" else "cuda"
        return TrainerMemory(self.config, self.dimensions, lengths, device_type)

    @property
    def ranks(self) -> int:
        """Processes that the policy is sharded over."""
        return self.config.distributed.trainer_ranks

    @property
    def shares(self) -> GpuShares:
        """The processes that share a GPU."""
        return self.config.gpu_shares(self.profile.devices_per_node)

    @property
    def available(self) -> float:
        """Bytes of the device that a trainer rank may fill; on a CPU, of the machine."""
        return trainer_bytes(self.shares, self.profile.memory_gib * GIB, self.memory)

    @property
    def engine_available(self) -> float:
        """Bytes of the device that an engine may fill."""
        shares = self.shares
        capacity = self.profile.memory_gib * GIB
        resident = shares.trainers * self.memory.kept_bytes() if shares.alternates else 0.0
        return max(0.0, capacity - resident) / shares.sampling

    @property
    def devices(self) -> int:
        """The number of GPUs; 1 on CPUs."""
        if self.profile.device == "cpu":
            return 1
        gpus = self.config.gpus_wanted
        processes = self.shares.processes
        if self.config.uses_ray:
            return ceil(gpus / processes)
        return min(gpus, self.profile.devices_per_node)

    @property
    def sequence_tokens(self) -> int:
        """The most tokens of a sequence: a prompt with its response or episode."""
        return self.memory.longest_sequence

    @property
    def microbatch_tokens(self) -> int:
        """The most tokens of one backward pass; a longer sequence is a microbatch of its own."""
        longest = round(self.profile.prompt_tokens) + self.config.rollout.max_response_tokens
        longest = min(longest + self.config.max_observed_tokens, self.sequence_tokens)
        return max(self.config.microbatch_tokens, longest)

    def trainer_memory(self) -> dict[str, float]:
        """Return bytes on the device of a trainer rank at the peak of an update, by part."""
        return self.memory.breakdown(
            self.microbatch_tokens, recompute=bool(self.config.train.recompute)
        )

    def engine_memory(self) -> dict[str, float]:
        """Return bytes on the device of an engine, by part."""
        dimensions = self.dimensions
        e = self.memory.element_bytes
        tp = self.config.gpus_per_engine
        breakdown = {"weights": e * dimensions.parameters / tp}
        if self.config.rollout.engine_kind.pages_cache:
            overhead = self.profile.engine_overhead_gib * GIB
            limit = self.cache_limit
            cache = (limit or CPU_CACHE_GIB) * GIB
            if limit is None and self.profile.device == "gpu":
                reserve = (1 - GPU_MEMORY) * self.profile.memory_gib * GIB / self.shares.sampling
                cache = max(0.0, self.engine_available - reserve - breakdown["weights"] - overhead)
            return breakdown | {"cache": cache, "vLLM overhead": overhead}
        if self.profile.device == "cpu" and dimensions.tied:
            breakdown["prepacked head"] = e * dimensions.embedding_parameters
        slots = self.cache_limit or 1
        # slots grow to the longest sequence in them
        longest = (
            self.profile.prompt_tokens
            + self.config.rollout.max_response_tokens
            + self.config.max_observed_tokens
        )
        cache = self.cached_token_bytes * slots * longest
        logits = SAMPLING_FLOATS * 4 * slots * dimensions.vocabulary
        if self.profile.device == "gpu":
            resident = sum(self.memory.state().values()) if not self.config.is_multiprocess else 0
            free = self.engine_available - resident - breakdown["weights"] - logits
            cache = min(cache, max(self.cached_token_bytes, CACHE_SHARE * free))
        return breakdown | {"cache": cache, "logits": logits}

    @property
    def cache_limit(self) -> float | None:
        """The value of the option that bounds the engine's cache; None: no bound is set."""
        options = self.config.rollout.engine_options
        if isinstance(options, NativeConfig):
            return options.slots_on("cpu" if self.profile.device == "cpu" else "cuda")
        name = self.config.rollout.engine_kind.cache_option
        return None if name is None else getattr(options, name)

    @property
    def load_read_bytes(self) -> float:
        """Bytes that one trainer rank reads: its shard of files with 16-bit weights."""
        return 2 * self.dimensions.parameters / self.ranks

    @property
    def load_host_bytes(self) -> float:
        """Bytes of a node's main memory while all its ranks load, without the page cache."""
        # the largest weight's rows, as read and in the type to compute in
        rows = (
            (2 + self.memory.element_bytes)
            * self.dimensions.vocabulary
            * self.dimensions.hidden
            / self.ranks
        )
        return min(self.ranks, self.profile.devices_per_node) * (CUDA_PROCESS_BYTES + rows)

    @property
    def cached_token_bytes(self) -> int:
        """Bytes of a token's keys and values, over all GPUs of an engine."""
        return self.dimensions.cache_bytes(self.memory.element_bytes)

    @property
    def cache_tokens(self) -> int:
        """Tokens that an engine's cache holds, over all its GPUs."""
        return int(
            self.engine_memory()["cache"] * self.config.gpus_per_engine / self.cached_token_bytes
        )

    def process_memory(self) -> dict[str, float]:
        """Return bytes of the process that samples and trains, in its larger phase."""
        trainer = self.trainer_memory()
        engine = self.engine_memory()
        training = {name: trainer.pop(name) for name in UPDATE_PARTS}
        sampling = {name: engine.pop(name) for name in ("cache", "logits")}
        breakdown = trainer | {f"engine: {name}": value for name, value in engine.items()}
        breakdown |= training if sum(training.values()) > sum(sampling.values()) else sampling
        if self.profile.device == "cpu":
            breakdown["a copy of the state, from the first checkpoint on"] = (
                self.checkpoint_copy_bytes()
            )
            breakdown["Python and its libraries"] = self.profile.process_gib * GIB
        return breakdown

    def checkpoint_copy_bytes(self) -> float:
        """Return bytes of main memory that a checkpoint is copied to while it is written."""
        parameters = self.memory.trainable_parameters + self.memory.critic_parameters
        return 0 if not self.config.train.save_every else 3 * self.memory.master_bytes * parameters

    @property
    def sync_bytes(self) -> int:
        """Bytes of the weights that engines get per step."""
        return self.memory.element_bytes * self.dimensions.parameters

    @property
    def transfer_seconds(self) -> float | None:
        """Seconds of a step in which weights go from GPU to GPU; None: they go through files."""
        if self.profile.device == "cpu" or self.shares.transfer is None:
            return None
        return (
            self.sync_bytes / TRANSFER_BYTES_PER_S + ceil(self.sync_bytes / GIB) * TRANSFER_CHUNK_S
        )

    @property
    def sync_copies(self) -> int:
        """Complete copies that leave the trainer: one per node with engines."""
        return max(
            1,
            ceil(
                self.config.engine_processes
                * self.config.gpus_per_engine
                / self.profile.devices_per_node
            ),
        )

    @property
    def generated_responses(self) -> float:
        """Sampled responses per step, of dropped groups too."""
        rollout = self.config.rollout
        if self.config.is_supervised:
            return 0
        groups = rollout.prompts_per_step / self.profile.keep_rate
        return min(groups, self.config.max_groups_per_step) * rollout.group_size
