"""The native rollout engine: continuous batching around a transformers model, in this process.

A poll runs one decode step over all running sequences, gives the freed slots to the queue, prefills each new prompt
once for all its adjacent requests, and samples their first tokens from the prefill. Running sequences fill rows
0 .. n-1 of the slots without gaps: finished ones are replaced from the queue, or the last rows move to their positions.

One prompt's keys and values are kept beyond its prefill: that of the group at the head of the queue, while some of its
requests have started and others wait for slots. So memory is bounded by the slots, one prefill and one prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dapo.config.sampling import NativeConfig
from dapo.core.out_of_memory import explain_out_of_memory
from dapo.engines.engine import WeightSource
from dapo.engines.native.compatibility import patch_model
from dapo.engines.native.device_memory import CudaMemory, DeviceMemory, cache_token_bound, step_bytes
from dapo.engines.native.formulation import Formulation
from dapo.engines.native.forward import Prefilled
from dapo.engines.native.sampling import SamplingSettings, sample
from dapo.engines.native.scheduler import RunningSequence, Scheduler
from dapo.engines.native.upload import upload
from dapo.engines.request_checks import EngineState, require_finite
from dapo.types import Finish, Generation, GenerationRequest

PREFILL_TOKENS = 4096  # positions in one prefill, padding included (a longer prompt goes alone): bounds its activations

FEWER_SLOTS = "lower rollout.native.slots or rollout.native.cache_tokens"


@dataclass(frozen=True)
class EngineStats:
    """Counts of the work that an engine has done since it was made; a prompt shared by a group counts once."""

    prefills: int = 0
    prefill_prompts: int = 0
    prefill_tokens: int = 0  # padding is not counted
    decode_steps: int = 0
    decode_slot_steps: int = 0  # rows computed, over all decode steps; each of them is a running sequence
    sampled_tokens: int = 0
    cache_bytes_peak: int = 0


class NativeEngine(EngineState):
    """A `RolloutEngine` in process.

    Until the first `load_weights` it samples from the weights that the model came with, as version 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: NativeConfig,
        *,
        reproducible: bool = True,
        formulation: Formulation | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Raises EngineError for a model that the engine cannot serve (see `compatibility`).

        Args:
            model: becomes the engine's own: its weights, attention and layers are replaced.
            config: `slots` sequences are decoded at a time; `cache_tokens` bounds the slots in use times the longest of
                them (prompt + max_new_tokens). Without it the cache grows with the running sequences, on a GPU up to
                what is free.
            reproducible: as `compatibility.patch_model`.
            formulation: as `compatibility.patch_model`.
            memory: of the device; None: that of the GPU that the model is on, if it is on one.
        """
        super().__init__(version=0)
        model.eval().requires_grad_(False)
        self._forward = patch_model(model, rows=config.slots, reproducible=reproducible, formulation=formulation)
        self._scheduler = Scheduler(
            config.slots,
            config.cache_tokens,
            max_positions=getattr(model.config, "max_position_embeddings", None),
            vocabulary=self._forward.vocabulary,
        )
        self._memory = CudaMemory(model.device) if memory is None and model.device.type == "cuda" else memory
        self._is_bound_measured = self._memory is not None and config.cache_tokens is None
        self._cache = self._forward.formulation.new_slots()
        self._rows: list[RunningSequence | None] = []  # as in the cache; None: to be filled again before the poll ends
        self._cached_prefill: tuple[tuple[int, ...], Prefilled] | None = None
        """A prompt and its prefill, while some requests of its group have started and others wait."""
        self.stats = EngineStats()

    @property
    def cache_bytes(self) -> int:
        """The memory that the slots take at present."""
        return self._cache.num_bytes

    @property
    def weights_device(self) -> str:
        """The type of the device that holds the weights."""
        return str(self._forward.device.type)

    @property
    def in_flight(self) -> list[str]:
        return [*(seq.request.id for seq in self._running()), *self._scheduler.waiting]

    @explain_out_of_memory(torch.OutOfMemoryError, "giving the engine its weights", FEWER_SLOTS)
    def load_weights(self, weights: WeightSource, version: int) -> None:
        self._require_idle("load_weights")
        self._version = None
        self._forward.load_weights(weights)
        self._version = version

    def drop_weights(self) -> None:
        """Free the memory of prepacked weights, on a GPU of all. Raises EngineError while requests are in flight."""
        self._require_idle("drop_weights")
        self._version = None
        self._forward.drop_weights()
        self._free_unused()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._require_weights()
        self._require_new(requests)
        self._scheduler.submit(requests)

    @explain_out_of_memory(torch.OutOfMemoryError, "generation", FEWER_SLOTS)
    @torch.inference_mode()
    def poll(self) -> list[Generation]:
        """Sample one token for every running sequence, start waiting ones, and return what has finished.

        Raises EngineError if the logits are not finite; then the engine can only be closed.
        """
        self._require_open()
        if self._is_bound_measured and not self._rows and self._scheduler.waiting:
            self._scheduler.cache_tokens = self._cache_token_bound()
        finished = self._decode() if self._rows else []
        started = self._scheduler.admit(self._running())
        self._compact(spare=len(started))
        finished += self._start(started)
        self._tidy()
        return finished

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        names = self._require_in_flight(request_ids)
        rows = {seq.request.id: row for row, seq in enumerate(self._rows) if seq is not None}
        waiting = self._scheduler.waiting
        stopped = [self._vacate(rows[n]) if n in rows else RunningSequence(waiting.pop(n)) for n in names]
        self._tidy()
        return [seq.generation("aborted", self._require_weights()) for seq in stopped]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            del self._forward
            self._rows, self._cached_prefill = [], None
            self._cache.release()
            self._free_unused()
            self._scheduler.waiting.clear()

    def _decode(self) -> list[Generation]:
        """One decode step of all running sequences; the rows of the finished ones are empty afterwards."""
        running = self._running()
        tokens, positions = [seq.token_ids[-1] for seq in running], [seq.length - 1 for seq in running]
        longest = max(positions) + 1
        if not self._cache.fits(len(self._rows), longest):
            self._reserve(longest)
        (ids, at), settings = self._upload([tokens, positions], running)
        logits = self._forward.step(self._cache, ids, at, longest=longest)
        self._count(decode_steps=1, decode_slot_steps=len(running))
        finishes = self._sample(running, logits, settings)
        for row, finish in enumerate(finishes):
            if finish is not None:
                self._vacate(row)
        return self._answers(running, finishes)

    def _start(self, started: Sequence[RunningSequence]) -> list[Generation]:
        groups = [list(group) for _, group in groupby(started, key=lambda seq: seq.request.prompt_ids)]
        finished = []
        cached = self._cached_prefill
        if groups and cached is not None and cached[0] == groups[0][0].request.prompt_ids:
            finished += self._begin(cached[1], groups[:1])
            del groups[0]
        for batch in prefill_batches(groups):
            prompts = [group[0].request.prompt_ids for group in batch]
            prefilled = self._forward.prefill(prompts)
            self._count(prefills=1, prefill_prompts=len(prompts), prefill_tokens=sum(map(len, prompts)))
            finished += self._begin(prefilled, batch)
            if batch[-1] is groups[-1] and prompts[-1] == self._scheduler.head_prompt():
                self._cached_prefill = prompts[-1], prefilled.select(len(batch) - 1, len(prompts[-1]))
        return finished

    def _begin(self, prefilled: Prefilled, groups: Sequence[Sequence[RunningSequence]]) -> list[Generation]:
        """First tokens of groups whose prompts have been prefilled, in this order; unfinished sequences get a row."""
        entries = [(seq, source) for source, group in enumerate(groups) for seq in group]
        sequences = [seq for seq, _ in entries]
        (sources,), settings = self._upload([[source for _, source in entries]], sequences)
        finishes = self._sample(sequences, prefilled.logits[sources], settings)
        unfinished = [entry for entry, finish in zip(entries, finishes, strict=True) if finish is None]
        if unfinished:
            rows = [self._occupy(seq) for seq, _ in unfinished]
            width = max(len(seq.request.prompt_ids) for seq, _ in unfinished)
            self._reserve(width + 1)
            self._cache.store(prefilled.cache, [source for _, source in unfinished], rows, width)
        return self._answers(sequences, finishes)

    def _upload(
        self, integers: Sequence[Sequence[int]], sequences: Sequence[RunningSequence]
    ) -> tuple[tuple[Tensor, ...], SamplingSettings]:
        """Rows of `[n]` integers and how to sample the n sequences' next tokens, copied to the device as one block."""
        block = np.empty((len(integers) + 3, len(sequences)), dtype=np.int64)
        block[: len(integers)] = integers
        settings = block[len(integers) :].view(np.float64)
        settings[0] = [seq.next_uniform() for seq in sequences]
        settings[1] = [seq.request.temperature for seq in sequences]
        settings[2] = [seq.request.top_p for seq in sequences]
        uploaded = upload(block, self._forward.device)
        on_device = SamplingSettings.of(settings, uploaded[len(integers) :].view(torch.float64))
        return uploaded[: len(integers)].unbind(), on_device

    def _answers(self, sequences: Sequence[RunningSequence], finishes: Sequence[Finish | None]) -> list[Generation]:
        version = self._require_weights()
        pairs = zip(sequences, finishes, strict=True)
        return [seq.generation(finish, version) for seq, finish in pairs if finish is not None]

    def _sample(
        self, sequences: Sequence[RunningSequence], logits: Tensor, settings: SamplingSettings
    ) -> list[Finish | None]:
        """Give each sequence its next token, from `[n, vocabulary]` logits. The only wait for the device in a step."""
        tokens, logprobs = sample(_mask_tokens(logits, [seq.masked_tokens for seq in sequences]), settings)
        # float64 holds every token id, so one transfer brings both
        sampled_ids, scored = torch.stack((tokens.double(), logprobs.double())).tolist()
        require_finite(sum(scored), self._require_weights(), logits.dtype)
        self._count(sampled_tokens=len(sequences))
        return [seq.append(int(t), p) for seq, t, p in zip(sequences, sampled_ids, scored, strict=True)]

    def _running(self) -> list[RunningSequence]:
        return [seq for seq in self._rows if seq is not None]

    def _occupy(self, seq: RunningSequence) -> int:
        if None not in self._rows:
            self._rows.append(None)
        row = self._rows.index(None)
        self._rows[row] = seq
        return row

    def _vacate(self, row: int) -> RunningSequence:
        seq = self._rows[row]
        assert seq is not None, f"row {row} is empty already"
        self._rows[row] = None
        return seq

    def _reserve(self, longest: int) -> None:
        running = self._running()
        longest = max([longest, *(seq.length for seq in running)])
        limit, bound = self._scheduler.longest_reservation(running), self._scheduler.cache_tokens
        most_rows = None
        if self._memory is not None:
            most_rows = self._scheduler.slots if bound is None else min(self._scheduler.slots, bound // limit)
        self._cache.reserve(len(self._rows), longest, limit, most_rows=most_rows)
        if self._cache.num_bytes > self.stats.cache_bytes_peak:
            self.stats = replace(self.stats, cache_bytes_peak=self._cache.num_bytes)

    def _compact(self, *, spare: int) -> None:
        """Leave at most `spare` empty rows: the last running sequences move into the others."""
        empty = [row for row, seq in enumerate(self._rows) if seq is None]
        size = len(self._rows) - max(0, len(empty) - spare)
        movers = [row for row in range(size, len(self._rows)) if self._rows[row] is not None]
        targets = empty[: len(movers)]
        if movers:
            moved = [self._vacate(row) for row in movers]
            self._cache.move(movers, targets, max(seq.length for seq in moved))
            for row, seq in zip(targets, moved, strict=True):
                self._rows[row] = seq
        del self._rows[size:]

    def _tidy(self) -> None:
        """Close the gaps, and free what no request needs."""
        self._compact(spare=0)
        if self._cached_prefill is not None and self._cached_prefill[0] != self._scheduler.head_prompt():
            self._cached_prefill = None
        if not self._rows and self._cache.rows:
            self._cache.release()
            self._free_unused()

    def _free_unused(self) -> None:
        """Return unused memory to the device.

        In a process of its own others need it there. In the trainer's process the update allocates from the same
        memory, but in other sizes: what it would cut from the cache's large blocks the next cache could not use.
        """
        if self._memory is not None:
            self._memory.free_unused()

    def _cache_token_bound(self) -> int:
        """The positions that the cache may hold, from what is free before there is one."""
        assert self._memory is not None
        model, position_bytes = self._forward.model, self._forward.position_bytes
        needed = step_bytes(
            slots=self._scheduler.slots,
            vocabulary=self._forward.vocabulary,
            prefill_tokens=PREFILL_TOKENS,
            position_bytes=position_bytes,
            hidden=model.config.hidden_size,
            intermediate=model.config.intermediate_size,
            width=model.dtype.itemsize,
        )
        return cache_token_bound(self._memory.free_bytes(), position_bytes=position_bytes, step_bytes=needed)

    def _count(self, **added: int) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in added.items()})


def _mask_tokens(logits: Tensor, masked_tokens: Sequence[Sequence[int]]) -> Tensor:
    """`[n, vocabulary]` logits, changed in place: row i gives no probability to `masked_tokens[i]`."""
    indices = [(row, token) for row, tokens in enumerate(masked_tokens) for token in tokens]
    if indices:
        rows, tokens = upload(np.array(indices, dtype=np.int64), logits.device).unbind(1)
        logits[rows, tokens] = -torch.inf
    return logits


def prefill_batches(groups: Sequence[list[RunningSequence]]) -> Iterator[list[list[RunningSequence]]]:
    """Cut groups, in order, into prefills of at most `PREFILL_TOKENS` positions, padding included."""
    batch: list[list[RunningSequence]] = []
    width = 0
    for group in groups:
        length = len(group[0].request.prompt_ids)
        if batch and max(width, length) * (len(batch) + 1) > PREFILL_TOKENS:
            yield batch
            batch, width = [], 0
        batch.append(group)
        width = max(width, length)
    if batch:
        yield batch
