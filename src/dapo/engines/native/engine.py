"""The native rollout engine: continuous batching around a transformers model, in this process.

A poll runs one decode step over all rows, gives freed rows to paused branches and then to the
queue, prefills each new prompt once, and samples first tokens from the prefill. Requests with equal
distributions share a row while their tokens are equal (`cache_rows`); each samples from the row's
logits with its own random numbers. Rows in use are 0 .. n-1 without gaps: free rows are reused, or
the last rows move into them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dapo.config.rollout_options import NativeConfig, RolloutConfig
from dapo.core.memory import explain_out_of_memory
from dapo.engines.engine import WeightSource
from dapo.engines.native.cache import PromptCache
from dapo.engines.native.cache_rows import BranchGroup, Row, RowCopies, Rows, flat
from dapo.engines.native.compatibility import patch_model
from dapo.engines.native.device_memory import CudaMemory, cache_token_bound, step_bytes, upload
from dapo.engines.native.forward import Prefilled, PromptPrefix, common_prefix
from dapo.engines.native.model_kernels import ModelKernels
from dapo.engines.native.scheduler import RunningSequence, Scheduler
from dapo.engines.native.token_sampling import SamplingSettings, UniformDraws, sample
from dapo.engines.request_checks import EngineState, require_finite
from dapo.libs import cpu_kernels
from dapo.libs.cpu_kernels.prepacked import DEFAULT_KERNELS
from dapo.types import Generation, GenerationRequest

# positions in a prefill of several prompts, padding included: bounds its activations
PREFILL_TOKENS = 4096
MIN_PREFILL = 128
MAX_PADDING = 1.25  # positions of a prefill beyond which its prompts have similar lengths
MIN_PREFIX = 8  # positions; a shorter prefix of prompts is not worth a separate forward
FEWER_SLOTS = "lower rollout.native.slots"


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine's work; shared work counts once."""

    prefills: int = 0
    prefill_prompts: int = 0
    prefill_tokens: int = 0  # without padding
    decode_steps: int = 0
    decode_slot_steps: int = 0  # rows computed in all decode steps: distinct prefixes of responses
    decode_tokens: int = 0  # tokens sampled in decode steps
    sampled_tokens: int = 0  # decode_tokens, and the first token of each response
    cache_bytes_peak: int = 0


class NativeEngine(EngineState):
    """A `RolloutEngine` in this process.

    Until the first `load_weights` it samples from the model's initial weights, as version 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: NativeConfig,
        *,
        reproducible: bool = True,
        model_kernels: ModelKernels | None = None,
        memory: CudaMemory | None = None,
    ) -> None:
        """Take ownership of the model: its weights, attention and layers are replaced.

        `reproducible` and `model_kernels` are those of `compatibility.patch_model`, which raises
        EngineError for a model that the engine cannot serve. The free part of `memory` bounds the
        cache; None: the GPU's if the model is on one, else the cache grows with the running
        sequences.
        """
        super().__init__(version=0)
        model.eval().requires_grad_(False)
        self._forward = patch_model(
            model,
            rows=config.slots,
            kernels=config.kernels or DEFAULT_KERNELS,
            reproducible=reproducible,
            model_kernels=model_kernels,
        )
        self._scheduler = Scheduler(
            config.slots,
            max_positions=getattr(model.config, "max_position_embeddings", None),
            vocabulary=self._forward.vocabulary,
            shares_prompts=self._forward.shares_prompts,
        )
        self._memory = (
            CudaMemory(model.device) if memory is None and model.device.type == "cuda" else memory
        )
        self._cache = self._forward.model_kernels.new_slots()
        self._compiled = self._forward.model_kernels.compiled
        self._rows = Rows()
        # the prompts that several rows share
        self._prompts: dict[tuple[int, ...], PromptCache] = {}
        self._prefix: PromptPrefix | None = None
        """The common prefix of the prefilled prompts; dropped when nothing is in flight."""
        self._continued: dict[str, PromptPrefix] = {}
        """Finished responses that requests may continue, by request id, the oldest first."""
        self._max_continued_tokens: int | None = None
        self.stats = EngineStats()

    @property
    def cache_bytes(self) -> int:
        """Return the current size of the slots, of shared prompts and of responses to continue."""
        caches = [*self._prompts.values(), *(prefix.cache for prefix in self._continued.values())]
        return self._cache.num_bytes + sum(prompt.num_bytes for prompt in caches)

    @property
    def in_flight(self) -> list[str]:
        return [*(seq.request.id for seq in self._rows.sequences), *self._scheduler.waiting]

    @explain_out_of_memory(torch.OutOfMemoryError, "giving the engine its weights", FEWER_SLOTS)
    def load_weights(self, weights: WeightSource, version: int) -> None:
        self._require_idle("load_weights")
        self._version = None
        self._continued.clear()
        self._forward.load_weights(weights)
        self._version = version

    def drop_weights(self) -> None:
        """Free the memory of prepacked weights, on a GPU of all weights.

        Raises EngineError with requests in flight.
        """
        self._require_idle("drop_weights")
        self._version = None
        self._continued.clear()
        self._forward.drop_weights()
        self._free_unused()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._require_weights()
        self._require_new(requests)
        self._scheduler.submit(requests)

    @explain_out_of_memory(torch.OutOfMemoryError, "generation", FEWER_SLOTS)
    @torch.inference_mode()
    def poll(self) -> list[Generation]:
        """Sample a token for each running sequence, start requests, return finished responses.

        Raises EngineError if the logits are not finite; the engine can then only be closed.
        """
        self._require_open()
        if self._memory is not None and not self._rows and self._scheduler.waiting:
            self._divide_memory(self._cache_token_bound(self._memory))
        finished = self._decode() if self._rows else []
        self._drop_prompts()
        self._assign_rows()
        rows = self._rows
        started: list[BranchGroup] = []
        if self._scheduler.waiting:
            started = self._scheduler.admit(rows.sequences, len(rows.in_use), rows.num_branches)
        self._copy(self._rows.compact(spare=len(started)))
        finished += self._start(started)
        self._free_buffers()
        return finished

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        names = self._require_in_flight(request_ids)
        running = {seq.request.id: seq for seq in self._rows.sequences}
        waiting = self._scheduler.waiting
        stopped = [running[n] if n in running else RunningSequence(waiting.pop(n)) for n in names]
        self._rows.remove(set(names))
        self._free_buffers()
        return [seq.generation("aborted", self._require_weights()) for seq in stopped]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            del self._forward
            self._rows.clear()
            self._prefix = None
            self._prompts = {}
            self._continued = {}
            self._cache.release()
            self._free_unused()
            self._scheduler.waiting.clear()

    def _decode(self) -> list[Generation]:
        """Run one decode step of all rows, and free the finished rows."""
        branches = [row.active for row in self._rows.in_use]
        tokens = [branch[0].token_ids[-1] for branch in branches]
        positions = [branch[0].length - 1 for branch in branches]
        longest = max(branch[0].row_length for branch in branches)
        if not self._cache.fits(len(self._rows), longest):
            self._reserve(longest)
        (ids, at), settings = self._upload([tokens, positions], branches)
        logits = self._forward.step(
            self._cache, ids, at, longest=longest, rows=self._compiled_rows(branches)
        )
        finished = self._sample(branches, logits, settings)
        for index, row in enumerate(self._rows.in_use):
            for seq in row.active:
                if seq.finish is not None and seq.request.is_continued:
                    prompt = self._prompts[seq.request.prompt_ids] if seq.shared else None
                    self._keep(seq, self._cache.row(index, seq.row_length - 1, prompt))
        self._count(
            decode_steps=1, decode_slot_steps=len(branches), decode_tokens=sum(map(len, branches))
        )
        self._rows.split()
        return finished

    def _start(self, groups: Sequence[BranchGroup]) -> list[Generation]:
        """Prefill the prompts of groups and sample their first tokens."""
        by_prompt: dict[tuple[int, ...], list[BranchGroup]] = {}
        continued: dict[tuple[int, ...], PromptPrefix] = {}
        for group in groups:
            prompt = group[0].request.prompt_ids
            by_prompt.setdefault(prompt, []).append(group)
            for seq in group:
                prefix = self._continued.pop(seq.request.previous or "", None)
                if prefix is not None and prompt[: len(prefix.token_ids)] == prefix.token_ids:
                    continued[prompt] = prefix
        finished = []
        num_waiting = len(groups)
        unmatched = [prompt for prompt in by_prompt if prompt not in continued]
        resumed = resumed_prompts([by_prompt[prompt][0][0].request for prompt in unmatched])
        new = [prompt for prompt in unmatched if prompt not in resumed]
        beginnings = list(dict.fromkeys(resumed.values()))
        self._share_prefix([*beginnings, *new])
        prefixes = self._prefill_beginnings(beginnings)
        continued |= {prompt: prefixes[beginning] for prompt, beginning in resumed.items()}
        rests = {
            prompt: len(prompt) - len(prefix.token_ids) for prompt, prefix in continued.items()
        }
        for prompts in [*prefill_batches(new), *similar_batches(rests)]:
            own_prefixes = [continued[prompt] for prompt in prompts if prompt in continued]
            prefilled = self._forward.prefill(prompts, own_prefixes or self._prefix)
            if own_prefixes:
                shared = sum(len(prefix.token_ids) for prefix in own_prefixes)
            elif self._prefix is not None:
                shared = len(self._prefix.token_ids) * len(prompts)
            else:
                shared = 0
            computed = sum(map(len, prompts)) - shared
            self._count(prefills=1, prefill_prompts=len(prompts), prefill_tokens=computed)
            if (
                self._prefix is None
                and len(new) == len(by_prompt) == 1
                and len(prompts[0]) > MIN_PREFIX
            ):
                length = len(prompts[0]) - 1
                self._prefix = PromptPrefix(prompts[0][:length], prefilled.cache.select(0, length))
            entries = [
                (group, source)
                for source, prompt in enumerate(prompts)
                for group in by_prompt[prompt]
            ]
            num_waiting -= len(entries)
            finished += self._begin(prefilled, entries, num_waiting=num_waiting)
        return finished

    def _prefill_beginnings(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], PromptPrefix]:
        """Prefill prompts with which several sequences begin; their rests are computed later."""
        prefixes: dict[tuple[int, ...], PromptPrefix] = {}
        for batch in prefill_batches(prompts):
            prefilled = self._forward.prefill(batch, self._prefix)
            common = 0 if self._prefix is None else len(self._prefix.token_ids)
            self._count(prefills=1, prefill_tokens=sum(len(prompt) - common for prompt in batch))
            for index, prompt in enumerate(batch):
                cache = prefilled.cache.select(index, len(prompt))
                prefixes[prompt] = PromptPrefix(prompt, cache)
        return prefixes

    def _share_prefix(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Update the common prefix of all prompts so far.

        It becomes shorter until a prompt shares fewer than MIN_PREFIX tokens; then a new one is
        computed.
        """
        if not prompts:
            return
        if self._prefix is not None:
            length = common_prefix([self._prefix.token_ids, *(prompt[:-1] for prompt in prompts)])
            self._prefix = self._prefix.cut(length) if length >= MIN_PREFIX else None
        if self._prefix is None and len(prompts) > 1:
            length = common_prefix([prompt[:-1] for prompt in prompts])
            if length >= MIN_PREFIX:
                shared = prompts[0][:length]
                self._prefix = PromptPrefix(shared, self._forward.prefill([shared]).cache)
                self._count(prefill_tokens=length)

    def _begin(
        self, prefilled: Prefilled, entries: Sequence[tuple[BranchGroup, int]], *, num_waiting: int
    ) -> list[Generation]:
        """Sample the first tokens of groups and assign their rows.

        `entries` are groups with their prompt's index in the prefill. Rows for `num_waiting`
        further groups stay free.
        """
        groups = [group for group, _ in entries]
        for group, source in entries:
            prompt = group[0].request.prompt_ids
            if group[0].shared and prompt not in self._prompts:
                self._prompts[prompt] = prefilled.cache.select(source, len(prompt))
        (sources,), settings = self._upload([[source for _, source in entries]], groups)
        finished = self._sample(groups, prefilled.logits[sources], settings)
        for group, source in entries:
            for seq in group:
                if seq.finish is not None and seq.request.is_continued:
                    self._keep(seq, prefilled.cache.select(source, len(seq.request.prompt_ids)))
        begun = [(Row(group), source) for group, source in entries]
        for row, _ in begun:
            row.split()
        unfinished = [(self._rows.assign(row), row, source) for row, source in begun if row.active]
        if unfinished:
            copies = self._rows.assign_rows(self._max_rows() - num_waiting)
            filled = [entry for entry in unfinished if not entry[1].active[0].shared]
            width = max(row.length for _, row, _ in unfinished)
            self._reserve(width)
            targets = [index for index, _, _ in filled]
            prompt_indices = [source for _, _, source in filled]
            self._cache.store(prefilled.cache, prompt_indices, targets, width - 1)
            self._copy(copies)
        return finished

    def _keep(self, seq: RunningSequence, cache: PromptCache) -> None:
        """Keep a finished response's states for its continuation; drop the oldest of too many."""
        self._continued[seq.request.id] = PromptPrefix(seq.stored_ids, cache)
        while self._keeps_too_many():
            del self._continued[next(iter(self._continued))]

    def _keeps_too_many(self) -> bool:
        if len(self._continued) > 2 * self._scheduler.slots:
            return True
        bound = self._max_continued_tokens
        tokens = sum(len(prefix.token_ids) for prefix in self._continued.values())
        return bound is not None and tokens > bound

    def _compiled_rows(self, branches: Sequence[BranchGroup]) -> cpu_kernels.Rows | None:
        """Return the rows of these branches and their shared prompts, for compiled attention."""
        if not self._compiled:
            return None
        row_prompts = [first.request.prompt_ids if first.shared else None for first, *_ in branches]
        shared = [prompt for prompt in dict.fromkeys(row_prompts) if prompt is not None]
        prompts = None
        split = torch.tensor(
            [0 if first.shared else len(first.request.prompt_ids) for first, *_ in branches]
        )
        if shared:
            prompt_index = torch.tensor(
                [-1 if prompt is None else shared.index(prompt) for prompt in row_prompts]
            )
            # [prompts, layers, 2]
            addresses = torch.tensor([self._prompts[prompt].addresses for prompt in shared])
            lengths_of_prompts = torch.tensor([len(prompt) for prompt in shared])
            prompts = cpu_kernels.Prompts(
                prompt_index, lengths_of_prompts, addresses.permute(1, 2, 0).contiguous()
            )
        lengths = torch.tensor([first.row_length for first, *_ in branches])
        return cpu_kernels.Rows(torch.zeros_like(lengths), split, lengths, prompts)

    def _upload(
        self, integers: Sequence[Sequence[int]], branches: Sequence[BranchGroup]
    ) -> tuple[tuple[Tensor, ...], SamplingSettings]:
        """Copy rows of `[n]` integers and sampling settings to the device as one block."""
        sequences = flat(branches)
        count = len(integers)
        n = len(branches)
        m = len(sequences)
        block = np.empty((count + 2) * n + (m if m == n else 2 * m), dtype=np.int64)
        per_row = block[: (count + 2) * n].reshape(count + 2, n)
        per_draw = block[(count + 2) * n :].reshape(-1, m)
        per_row[:count] = integers
        values = per_row[count:].view(np.float64)
        values[0] = [branch[0].request.temperature for branch in branches]
        values[1] = [branch[0].request.top_p for branch in branches]
        per_draw[0].view(np.float64)[:] = [seq.next_uniform() for seq in sequences]
        counts = None if m == n else [len(branch) for branch in branches]
        if counts is not None:
            per_draw[1] = np.repeat(np.arange(n), counts)
        uploaded = upload(block, self._forward.device)
        rows = uploaded[: (count + 2) * n].view(-1, n)
        per_token = uploaded[(count + 2) * n :].view(-1, m)
        uniforms = per_token[0].view(torch.float64)[:, None]
        draws = UniformDraws(uniforms, counts, None if counts is None else per_token[1])
        settings = SamplingSettings.of(
            values, rows[count:].view(torch.float64), draws, compiled=self._compiled
        )
        return rows[:count].unbind(), settings

    def _sample(
        self, branches: Sequence[BranchGroup], logits: Tensor, settings: SamplingSettings
    ) -> list[Generation]:
        """Append each sequence's next token, from `[n, vocabulary]` logits; return finished ones.

        This is a step's only wait for the device.
        """
        tokens, logprobs = sample(
            _mask_tokens(logits, [branch[0].masked_tokens for branch in branches]), settings
        )
        # float64 holds every token id, so one transfer brings both
        sampled_ids, scored = torch.stack((tokens.double(), logprobs.double())).tolist()
        version = self._require_weights()
        require_finite(sum(scored), version, logits.dtype)
        sequences = flat(branches)
        self._count(sampled_tokens=len(sequences))
        for seq, token, logprob in zip(sequences, sampled_ids, scored, strict=True):
            seq.append(int(token), logprob)
        finished = sorted(
            (seq for seq in sequences if seq.finish is not None), key=lambda seq: seq.order
        )
        return [seq.generation(seq.finish, version) for seq in finished if seq.finish is not None]

    def _max_rows(self) -> int:
        return self._scheduler.max_rows(self._scheduler.longest_reservation(self._rows.sequences))

    def _assign_rows(self) -> None:
        """Give free rows to paused branches."""
        if not self._rows.has_paused:
            return
        limit = self._max_rows()
        if len(self._rows.in_use) < limit:
            copies = self._rows.assign_rows(limit)
            self._reserve(copies.length)
            self._copy(copies)

    def _copy(self, copies: RowCopies) -> None:
        if copies.sources:
            self._cache.move(copies.sources, copies.targets, copies.length)

    def _reserve(self, longest: int) -> None:
        running = self._rows.sequences
        longest = max([longest, *(row.length for row in self._rows.in_use)])
        limit = max(seq.reserved for seq in running)
        max_rows = self._max_rows() if self._memory is not None else None
        bound = self._scheduler.cache_tokens
        prompt_tokens = sum(map(len, self._prompts))
        max_positions = None if bound is None or not prompt_tokens else bound - prompt_tokens
        self._cache.reserve(
            len(self._rows), longest, limit, max_rows=max_rows, max_positions=max_positions
        )
        if self.cache_bytes > self.stats.cache_bytes_peak:
            self.stats = replace(self.stats, cache_bytes_peak=self.cache_bytes)

    def _free_buffers(self) -> None:
        """Close the gaps, and free the cache when nothing runs."""
        self._copy(self._rows.compact())
        self._drop_prompts()
        if not self._rows and not self._scheduler.waiting:
            self._prefix = None
        if not self._rows and self._cache.rows:
            self._cache.release()
            self._free_unused()

    def _drop_prompts(self) -> None:
        """Free the prompts that no row shares any more."""
        if self._prompts:
            firsts = [row.active[0] for row in self._rows.in_use]
            shared = {seq.request.prompt_ids for seq in firsts if seq.shared}
            self._prompts = {
                prompt: states for prompt, states in self._prompts.items() if prompt in shared
            }

    def _free_unused(self) -> None:
        """Return unused memory to the device.

        An update would otherwise split the cache's large blocks for its own sizes.
        """
        if self._memory is not None:
            self._memory.free_unused()

    def _cache_token_bound(self, memory: CudaMemory) -> int:
        """Return the number of positions that fit in the free memory."""
        model = self._forward.model
        position_bytes = self._forward.position_bytes
        sampling_bytes = step_bytes(
            slots=self._scheduler.slots,
            vocabulary=self._forward.vocabulary,
            prefill_tokens=PREFILL_TOKENS,
            position_bytes=position_bytes,
            hidden=model.config.hidden_size,
            intermediate=model.config.intermediate_size,
            width=model.dtype.itemsize,
        )
        return cache_token_bound(
            memory.free_bytes(), position_bytes=position_bytes, step_bytes=sampling_bytes
        )

    def _divide_memory(self, cache_tokens: int) -> None:
        """Bound the positions of rows, and those of responses to continue to a quarter."""
        is_continued = any(request.is_continued for request in self._scheduler.waiting.values())
        self._max_continued_tokens = cache_tokens // 4 if is_continued else 0
        self._scheduler.cache_tokens = cache_tokens - self._max_continued_tokens

    def _count(self, **added: int) -> None:
        self.stats = replace(
            self.stats, **{name: getattr(self.stats, name) + n for name, n in added.items()}
        )


def open_native_engine(
    rollout: RolloutConfig, model: PreTrainedModel, gpu_processes: float = 1
) -> NativeEngine:
    """Open the engine of `rollout.engine: native` (`config.engines.EngineKind.open`)."""
    memory = (
        CudaMemory(model.device, processes=gpu_processes) if model.device.type == "cuda" else None
    )
    # one process has no load to balance
    reproducible = rollout.is_reproducible or not rollout.engines
    return NativeEngine(model, rollout.native, reproducible=reproducible, memory=memory)


def _mask_tokens(logits: Tensor, masked_tokens: Sequence[Sequence[int]]) -> Tensor:
    """Set the logits of `masked_tokens[i]` in row i of `[n, vocabulary]` to -inf, in place."""
    indices = [(row, token) for row, tokens in enumerate(masked_tokens) for token in tokens]
    if indices:
        rows, tokens = upload(np.array(indices, dtype=np.int64), logits.device).unbind(1)
        logits[rows, tokens] = -torch.inf
    return logits


def resumed_prompts(
    requests: Sequence[GenerationRequest],
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return prompts of resumed responses, each with the prompt before its `offset` tokens.

    Only prompts that several responses share are included, and at most `PREFILL_TOKENS` of their
    tokens.
    """
    beginnings = {}
    for request in requests:
        if request.offset:
            beginnings[request.prompt_ids] = request.prompt_ids[: -request.offset]
    count = Counter(beginnings.values())
    shared = [prompt for prompt in count if count[prompt] > 1 and len(prompt) >= MIN_PREFIX]
    held = dict(zip(shared, accumulate(map(len, shared)), strict=True))
    return {
        ids: prompt
        for ids, prompt in beginnings.items()
        if held.get(prompt, PREFILL_TOKENS + 1) <= PREFILL_TOKENS
    }


def similar_batches(rests: Mapping[tuple[int, ...], int]) -> Iterator[list[tuple[int, ...]]]:
    """Split prompts like `prefill_batches`, but by the tokens to compute, for little padding."""
    batch: list[tuple[int, ...]] = []
    width = 0
    for prompt in sorted(rests, key=lambda prompt: rests[prompt]):
        is_padded = width >= MIN_PREFILL and rests[prompt] > MAX_PADDING * rests[batch[0]]
        positions = max(map(len, (*batch, prompt))) * (len(batch) + 1)
        if batch and (is_padded or positions > PREFILL_TOKENS):
            yield batch
            batch = []
        batch.append(prompt)
        width = rests[prompt] * len(batch)
    if batch:
        yield batch


def prefill_batches(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Split prompts, in order, into prefills of at most `PREFILL_TOKENS` positions.

    A longer prompt is computed alone.
    """
    batch: list[tuple[int, ...]] = []
    width = 0
    for prompt in prompts:
        if batch and max(width, len(prompt)) * (len(batch) + 1) > PREFILL_TOKENS:
            yield batch
            batch = []
            width = 0
        batch.append(prompt)
        width = max(width, len(prompt))
    if batch:
        yield batch
