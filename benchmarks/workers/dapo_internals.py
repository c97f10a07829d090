"""Measures dapo alone: how cost grows, what shared prompts save, how full slots are, where the time
of a step goes.
"""

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.memory import current_rss_bytes, peak_rss_bytes
from benchmarks.op_categories import compiled_functions_named, seconds_by_kind
from benchmarks.protocol import serve
from dapo.config import Config
from dapo.config.rollout_options import NativeConfig
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.engines.native.engine import EngineStats, NativeEngine
from dapo.engines.native.linear_probe import resolve_kernels
from dapo.policy.model import load_model
from dapo.policy.policy import Policy
from dapo.runs.directory import RunDirectory
from dapo.start.resolve import ComputeDevice
from dapo.training.checkpoint_writer import CheckpointWriter
from dapo.types import GenerationRequest, Sample

HEAD_SIZE = 32
Trace: TypeAlias = AbstractContextManager[Any]
UNTRACED: Trace = nullcontext()


def resolve_dtype(dtype: str, device: str) -> dict[str, Any]:
    """The value of `auto` on this machine."""
    if dtype != "auto":
        return {"dtype": dtype}
    return {
        "dtype": (
            "bfloat16" if ComputeDevice.of_this_process(device).multiplies_bfloat16 else "float32"
        )
    }


class Studies:
    """One model; engine and policy are made anew from it where a measurement needs that."""

    def open(
        self, model: dict[str, Any] | str, dtype: str, device: str, threads: int
    ) -> dict[str, Any]:
        """Load a named model, or make a small random one of a given geometry."""
        torch.set_num_threads(threads)
        tiny = load_model(
            "tiny-random" if isinstance(model, dict) else model,
            dtype=getattr(torch, dtype),
            device=device,
        )
        self.loaded = (
            replace(tiny, model=random_llama(**model, dtype=dtype).to(device))
            if isinstance(model, dict)
            else tiny
        )
        self.policies: dict[str, Policy] = {}
        self.engine: NativeEngine | None = None
        return {
            "parameters": sum(p.numel() for p in self.loaded.model.parameters()),
            "dtype": dtype,
        }

    def generate(
        self,
        groups: int,
        group: int,
        prompt: int,
        tokens: int,
        slots: int,
        temperature: float = 1.0,
        *,
        trace: Trace = UNTRACED,
    ) -> dict[str, Any]:
        """Seconds to answer `groups` x `group` requests of `tokens` forced tokens."""
        requests = self._requests(
            [prompt] * groups, group, [tokens] * (groups * group), temperature
        )
        engine = self._new_engine(slots)
        with trace:
            started = time.perf_counter()
            engine.submit(requests)
            finished = 0
            while finished < len(requests):
                finished += len(engine.poll())
            seconds = time.perf_counter() - started
        engine.close()
        return {"seconds": seconds}

    def update(
        self,
        groups: int,
        group: int,
        prompt: int,
        tokens: int,
        microbatch_tokens: int,
        shared: bool = True,
        *,
        trace: Trace = UNTRACED,
    ) -> dict[str, Any]:
        """Seconds of one optimiser update; unshared: every sequence in a microbatch of its own."""
        samples = self._samples(groups, group, prompt, tokens, shared=shared)
        policy = self._policy("kept", microbatch_tokens) if shared else self._policy("unshared", 1)
        with trace:
            started = time.perf_counter()
            metrics = policy.update(samples, step=1)
            seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": metrics["optim/update_tokens"]}

    def profile(
        self,
        phase: str,
        groups: int,
        group: int,
        prompt: int,
        tokens: int,
        slots: int,
        microbatch_tokens: int,
    ) -> dict[str, Any]:
        """Seconds of a traced generation or update by kind of work, and the tokens that it
        computed.
        """
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with compiled_functions_named():
            if phase == "generation":
                seconds = self.generate(groups, group, prompt, tokens, slots, trace=profiler)[
                    "seconds"
                ]
            else:
                seconds = self.update(
                    groups, group, prompt, tokens, microbatch_tokens, trace=profiler
                )["seconds"]
        computed = groups * (group * tokens + (prompt if phase == "update" else 0))
        return {
            "seconds": seconds,
            "kinds": seconds_by_kind(profiler.events(), seconds),
            "tokens": computed,
        }

    def step(
        self,
        groups: int,
        group: int,
        prompt: int,
        tokens: int,
        slots: int,
        microbatch_tokens: int,
        folder: str | None,
    ) -> dict[str, Any]:
        """Seconds of a step as in training; with a `folder`, while the state before it is written
        to a run there.
        """
        requests = self._requests([prompt] * groups, group, [tokens] * (groups * group))
        samples = self._samples(groups, group, prompt, tokens, shared=True)
        policy = self._policy("kept", microbatch_tokens)
        if self.engine is None:
            self.engine = self._new_engine(slots)
        save = Save(Path(folder)) if folder is not None else None
        started = time.perf_counter()
        if save is not None:
            save.begin(policy)
        self.engine.load_weights(policy.weights(version=1), version=1)
        self.engine.submit(requests)
        finished = 0
        while finished < len(requests):
            finished += len(self.engine.poll())
        policy.update(samples, step=1)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "checkpoint": save.end() if save is not None else None}

    def gradient_gap(
        self, groups: int, group: int, prompt: int, tokens: int, microbatch_tokens: int
    ) -> dict[str, Any]:
        """Relative L2 distance of the gradients with and without shared prompts, each from the same
        fresh policy.
        """
        shared = self._first_gradient(groups, group, prompt, tokens, microbatch_tokens, shared=True)
        unshared = self._first_gradient(
            groups, group, prompt, tokens, microbatch_tokens, shared=False
        )
        squares = sum(
            float((shared[name] - unshared[name]).double().square().sum()) for name in shared
        )
        norm = sum(float(gradient.double().square().sum()) for gradient in shared.values())
        return {"relative_gap": (squares / norm) ** 0.5}

    def update_memory(
        self, groups: int, group: int, prompt: int, tokens: int, microbatch_tokens: int
    ) -> dict[str, Any]:
        """How far the second update of a process raises its peak resident memory above what it
        holds before it.
        """
        samples = self._samples(groups, group, prompt, tokens, shared=True)
        policy = self._policy("kept", microbatch_tokens)
        # the optimiser's state is there from now on
        policy.update(self._samples(1, 2, 8, 8, shared=True), step=1)
        held = current_rss_bytes()
        policy.update(samples, step=1)
        return {"extra_bytes": max(0, peak_rss_bytes() - held)}

    def memory(self) -> dict[str, Any]:
        """Peak bytes of this process."""
        return {"rss_bytes": peak_rss_bytes()}

    def _new_engine(self, slots: int) -> NativeEngine:
        """An engine with the kernels that a run chooses."""
        model = self.loaded.model
        options = resolve_kernels(
            NativeConfig(slots=slots), model, dtype=model.dtype, device=model.device.type
        )
        return NativeEngine(copy.deepcopy(model), options)

    def long_tail(self, lengths: list[int], group: int, prompt: int, slots: int) -> dict[str, Any]:
        """The engine's own count of computed slot-steps: until its queue was empty, and to the
        end.
        """
        requests = self._requests([prompt] * (len(lengths) // group), group, lengths)
        engine = self._new_engine(slots)
        started = time.perf_counter()
        engine.submit(requests)
        finished = 0
        queue_empty = EngineStats()
        while finished < len(requests):
            waiting = len(requests) - finished > slots
            finished += len(engine.poll())
            if waiting:
                queue_empty = engine.stats
        seconds = time.perf_counter() - started
        stats = engine.stats
        engine.close()
        return {
            "seconds": seconds,
            "slot_steps_until_queue_empty": queue_empty.decode_slot_steps,
            "steps_until_queue_empty": queue_empty.decode_steps,
            "slot_steps": stats.decode_slot_steps,
            "steps": stats.decode_steps,
        }

    def _policy(self, name: str, microbatch_tokens: int) -> Policy:
        if name not in self.policies:
            config = Config.model_validate(
                {
                    "model": {"name": self.loaded.name},
                    "data": {"train": "builtin:sums"},
                    "rollout": {"max_response_tokens": 4096},
                    "optim": {"warmup_steps": 0},
                    "train": {"microbatch_tokens": microbatch_tokens},
                }
            )
            self.policies[name] = Policy(
                config, replace(self.loaded, model=copy.deepcopy(self.loaded.model))
            )
        return self.policies[name]

    def _first_gradient(
        self,
        groups: int,
        group: int,
        prompt: int,
        tokens: int,
        microbatch_tokens: int,
        *,
        shared: bool,
    ) -> dict[str, torch.Tensor]:
        """AdamW's first moment after its first update is the clipped gradient times (1 - beta1)."""
        policy = self._policy("gradient", microbatch_tokens if shared else 1)
        policy.update(self._samples(groups, group, prompt, tokens, shared=shared), step=1)
        del self.policies["gradient"]
        return policy._optimizer.moments()["exp_avg"]

    def _samples(
        self, groups: int, group: int, prompt: int, tokens: int, *, shared: bool
    ) -> list[Sample]:
        """Random tokens with advantages +1 and -1."""
        return [
            Sample(
                group_id=g if shared else g * group + i,
                prompt_ids=self._ids("prompt", g, prompt),
                response_ids=self._ids(f"response {i}", g, tokens),
                reward=0.0,
                advantage=1.0 if i % 2 == 0 else -1.0,
                engine_logprobs=(),
                old_logprobs=None,
                mask=(True,) * tokens,
            )
            for g in range(groups)
            for i in range(group)
        ]

    def _requests(
        self, prompts: list[int], group: int, lengths: list[int], temperature: float = 1.0
    ) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                id=f"{g}/{i}",
                prompt_ids=self._ids("prompt", g, prompt),
                max_new_tokens=lengths[g * group + i],
                min_new_tokens=lengths[g * group + i],
                temperature=temperature,
                top_p=1.0,
                seed=keyed_seed("bench", g, i),
                stop_ids=self.loaded.stop_ids,
            )
            for g, prompt in enumerate(prompts)
            for i in range(group)
        ]

    def _ids(self, kind: str, g: int, count: int) -> tuple[int, ...]:
        vocabulary = self.loaded.model.config.vocab_size
        draws = keyed_uniforms(keyed_seed("bench", kind, g), count)
        return tuple((draws * vocabulary).astype(int).tolist())


class Save:
    """One checkpoint into a run directory, and what it took."""

    def __init__(self, folder: Path) -> None:
        self._run = RunDirectory(folder)
        folder.mkdir(exist_ok=True)
        self._writer = CheckpointWriter(self._run, log=print)
        self._found: dict[str, float] = {}

    def begin(self, policy: Policy) -> None:
        """Copy the state, and have the copy written."""
        started = time.perf_counter()
        write = policy.snapshot()
        self._found["snapshot_s"] = time.perf_counter() - started

        def save() -> None:
            path = self._run.checkpoints.save(1, write, keep=1)
            self._found["written_after_s"] = time.perf_counter() - started
            self._found["writer_cpu_s"] = time.thread_time()  # of the writer's thread, which is new
            self._found["bytes"] = sum(file.stat().st_size for file in path.iterdir())

        self._writer.start(1, save)

    def end(self) -> dict[str, float]:
        """Wait for it. Raises OSError if it could not be written."""
        self._writer.join()
        if self._writer.has_failed:
            raise OSError("the checkpoint could not be written: see the log")
        return self._found


def random_llama(width: int, layers: int, vocabulary: int, dtype: str) -> PreTrainedModel:
    """A Llama of this geometry with random weights: two query heads to each key-value head, tied
    embeddings.
    """
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_SIZE,
        num_key_value_heads=max(1, width // HEAD_SIZE // 2),
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


if __name__ == "__main__":
    studies = Studies()
    serve(
        {
            "resolve_dtype": resolve_dtype,
            "open": studies.open,
            "generate": studies.generate,
            "update": studies.update,
            "step": studies.step,
            "profile": studies.profile,
            "gradient_gap": studies.gradient_gap,
            "update_memory": studies.update_memory,
            "memory": studies.memory,
            "long_tail": studies.long_tail,
        }
    )
