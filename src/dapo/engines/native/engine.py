"""The native rollout engine: continuous batching around a transformers model, in this process.

A poll runs one decode step over all live sequences, gives the freed slots to the queue, prefills each new prompt once
for all its adjacent requests, and samples their first tokens from the prefill. Live sequences fill rows 0 .. n-1 of the
slots without gaps: finished ones are replaced from the queue, or the last rows move into their places.

One prompt's keys and values are kept beyond its prefill: that of the group at the head of the queue, while some of its
requests have started and others wait for slots. So memory is bounded by the slots, one prefill and one prompt.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.native.cache import SlotCache
from dapo.engines.native.forward import Forward, Prefilled
from dapo.engines.native.graphs import Recorder
from dapo.engines.native.linear import drop_packed
from dapo.engines.native.sampling import sample
from dapo.engines.native.scheduler import Live, Scheduler
from dapo.engines.native.support import adopt
from dapo.engines.native.weights import copy_weights
from dapo.types import Finish, Generation, GenerationRequest

PREFILL_TOKENS = 4096
"""Positions in one prefill, padding included (a longer prompt goes alone): bounds its activations."""


@dataclass(frozen=True)
class EngineStats:
    """What the engine has computed since it was made."""

    prefills: int = 0
    prefill_prompts: int = 0
    prefill_tokens: int = 0
    """Prompt tokens, padding not counted; a prompt shared by a group counts once."""
    decode_steps: int = 0
    decode_slot_steps: int = 0
    """Rows computed, over all decode steps; every one of them a live sequence."""
    sampled_tokens: int = 0
    cache_bytes_peak: int = 0


@dataclass(frozen=True)
class _Held:
    """The prompt of a group of which some requests have started and others wait."""

    prompt_ids: tuple[int, ...]
    prefilled: Prefilled


class NativeEngine:
    """A `RolloutEngine` in process. `model` is the engine's own: its weights and attention are replaced.

    Until the first `load_weights` it samples from the weights that `model` came with, as version 0. Raises EngineError
    for a model that it cannot serve (see `support`).

    `slots` sequences are decoded at a time; `cache_tokens` bounds the slots in use times the longest of them (prompt +
    max_new_tokens). Without it memory follows what is live. `record`: how decode steps are recorded, if they are.
    """

    def __init__(
        self, model: PreTrainedModel, *, slots: int, cache_tokens: int | None = None, record: Recorder | None = None
    ) -> None:
        forward = adopt(model.eval().requires_grad_(False), rows=slots, record=record)
        self._forward: Forward | None = forward
        self._scheduler = Scheduler(
            slots,
            cache_tokens,
            max_positions=getattr(model.config, "max_position_embeddings", None),
            vocabulary=forward.vocabulary,
        )
        self._cache = SlotCache()
        self._rows: list[Live | None] = []  # as in the cache; None: to be filled again before the poll ends
        self._held: _Held | None = None
        self._version: int | None = 0
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """Counts of the work done so far."""
        return self._stats

    @property
    def cache_bytes(self) -> int:
        """Memory that the slots take at present."""
        return self._cache.num_bytes

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Copy a complete set of weights, by name. If that fails the engine refuses work until one succeeds."""
        forward = self._open()
        self._require_idle("load_weights")
        self._version = None
        copy_weights(weights, forward.model)
        self._version = version

    def drop_weights(self) -> None:
        """Free what packed weights take. Raises EngineError while requests are in flight."""
        forward = self._open()
        self._require_idle("drop_weights")
        self._version = None
        drop_packed(forward.model)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; adjacent ones with the same prompt share its prefill. Raises EngineError, queueing none."""
        self._open()
        self._loaded_version()
        self._scheduler.submit(requests, {one.request.id for one in self._live()})

    @torch.inference_mode()
    def poll(self) -> list[Generation]:
        """Sample one token for every live sequence, start waiting ones, and return what has finished.

        Raises EngineError if the logits are not finite; then the engine can only be closed.
        """
        forward = self._open()
        finished = self._decode(forward) if self._rows else []
        started = self._scheduler.admit(self._live())
        self._compact(spare=len(started))
        finished += self._start(forward, started)
        self._tidy()
        return finished

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these, and return what they have, in the order given. Raises EngineError for an id not in flight."""
        self._open()
        rows = {one.request.id: row for row, one in enumerate(self._rows) if one is not None}
        waiting = self._scheduler.waiting
        if unknown := [name for name in request_ids if name not in rows and name not in waiting]:
            raise EngineError(f"abort: request {unknown[0]!r} is not in flight ({len(unknown)} unknown in all)")
        stopped = [
            Live(waiting.pop(name)) if name in waiting else self._vacate(rows[name])
            for name in dict.fromkeys(request_ids)
        ]
        self._tidy()
        return [one.generation("aborted", self._loaded_version()) for one in stopped]

    def close(self) -> None:
        """Let go of the model and the cache. Afterwards every other call raises EngineError."""
        self._forward = None
        self._rows = []
        self._held = None
        self._cache.release()
        self._scheduler.waiting.clear()

    def _decode(self, forward: Forward) -> list[Generation]:
        """One step of all live sequences; the rows of the finished ones are empty afterwards."""
        live = self._live()
        lengths = [one.length for one in live]
        self._reserve(max(lengths))
        logits = forward.decode(self._cache, [one.token_ids[-1] for one in live], [length - 1 for length in lengths])
        self._count(decode_steps=1, decode_slot_steps=len(live))
        finishes = self._sample(live, logits)
        version = self._loaded_version()
        return [
            self._vacate(row).generation(finish, version) for row, finish in enumerate(finishes) if finish is not None
        ]

    def _start(self, forward: Forward, started: Sequence[Live]) -> list[Generation]:
        """Prefill the prompts of newly admitted requests, once each, and sample their first tokens."""
        groups = [list(group) for _, group in groupby(started, key=lambda one: one.request.prompt_ids)]
        finished = []
        if groups and self._held is not None and self._held.prompt_ids == groups[0][0].request.prompt_ids:
            finished += self._begin(self._held.prefilled, groups[:1])
            del groups[0]
        for batch in prefill_batches(groups):
            prompts = [group[0].request.prompt_ids for group in batch]
            prefilled = forward.prefill(prompts)
            self._count(prefills=1, prefill_prompts=len(prompts), prefill_tokens=sum(map(len, prompts)))
            finished += self._begin(prefilled, batch)
            if batch[-1] is groups[-1] and prompts[-1] == self._scheduler.head_prompt():
                self._held = _Held(prompts[-1], prefilled.one(len(batch) - 1, len(prompts[-1])))
        return finished

    def _begin(self, prefilled: Prefilled, groups: Sequence[Sequence[Live]]) -> list[Generation]:
        """First tokens of groups whose prompts have been prefilled, in this order; who is not done gets a row."""
        entries = [(one, source) for source, group in enumerate(groups) for one in group]
        sources = torch.tensor([source for _, source in entries], device=prefilled.logits.device)
        finishes = self._sample([one for one, _ in entries], prefilled.logits[sources])
        going = [entry for entry, finish in zip(entries, finishes, strict=True) if finish is None]
        if going:
            rows = [self._occupy(one) for one, _ in going]
            width = max(len(one.request.prompt_ids) for one, _ in going)
            self._reserve(width + 1)
            self._cache.store(prefilled.cache, [source for _, source in going], rows, width)
        version = self._loaded_version()
        return [
            one.generation(finish, version)
            for (one, _), finish in zip(entries, finishes, strict=True)
            if finish is not None
        ]

    def _sample(self, sequences: Sequence[Live], logits: Tensor) -> list[Finish | None]:
        """Give each sequence its next token, from `[n, vocabulary]` logits. The one wait for the device in a step."""
        tokens, logprobs = sample(
            _without(logits, [one.forbidden for one in sequences]),
            [one.next_draw() for one in sequences],
            [one.request.temperature for one in sequences],
            [one.request.top_p for one in sequences],
        )
        # float64 holds every token id, so one transfer brings both
        drawn, scored = torch.stack((tokens.double(), logprobs.double())).tolist()
        if any(map(math.isnan, scored)):
            raise EngineError(
                f"the model's logits are not finite (weights version {self._version}): the policy has diverged, or "
                f"{logits.dtype} is too narrow for it"
            )
        self._count(sampled_tokens=len(sequences))
        return [one.append(int(t), p) for one, t, p in zip(sequences, drawn, scored, strict=True)]

    def _live(self) -> list[Live]:
        return [one for one in self._rows if one is not None]

    def _occupy(self, one: Live) -> int:
        """Give a sequence the first empty row."""
        if None not in self._rows:
            self._rows.append(None)
        row = self._rows.index(None)
        self._rows[row] = one
        return row

    def _vacate(self, row: int) -> Live:
        one = self._rows[row]
        assert one is not None, f"row {row} is empty already"
        self._rows[row] = None
        return one

    def _reserve(self, longest: int) -> None:
        live = self._live()
        longest = max([longest, *(one.length for one in live)])
        self._cache.reserve(len(self._rows), longest, self._scheduler.longest_reservation(live))
        if self._cache.num_bytes > self._stats.cache_bytes_peak:
            self._stats = replace(self._stats, cache_bytes_peak=self._cache.num_bytes)

    def _compact(self, *, spare: int) -> None:
        """Leave at most `spare` empty rows: the last live ones move into the others."""
        empty = [row for row, one in enumerate(self._rows) if one is None]
        size = len(self._rows) - max(0, len(empty) - spare)
        movers = [row for row in range(size, len(self._rows)) if self._rows[row] is not None]
        targets = empty[: len(movers)]
        if movers:
            moved = [self._vacate(row) for row in movers]
            self._cache.move(movers, targets, max(one.length for one in moved))
            for row, one in zip(targets, moved, strict=True):
                self._rows[row] = one
        del self._rows[size:]

    def _tidy(self) -> None:
        """Close the gaps, and keep nothing that nobody waits for."""
        self._compact(spare=0)
        if self._held is not None and self._held.prompt_ids != self._scheduler.head_prompt():
            self._held = None
        if not self._rows:
            self._cache.release()

    def _require_idle(self, what: str) -> None:
        if in_flight := len(self._live()) + len(self._scheduler.waiting):
            raise EngineError(
                f"{what} while {in_flight} requests are in flight: poll until they have finished, or abort them"
            )

    def _open(self) -> Forward:
        if self._forward is None:
            raise EngineError("the engine is closed")
        return self._forward

    def _loaded_version(self) -> int:
        if self._version is None:
            raise EngineError(
                "the weights are incomplete (dropped, or the last load_weights failed): load a complete set first"
            )
        return self._version

    def _count(self, **added: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in added.items()})


def _without(logits: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor:
    """`[n, vocabulary]` logits, changed in place: row i gives no probability to the tokens `forbidden[i]`."""
    places = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens]
    if places:
        rows, tokens = torch.tensor(places, device=logits.device).unbind(1)
        logits[rows, tokens] = -torch.inf
    return logits


def prefill_batches(groups: Sequence[list[Live]]) -> Iterator[list[list[Live]]]:
    """Cut groups, in order, into prefills of at most `PREFILL_TOKENS` positions, padding included."""
    batch: list[list[Live]] = []
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
