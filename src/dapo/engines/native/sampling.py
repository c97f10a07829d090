"""Samples one token per row with one uniform number each, by inverting the cumulative distribution (CDF).

The sum is taken in two levels: block sums over the vocabulary, then the tokens of the one block that the sample falls
into. This takes one pass over the probabilities; a plain cumulative sum needs several, and noise for every logit
(Gumbel) many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.engines.native.upload import upload

BLOCK = 256  # tokens in a block; near the square root of common vocabularies

FIRST_CANDIDATES = 64
"""Most probable tokens looked at first for a nucleus; grows by `CANDIDATE_GROWTH` where they do not suffice."""

CANDIDATE_GROWTH = 16

CPU_CHUNK = 2**20
"""Probabilities computed at a time on the CPU: they stay in the processor's cache, and the allocator reuses their
memory; fresh pages for a whole batch of them cost more than the arithmetic."""


@dataclass(frozen=True)
class SamplingSettings:
    """How each of n rows is sampled; the numbers lie on the device of the logits."""

    uniforms: Tensor  # [n, 1] float64 in [0, 1)
    temperatures: Tensor  # [n, 1] float64
    top_ps: Tensor  # [n, 1] float64
    samplers: "list[Sampler]"
    """The function that samples each row, chosen on the host."""
    is_scaled: bool
    """Whether any temperature differs from 1."""

    @classmethod
    def of(cls, values: NDArray[np.float64], uploaded: Tensor) -> "SamplingSettings":
        """`[3, n]` uniform numbers, temperatures and nuclei (`top_p`), here and on the device of the logits."""
        rows = zip(values[1].tolist(), values[2].tolist(), strict=True)
        samplers: list[Sampler] = [
            _greedy if temperature == 0 else _nucleus if top_p < 1 else _full for temperature, top_p in rows
        ]
        uniforms, temperatures, top_ps = uploaded.unsqueeze(2).unbind()
        return cls(uniforms, temperatures, top_ps, samplers, is_scaled=bool((values[1] != 1).any()))

    def __getitem__(self, rows: slice) -> "SamplingSettings":
        return self._select(rows, self.samplers[rows])

    def select(self, rows: Sequence[int], index: Tensor) -> "SamplingSettings":
        """Those of some rows, given on the host and on the device."""
        return self._select(index, [self.samplers[row] for row in rows])

    def _select(self, index: slice | Tensor, samplers: "list[Sampler]") -> "SamplingSettings":
        numbers = (self.uniforms[index], self.temperatures[index], self.top_ps[index])
        return SamplingSettings(*numbers, samplers, self.is_scaled)


Sampler = Callable[[Tensor, SamplingSettings], tuple[Tensor, Tensor]]


def sample(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature), cut to the nucleus of mass `top_p`; temperature 0 is the argmax.

    A token of probability zero is never returned.

    Args:
        logits: `[n, vocabulary]`.
        settings: of the n rows.

    Returns:
        Token ids and their log-probabilities under the distribution sampled from, `[n]` each, computed in float32
        (float64 if the logits are). So a nucleus is renormalised and a greedy token has log-probability 0. A row whose
        logits are not finite has a log-probability of nan.
    """
    n, size = logits.shape
    rows = n if logits.is_cuda else max(1, CPU_CHUNK // size)
    chunks = [_sample_rows(logits[i : i + rows], settings[i : i + rows]) for i in range(0, n, rows)]
    tokens, logprobs = zip(*chunks, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_rows(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    samplers = settings.samplers
    if len(set(samplers)) == 1:
        return samplers[0](logits, settings)
    tokens = torch.empty(len(samplers), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(samplers), dtype=_precision(logits), device=logits.device)
    for sampler in dict.fromkeys(samplers):
        rows = [i for i, other in enumerate(samplers) if other is sampler]
        index = upload(np.array(rows, dtype=np.int64), logits.device)
        tokens[index], logprobs[index] = sampler(logits[index], settings.select(rows, index))
    return tokens, logprobs


def _greedy(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    # bfloat16 has a slow argmax on the CPU
    best, tokens = logits.to(_precision(logits)).max(-1)
    return tokens, best - best  # 0, or nan


def _full(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    probabilities = _softmax(logits, settings)
    tokens = invert_cdf(probabilities, settings.uniforms)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def _nucleus(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    probabilities = _softmax(logits, settings)
    return _sample_nucleus(probabilities, settings.uniforms, settings.top_ps, FIRST_CANDIDATES)


def invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """`[n]` first token whose cumulative probability exceeds u times the total.

    `probabilities` is `[n, vocabulary]`, not necessarily normalised, `uniforms` `[n, 1]` float64 in [0, 1).
    """
    size = probabilities.shape[1]
    whole = size // BLOCK * BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1) if whole else probabilities[:, :0]
    if whole < size:
        sums = torch.cat((sums, probabilities[:, whole:].sum(-1, keepdim=True)), 1)
    totals = sums.double().cumsum(1)  # [n, blocks]
    target = uniforms * totals[:, -1:]
    block = _first_above(totals, target)
    before = totals.gather(1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    ids = block * BLOCK + torch.arange(BLOCK, device=probabilities.device)  # [n, BLOCK]
    within = probabilities.gather(1, ids.clamp(max=size - 1)).double().masked_fill(ids >= size, 0.0).cumsum(1)
    # no cumulative sum of a row of nan exceeds anything: keep its id valid
    return (block * BLOCK + _first_above(within, target - before))[:, 0].clamp(max=size - 1)


def _sample_nucleus(probabilities: Tensor, uniforms: Tensor, top_ps: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Sample from the smallest set of most probable tokens with mass `top_ps` or more; of equals, lower ids come first.

    Considers the `candidates` most probable tokens, and more of them in the rows where these do not suffice.
    """
    size = probabilities.shape[1]
    values, ids = probabilities.topk(candidates := min(candidates, size), dim=1)
    # topk takes and orders equals arbitrarily: order them by id
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    masses = values.double().cumsum(1)
    last = torch.searchsorted(masses, top_ps).clamp(max=candidates - 1)  # [n, 1] of the nucleus
    mass = masses.gather(1, last)
    index = torch.minimum(_first_above(masses, uniforms * mass), last)
    tokens = ids.gather(1, index)[:, 0]
    logprobs = (values.gather(1, index).double().log() - mass.log()).to(probabilities.dtype)[:, 0]
    if candidates == size:
        return tokens, logprobs
    open_rows = ((mass < top_ps) | (values[:, -1:] >= values.gather(1, last)))[:, 0].nonzero()[:, 0]
    if len(open_rows):
        tokens[open_rows], logprobs[open_rows] = _sample_nucleus(
            probabilities[open_rows], uniforms[open_rows], top_ps[open_rows], candidates * CANDIDATE_GROWTH
        )
    return tokens, logprobs


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """`[n, 1]` first index with `cumulative > target`: an entry that adds something, so never one of mass zero.

    Rounding may put the target at the very total (u just under 1, or sums in another order): then just below it.
    """
    total = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)


def _softmax(logits: Tensor, settings: SamplingSettings) -> Tensor:
    scores = logits.to(_precision(logits))
    if settings.is_scaled:
        scores = scores / settings.temperatures.to(scores.dtype)
    return scores.softmax(-1)


def _precision(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
