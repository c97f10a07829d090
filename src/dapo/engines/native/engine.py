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

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dapo.config.rollout_options import NativeConfig, RolloutConfig
from dapo.core.memory import explain_out_of_memory
from dapo.engines.engine import Capabilities, WeightSource
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
MIN_PREFILL = 128  # positions; a smaller prefill takes prompts of any length
MAX_PADDING = 1.25  # the longest prompt of a larger prefill over its shortest
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

        Args:
            model: the model to sample from.
            config: the section `rollout.native`.
            reproducible: whether equal requests give equal bits in any batch
                (`compatibility.patch_model`).
            model_kernels: the kernels of the model's layers; None: those of its device.
            memory: the GPU whose free memory bounds the cache; None: the model's own if it is on
                one, else the cache grows with the running sequences.

        Raises:
            EngineError: the engine cannot serve this model.
        """
        super().__init__(version=0)
        model.eval().requires_grad_(False)
        slots = config.slots_on(model.device.type)
        self._forward = patch_model(
            model,
            rows=slots,
            kernels=config.kernels or DEFAULT_KERNELS,
            reproducible=reproducible,
            model_kernels=model_kernels,
        )
        self._scheduler = Scheduler(
            slots,
            max_positions=getattr(model.config, "max_position_embeddings", None),
            vocabulary=self._forward.vocabulary,
            shares_prompts=self._forward.shares_prompts,
        )
        if memory is None and model.device.type == "cuda":
            memory = CudaMemory(model.device)
        self._memory = memory
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
        prompt_bytes = sum(prompt.num_bytes for prompt in self._prompts.values())
        continued_bytes = sum(prefix.cache.num_bytes for prefix in self._continued.values())
        return self._cache.num_bytes + prompt_bytes + continued_bytes

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(partial=self._partial)

    @property
    def in_flight(self) -> list[str]:
        running = [seq.request.id for seq in self._rows.sequences]
        return running + list(self._scheduler.waiting)

    @explain_out_of_memory(torch.OutOfMemoryError, "giving the engine its weights", FEWER_SLOTS)
    def load_weights(self, weights: WeightSource, version: int) -> None:
        self._require_idle("load_weights")
        # no version until all weights are there: a failure leaves a mixture that must not sample
        self._version = None
        # states of the old weights: a continuation must not attend to them
        self._continued.clear()
        self._forward.load_weights(weights)
        self._version = version

    def drop_weights(self) -> None:
        """Free the memory of prepacked weights, on a GPU of all weights.

        Raises:
            EngineError: requests are in flight.
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

        Raises:
            EngineError: the logits are not finite; the engine can then only be closed.
        """
        self._require_open()
        # measured while the cache is empty: later its own memory would count as used
        if self._memory is not None and not self._rows and self._scheduler.waiting:
            self._divide_memory(self._cache_token_bound(self._memory))
        finished: list[Generation] = []
        if self._rows:
            finished = self._decode()
        self._drop_prompts()
        # paused branches before new groups: their tokens are in the cache already
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
        stopped = []
        for name in names:
            if name in running:
                stopped.append(running[name])
            else:
                stopped.append(RunningSequence(waiting.pop(name)))
        self._rows.remove(set(names))
        self._free_buffers()
        return [seq.generation("aborted", self._require_weights()) for seq in stopped]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # the model first: `free_unused` returns only what nothing refers to
        del self._forward
        self._rows.clear()
        self._prefix = None
        self._prompts = {}
        self._continued = {}
        self._cache.release()
        self._free_unused()
        self._scheduler.waiting.clear()

    def _partial(self) -> dict[str, tuple[int, ...]]:
        return {seq.request.id: tuple(seq.token_ids) for seq in self._rows.sequences}

    def _decode(self) -> list[Generation]:
        """Run one decode step of all rows, and free the finished rows."""
        branches = [row.active for row in self._rows.in_use]
        tokens = [branch[0].token_ids[-1] for branch in branches]
        positions = [branch[0].length - 1 for branch in branches]
        longest = max(branch[0].row_length for branch in branches)
        if not self._cache.fits(len(self._rows), longest):
            self._reserve(longest)
        (ids, device_positions), settings = self._upload([tokens, positions], branches)
        compiled_rows = self._compiled_rows(branches)
        logits = self._forward.step(
            self._cache, ids, device_positions, longest=longest, rows=compiled_rows
        )
        finished = self._sample(branches, logits, settings)
        # before `split` gives the finished rows away
        for index, row in enumerate(self._rows.in_use):
            for seq in row.active:
                if seq.finish is not None and seq.request.is_continued:
                    prompt = self._prompts[seq.request.prompt_ids] if seq.shared else None
                    self._keep(seq, self._cache.row(index, seq.row_length - 1, prompt))
        self._count(
            decode_steps=1,
            decode_slot_steps=len(branches),
            decode_tokens=sum(map(len, branches)),
        )
        self._rows.split()
        return finished

    def _start(self, groups: Sequence[BranchGroup]) -> list[Generation]:
        """Prefill the prompts of groups and sample their first tokens."""
        by_prompt: dict[tuple[int, ...], list[BranchGroup]] = {}
        for group in groups:
            by_prompt.setdefault(group[0].request.prompt_ids, []).append(group)
        prefixes = self._take_continued(groups)
        unmatched = [prompt for prompt in by_prompt if prompt not in prefixes]
        resumed = resumed_prompts([by_prompt[prompt][0][0].request for prompt in unmatched])
        new = [prompt for prompt in unmatched if prompt not in resumed]
        beginnings = list(dict.fromkeys(resumed.values()))
        self._share_prefix([*beginnings, *new])
        computed = self._prefill_beginnings(beginnings)
        for prompt, beginning in resumed.items():
            prefixes[prompt] = computed[beginning]
        finished = []
        num_waiting = len(groups)
        new_tokens = {
            prompt: len(prompt) - len(prefix.token_ids) for prompt, prefix in prefixes.items()
        }
        for prompts in [*prefill_batches(new), *similar_batches(new_tokens)]:
            # a batch is either of new prompts alone or of prompts with prefixes alone
            batch_prefixes = [prefixes[prompt] for prompt in prompts if prompt in prefixes]
            prefilled = self._prefill(prompts, batch_prefixes)
            if self._prefix is None and len(new) == len(by_prompt) == 1:
                self._share_prompt(prompts[0], prefilled)
            entries = []
            for source, prompt in enumerate(prompts):
                entries += [(group, source) for group in by_prompt[prompt]]
            num_waiting -= len(entries)
            finished += self._begin(prefilled, entries, num_waiting=num_waiting)
        return finished

    def _take_continued(self, groups: Sequence[BranchGroup]) -> dict[tuple[int, ...], PromptPrefix]:
        """Return the stored states of the responses that groups continue, by prompt.

        Stored states are taken by one request only, so they are dropped even if the prompt does not
        begin with their tokens.
        """
        continued: dict[tuple[int, ...], PromptPrefix] = {}
        for group in groups:
            prompt = group[0].request.prompt_ids
            for seq in group:
                prefix = self._continued.pop(seq.request.previous or "", None)
                # a chat template may render earlier turns anew: then nothing can be reused, and a
                # prefill must compute one token to have logits
                if prefix is not None and prompt[:-1][: len(prefix.token_ids)] == prefix.token_ids:
                    continued[prompt] = prefix
        return continued

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], prefixes: Sequence[PromptPrefix]
    ) -> Prefilled:
        """Prefill prompts behind a prefix of each; without `prefixes` behind the common one."""
        prefilled = self._forward.prefill(prompts, prefixes or self._prefix)
        stored_tokens = sum(len(prefix.token_ids) for prefix in prefixes)
        if not prefixes and self._prefix is not None:
            stored_tokens = len(self._prefix.token_ids) * len(prompts)
        self._count(
            prefills=1,
            prefill_prompts=len(prompts),
            prefill_tokens=sum(map(len, prompts)) - stored_tokens,
        )
        return prefilled

    def _share_prompt(self, prompt: tuple[int, ...], prefilled: Prefilled) -> None:
        """Make a prompt that was prefilled alone the common prefix."""
        if len(prompt) > MIN_PREFIX:
            # without the last token: a prefill must compute one to have logits
            length = len(prompt) - 1
            self._prefix = PromptPrefix(prompt[:length], prefilled.cache.select(0, length))

    def _prefill_beginnings(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], PromptPrefix]:
        """Prefill prompts with which several sequences begin; the rest of each is computed later."""
        prefixes: dict[tuple[int, ...], PromptPrefix] = {}
        for batch in prefill_batches(prompts):
            prefilled = self._forward.prefill(batch, self._prefix)
            stored_tokens = 0
            if self._prefix is not None:
                stored_tokens = len(self._prefix.token_ids) * len(batch)
            self._count(prefills=1, prefill_tokens=sum(map(len, batch)) - stored_tokens)
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
        # without last tokens: a prefill must compute one of each prompt to have its logits
        shortened = [prompt[:-1] for prompt in prompts]
        if self._prefix is not None:
            length = common_prefix([self._prefix.token_ids, *shortened])
            self._prefix = self._prefix.cut(length) if length >= MIN_PREFIX else None
        if self._prefix is None and len(prompts) > 1:
            length = common_prefix(shortened)
            if length >= MIN_PREFIX:
                shared = prompts[0][:length]
                self._prefix = PromptPrefix(shared, self._forward.prefill([shared]).cache)
                self._count(prefill_tokens=length)

    def _begin(
        self, prefilled: Prefilled, entries: Sequence[tuple[BranchGroup, int]], *, num_waiting: int
    ) -> list[Generation]:
        """Sample the first tokens of groups and assign their rows; return finished responses.

        Args:
            prefilled: the prompts of a prefill.
            entries: groups with their prompt's index in the prefill.
            num_waiting: the number of further groups for which rows stay free.
        """
        groups = []
        prompt_indices = []
        for group, source in entries:
            groups.append(group)
            prompt_indices.append(source)
            prompt = group[0].request.prompt_ids
            if group[0].shared and prompt not in self._prompts:
                self._prompts[prompt] = prefilled.cache.select(source, len(prompt))
        (sources,), settings = self._upload([prompt_indices], groups)
        finished = self._sample(groups, prefilled.logits[sources], settings)
        for group, source in entries:
            for seq in group:
                if seq.finish is not None and seq.request.is_continued:
                    self._keep(seq, prefilled.cache.select(source, len(seq.request.prompt_ids)))
        # every prompt has its row before paused branches get the free ones
        unfinished = []
        for group, source in entries:
            row = Row(group)
            row.split()
            if row.active:
                unfinished.append((self._rows.assign(row), row, source))
        if unfinished:
            copies = self._rows.assign_rows(self._max_rows() - num_waiting)
            width = max(row.length for _, row, _ in unfinished)
            self._reserve(width)
            targets = []
            copied_prompts = []
            for index, row, source in unfinished:
                # a shared prompt is read where it is, not from the row
                if not row.active[0].shared:
                    targets.append(index)
                    copied_prompts.append(source)
            # the last token of a row has no keys and values before the next step
            self._cache.store(prefilled.cache, copied_prompts, targets, width - 1)
            # after the prompts: a branch's copy needs them in the row that it has left
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
        prompt_numbers: dict[tuple[int, ...], int] = {}
        prompt_index = []  # the shared prompt of each row; -1: its prompt is in the row
        split = []  # the prompt's positions in each row
        lengths = []
        for branch in branches:
            first = branch[0]
            prompt = first.request.prompt_ids
            lengths.append(first.row_length)
            if first.shared:
                prompt_index.append(prompt_numbers.setdefault(prompt, len(prompt_numbers)))
                split.append(0)
            else:
                prompt_index.append(-1)
                split.append(len(prompt))
        prompts = None
        if prompt_numbers:
            # [prompts, layers, 2]
            addresses = torch.tensor([self._prompts[prompt].addresses for prompt in prompt_numbers])
            prompts = cpu_kernels.Prompts(
                torch.tensor(prompt_index),
                torch.tensor([len(prompt) for prompt in prompt_numbers]),
                addresses.permute(1, 2, 0).contiguous(),
            )
        row_lengths = torch.tensor(lengths)
        return cpu_kernels.Rows(
            torch.zeros_like(row_lengths), torch.tensor(split), row_lengths, prompts
        )

    def _upload(
        self, integers: Sequence[Sequence[int]], branches: Sequence[BranchGroup]
    ) -> tuple[tuple[Tensor, ...], SamplingSettings]:
        """Copy rows of `[n]` integers and sampling settings to the device as one block.

        There is one transfer, because each delays the decode step more than its bytes do. The block
        is of int64: the integers, temperatures and `top_p` per row, then the uniform numbers per
        sequence and, if rows have several sequences, the row of each.
        """
        sequences = flat(branches)
        count = len(integers)
        n = len(branches)
        m = len(sequences)
        row_values = (count + 2) * n
        draw_values = m if m == n else 2 * m
        block = np.empty(row_values + draw_values, dtype=np.int64)
        per_row = block[:row_values].reshape(count + 2, n)
        per_draw = block[row_values:].reshape(-1, m)
        per_row[:count] = integers
        # float64 has the width of int64, so a view of the block holds both
        values = per_row[count:].view(np.float64)
        values[0] = [branch[0].request.temperature for branch in branches]
        values[1] = [branch[0].request.top_p for branch in branches]
        per_draw[0].view(np.float64)[:] = [seq.next_uniform() for seq in sequences]
        counts = None
        if m != n:
            counts = [len(branch) for branch in branches]
            per_draw[1] = np.repeat(np.arange(n), counts)
        uploaded = upload(block, self._forward.device)
        rows = uploaded[:row_values].view(-1, n)
        per_token = uploaded[row_values:].view(-1, m)
        uniforms = per_token[0].view(torch.float64)[:, None]
        draws = UniformDraws(uniforms, counts, None if counts is None else per_token[1])
        settings = SamplingSettings.of(
            values, rows[count:].view(torch.float64), draws, compiled=self._compiled
        )
        return rows[:count].unbind(), settings

    def _sample(
        self, branches: Sequence[BranchGroup], logits: Tensor, settings: SamplingSettings
    ) -> list[Generation]:
        """Append each sequence's next token, and return the finished responses.

        This is a step's only wait for the device.

        Args:
            branches: the n branches, a row each.
            logits: `[n, vocabulary]`, of which masked tokens are overwritten.
            settings: the sampling settings of the rows.
        """
        logits = _mask_tokens(logits, [branch[0].masked_tokens for branch in branches])
        tokens, logprobs = sample(logits, settings)
        # float64 holds every token id, so one transfer brings both
        columns = torch.stack((tokens.double(), logprobs.double()))
        token_ids, token_logprobs = columns.tolist()
        version = self._require_weights()
        # one sum tells of a nan or an infinity in any row
        require_finite(sum(token_logprobs), version, logits.dtype)
        sequences = flat(branches)
        self._count(sampled_tokens=len(sequences))
        for seq, token, logprob in zip(sequences, token_ids, token_logprobs, strict=True):
            seq.append(int(token), logprob)
        finished = [seq for seq in sequences if seq.finish is not None]
        # in the order of their start, which does not depend on the rows that they were given
        finished.sort(key=lambda seq: seq.order)
        generations = []
        for seq in finished:
            assert seq.finish is not None
            generations.append(seq.generation(seq.finish, version))
        return generations

    def _max_rows(self) -> int:
        longest = self._scheduler.longest_reservation(self._rows.sequences)
        return self._scheduler.max_rows(longest)

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
        """Make room in the cache for rows of `longest` positions, and count its bytes."""
        row_lengths = [row.length for row in self._rows.in_use]
        longest = max([longest, *row_lengths])
        limit = max(seq.reserved for seq in self._rows.sequences)
        max_rows = None
        if self._memory is not None:
            max_rows = self._max_rows()
        max_positions = None
        prompt_tokens = sum(map(len, self._prompts))
        # shared prompts lie outside of the slots, but in the same memory
        if self._scheduler.cache_tokens is not None and prompt_tokens:
            max_positions = self._scheduler.cache_tokens - prompt_tokens
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
        if not self._prompts:
            return
        firsts = [row.active[0] for row in self._rows.in_use]
        shared = {seq.request.prompt_ids for seq in firsts if seq.shared}
        for prompt in self._prompts.keys() - shared:
            del self._prompts[prompt]

    def _free_unused(self) -> None:
        """Return unused memory to the device.

        An update would otherwise split the cache's large blocks for its own sizes.
        """
        if self._memory is not None:
            self._memory.free_unused()

    def _cache_token_bound(self, memory: CudaMemory) -> int:
        """Return the number of positions that fit in the free memory."""
        model = self._forward.model
        hidden = model.config.hidden_size
        # GPT-2, GPT-BigCode, OPT and DBRX name it otherwise: published ones have four times at most
        intermediate = getattr(model.config, "intermediate_size", 4 * hidden)
        position_bytes = self._forward.position_bytes
        sampling_bytes = step_bytes(
            slots=self._scheduler.slots,
            vocabulary=self._forward.vocabulary,
            prefill_tokens=PREFILL_TOKENS,
            position_bytes=position_bytes,
            hidden=hidden,
            intermediate=intermediate,
            width=model.dtype.itemsize,
        )
        return cache_token_bound(
            memory.free_bytes(), position_bytes=position_bytes, step_bytes=sampling_bytes
        )

    def _divide_memory(self, cache_tokens: int) -> None:
        """Bound the positions of rows, and those of responses to continue to a quarter."""
        self._max_continued_tokens = 0
        if any(request.is_continued for request in self._scheduler.waiting.values()):
            self._max_continued_tokens = cache_tokens // 4
        self._scheduler.cache_tokens = cache_tokens - self._max_continued_tokens

    def _count(self, **increments: int) -> None:
        totals = {}
        for name, increment in increments.items():
            totals[name] = getattr(self.stats, name) + increment
        self.stats = replace(self.stats, **totals)


def open_native_engine(
    rollout: RolloutConfig, model: PreTrainedModel, gpu_processes: float = 1
) -> NativeEngine:
    """Open the engine of `rollout.engine: native` (`config.engines.EngineKind.open`).

    Args:
        rollout: the section `rollout`.
        model: the model to sample from, which the engine takes over.
        gpu_processes: the number of processes that divide the GPU's free memory.
    """
    memory = None
    if model.device.type == "cuda":
        memory = CudaMemory(model.device, processes=gpu_processes)
    reproducible = rollout.is_reproducible
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
    shared = set()
    num_tokens = 0
    for prompt, count in Counter(beginnings.values()).items():
        if count > 1 and len(prompt) >= MIN_PREFIX:
            # all are held at once, until the rest of their prompts is computed
            num_tokens += len(prompt)
            if num_tokens > PREFILL_TOKENS:
                break
            shared.add(prompt)
    return {ids: prompt for ids, prompt in beginnings.items() if prompt in shared}


def similar_batches(new_tokens: Mapping[tuple[int, ...], int]) -> Iterator[list[tuple[int, ...]]]:
    """Split prompts with prefixes into prefills of at most `PREFILL_TOKENS` positions.

    Prompts of a batch have similar numbers of tokens to compute, for little padding.
    """
    batch: list[tuple[int, ...]] = []
    width = 0
    for prompt in sorted(new_tokens, key=lambda prompt: new_tokens[prompt]):
        is_padded = width >= MIN_PREFILL and new_tokens[prompt] > MAX_PADDING * new_tokens[batch[0]]
        # whole prompts count: their prefixes are copied into the tensors of the prefill
        positions = max(map(len, (*batch, prompt))) * (len(batch) + 1)
        if batch and (is_padded or positions > PREFILL_TOKENS):
            yield batch
            batch = []
        batch.append(prompt)
        width = new_tokens[prompt] * len(batch)
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
