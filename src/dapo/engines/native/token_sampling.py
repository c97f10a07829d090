"""Samples one token per row with one uniform number, by inverting the cumulative distribution.

The sum has two levels: block sums over the vocabulary, then the tokens of the block that contains
the sample. It needs one pass over the probabilities; a plain cumulative sum needs several, and
Gumbel noise many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.engines.native.device_memory import upload
from dapo.libs import cpu_kernels

BLOCK = 256  # tokens per block; near the square root of common vocabularies
FIRST_CANDIDATES = 64
"""The most probable tokens tried first for a nucleus; then `CANDIDATE_GROWTH` times as many."""
CANDIDATE_GROWTH = 16
CPU_CHUNK = 2**20
"""The number of probabilities computed at a time on a CPU, which stay in its cache and in reused
memory. New pages for a whole batch would cost more than the arithmetic.
"""


@dataclass(frozen=True)
class UniformDraws:
    """The uniform numbers of m tokens from n rows, in row order, on the logits' device.

    Every row has at least one.
    """

    uniforms: Tensor  # [m, 1] float64 in [0, 1)
    counts: Sequence[int] | None = None  # the number of tokens of each row; None: one each
    rows: Tensor | None = None  # `[m]` row of each token; None where `counts` is None

    def of(self, per_row: Tensor) -> Tensor:
        """Return `[m, ...]` values per token from `[n, ...]` values per row."""
        return per_row if self.rows is None else per_row[self.rows]

    def __getitem__(self, rows: slice) -> "UniformDraws":
        if self.counts is None or self.rows is None:
            return UniformDraws(self.uniforms[rows])
        first = sum(self.counts[: rows.start])
        last = sum(self.counts[: rows.stop])
        # rows count from the first of the slice
        row_indices = self.rows[first:last] - (rows.start or 0)
        return UniformDraws(self.uniforms[first:last], self.counts[rows], row_indices)

    def select(self, rows: Sequence[int], index: Tensor) -> "tuple[UniformDraws, Tensor]":
        """Return the draws of some rows, and their indices.

        Args:
            rows: the rows, on the host.
            index: the same rows, on the device.
        """
        if self.counts is None:
            return UniformDraws(self.uniforms[index]), index
        ends = np.cumsum(self.counts)
        ranges = [np.arange(ends[row] - self.counts[row], ends[row]) for row in rows]
        counts = [self.counts[row] for row in rows]
        row_indices = np.repeat(np.arange(len(rows)), counts)
        # both at once: each transfer to a GPU delays the step
        block = np.stack((np.concatenate(ranges), row_indices))
        at, sources = upload(block, self.uniforms.device).unbind()
        return UniformDraws(self.uniforms[at], counts, sources), at

    def among(self, selected: Tensor) -> "tuple[UniformDraws, Tensor]":
        """Return the draws of the rows that `[n]` booleans select, and their indices.

        The booleans are on the device, and `counts` of the result is empty.
        """
        if self.rows is None:
            at = selected.nonzero()[:, 0]
            return UniformDraws(self.uniforms[at]), at
        at = selected[self.rows].nonzero()[:, 0]
        new_rows = selected.cumsum(0) - 1  # of each selected row among the selected ones
        return UniformDraws(self.uniforms[at], (), new_rows[self.rows[at]]), at


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling settings of n rows; tensors are on the logits' device."""

    draws: UniformDraws
    temperatures: Tensor  # [n, 1] float64
    top_ps: Tensor  # [n, 1] float64
    samplers: "list[Sampler]"  # the sampling function of each row, chosen on the host
    is_scaled: bool  # whether any temperature differs from 1
    compiled: bool = False  # whether `cpu_kernels` samples where the whole distribution counts

    @classmethod
    def of(
        cls,
        values: NDArray[np.float64],
        uploaded: Tensor,
        draws: UniformDraws,
        *,
        compiled: bool = False,
    ) -> "SamplingSettings":
        """Make settings from `[2, n]` temperatures and `top_p`.

        Args:
            values: the numbers on the host.
            uploaded: the same numbers on the logits' device.
            draws: the uniform numbers of the rows.
            compiled: whether `cpu_kernels` samples where the whole distribution counts.
        """
        rows = zip(values[0].tolist(), values[1].tolist(), strict=True)
        samplers = [_sampler_of(temperature, top_p) for temperature, top_p in rows]
        temperatures, top_ps = uploaded.unsqueeze(2).unbind()
        return cls(
            draws,
            temperatures,
            top_ps,
            samplers,
            is_scaled=bool((values[0] != 1).any()),
            compiled=compiled,
        )

    def __getitem__(self, rows: slice) -> "SamplingSettings":
        return self._select(self.draws[rows], rows, self.samplers[rows])

    def select(self, rows: Sequence[int], index: Tensor) -> "tuple[SamplingSettings, Tensor]":
        """Return the settings of some rows, and the indices of their draws."""
        draws, at = self.draws.select(rows, index)
        return self._select(draws, index, [self.samplers[row] for row in rows]), at

    def _select(
        self, draws: UniformDraws, index: slice | Tensor, samplers: "list[Sampler]"
    ) -> "SamplingSettings":
        return SamplingSettings(
            draws,
            self.temperatures[index],
            self.top_ps[index],
            samplers,
            self.is_scaled,
            self.compiled,
        )


Sampler = Callable[[Tensor, SamplingSettings], tuple[Tensor, Tensor]]


def sample(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature), cut to the nucleus of mass `top_p`.

    A token of probability zero is never returned.

    Args:
        logits: `[n, vocabulary]`.
        settings: the settings of the n rows.

    Returns the token ids of the draws and their log-probabilities under the sampling distribution,
    `[m]` each, computed in float32 (float64 for float64 logits). So a nucleus is renormalised, and
    a greedy token has log-probability 0. If the logits of a row are not finite, its
    log-probabilities are nan.
    """
    n, size = logits.shape
    # compiled kernels divide all rows among PyTorch's threads
    is_compiled = settings.compiled and set(settings.samplers) in ({_full}, {_nucleus})
    chunk_rows = n
    if not (logits.is_cuda or is_compiled):
        chunk_rows = max(1, CPU_CHUNK // size)
    tokens = []
    logprobs = []
    for start in range(0, n, chunk_rows):
        chunk = slice(start, start + chunk_rows)
        chunk_tokens, chunk_logprobs = _sample_rows(logits[chunk], settings[chunk])
        tokens.append(chunk_tokens)
        logprobs.append(chunk_logprobs)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_rows(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Sample as `sample` does, the rows of one function together."""
    samplers = settings.samplers
    if len(set(samplers)) == 1:
        return samplers[0](logits, settings)
    tokens = torch.empty(len(settings.draws.uniforms), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(tokens), dtype=_precision(logits), device=logits.device)
    for sampler in dict.fromkeys(samplers):
        rows = [i for i, row_sampler in enumerate(samplers) if row_sampler is sampler]
        index = upload(np.array(rows, dtype=np.int64), logits.device)
        selected, at = settings.select(rows, index)
        tokens[at], logprobs[at] = sampler(logits[index], selected)
    return tokens, logprobs


def _sampler_of(temperature: float, top_p: float) -> "Sampler":
    """Return the sampling function of a row with these settings."""
    if temperature == 0:
        return _greedy
    return _nucleus if top_p < 1 else _full


def _greedy(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Take the most probable token of each row, the first of equal ones."""
    # bfloat16 has a slow argmax on the CPU
    best, tokens = logits.to(_precision(logits)).max(-1)
    return settings.draws.of(tokens), settings.draws.of(best - best)  # 0, or nan


def _full(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Sample from the whole distribution."""
    if settings.compiled and cpu_kernels.can_sample(logits):
        return _compiled(logits, settings, None)
    probabilities = _softmax(logits, settings)
    tokens = invert_cdf(probabilities, settings.draws)
    return tokens, _entries(probabilities, tokens[:, None], settings.draws)[:, 0].log()


def _nucleus(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Sample from the fewest most probable tokens with mass `top_p`."""
    if settings.compiled and cpu_kernels.can_sample(logits):
        return _compiled(logits, settings, settings.top_ps)
    probabilities = _softmax(logits, settings)
    return _sample_nucleus(probabilities, settings.draws, settings.top_ps, FIRST_CANDIDATES)


def _compiled(
    logits: Tensor, settings: SamplingSettings, top_ps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sample with compiled kernels; `top_ps` are None where the whole distribution counts."""
    draws = settings.draws
    counts = torch.ones(len(logits), dtype=torch.int64)
    if draws.counts is not None:
        counts = torch.tensor(draws.counts)
    return cpu_kernels.sample(
        logits, settings.temperatures, draws.uniforms.contiguous(), counts.cumsum(0), top_ps
    )


def invert_cdf(probabilities: Tensor, draws: UniformDraws) -> Tensor:
    """Return `[m]` first tokens whose cumulative probability exceeds u times the total.

    Args:
        probabilities: `[n, vocabulary]`, not necessarily normalised.
        draws: the uniform numbers u of m tokens.
    """
    size = probabilities.shape[1]
    full_blocks = size // BLOCK * BLOCK
    sums = probabilities[:, :0]
    if full_blocks:
        sums = probabilities[:, :full_blocks].unflatten(1, (-1, BLOCK)).sum(-1)
    if full_blocks < size:
        sums = torch.cat((sums, probabilities[:, full_blocks:].sum(-1, keepdim=True)), 1)
    # float64: a float32 sum near 1 does not change by a token of probability below 3e-8
    totals = draws.of(sums.double().cumsum(1))  # [m, blocks]
    target = draws.uniforms * totals[:, -1:]
    block = _first_above(totals, target)
    mass_before = totals.gather(1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    width = min(BLOCK, size)
    ids = block * BLOCK + torch.arange(width, device=probabilities.device)  # [m, width]
    entries = _entries(probabilities, ids.clamp(max=size - 1), draws)
    within = entries.double().masked_fill(ids >= size, 0.0).cumsum(1)
    tokens = block * BLOCK + _first_above(within, target - mass_before)
    # in a row of nan no cumulative sum exceeds the target: keep the id valid
    return tokens[:, 0].clamp(max=size - 1)


def _entries(probabilities: Tensor, ids: Tensor, draws: UniformDraws) -> Tensor:
    """Return `[m, k]` entries at `ids` in the row of each draw."""
    if draws.rows is None:
        return probabilities.gather(1, ids)
    return probabilities[draws.rows[:, None], ids]


def _sample_nucleus(
    probabilities: Tensor, draws: UniformDraws, top_ps: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """Sample from the smallest set of most probable tokens with mass `top_ps` or more.

    Ties go to lower ids. The first attempt has the `candidates` most probable tokens; rows where
    these do not suffice get more.

    Args:
        probabilities: `[n, vocabulary]`.
        draws: the uniform numbers of m tokens.
        top_ps: `[n, 1]` masses.
        candidates: the number of most probable tokens that are tried first.
    """
    size = probabilities.shape[1]
    candidates = min(candidates, size)
    values, ids = probabilities.topk(candidates, dim=1)
    # topk orders ties arbitrarily: order them by id
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    masses = values.double().cumsum(1)
    last = torch.searchsorted(masses, top_ps).clamp(max=candidates - 1)  # [n, 1] of the nucleus
    mass = masses.gather(1, last)
    index = _first_above(draws.of(masses), draws.uniforms * draws.of(mass))
    index = torch.minimum(index, draws.of(last))
    tokens = _entries(ids, index, draws)[:, 0]
    logprobs = _entries(values, index, draws).double().log() - draws.of(mass).log()
    logprobs = logprobs.to(probabilities.dtype)[:, 0]
    if candidates == size:
        return tokens, logprobs
    # too little mass, or the least probable token of the nucleus may tie with one not tried
    is_open = ((mass < top_ps) | (values[:, -1:] >= values.gather(1, last)))[:, 0]
    rows = is_open.nonzero()[:, 0]
    if len(rows):
        unfinished, at = draws.among(is_open)
        tokens[at], logprobs[at] = _sample_nucleus(
            probabilities[rows], unfinished, top_ps[rows], candidates * CANDIDATE_GROWTH
        )
    return tokens, logprobs


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return `[n, 1]` first indices with `cumulative > target`; the entry's mass is never zero.

    Rounding may make the target equal to the total (u just under 1, or another order of the sum):
    then it is lowered.
    """
    total = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)


def _softmax(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Return `[n, vocabulary]` probabilities at the rows' temperatures."""
    scores = logits.to(_precision(logits))
    if settings.is_scaled:
        scores = scores / settings.temperatures.to(scores.dtype)
    return scores.softmax(-1)


def _precision(logits: Tensor) -> torch.dtype:
    """Return the type of probabilities, which is float32 at least."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
