"""Samples one token per row with one uniform number each, by inverting the cumulative distribution (CDF).

The sum is taken in two levels: block sums over the vocabulary, then the tokens of the one block that the sample falls
into. This takes one pass over the probabilities; a plain cumulative sum needs several, and noise for every logit
(Gumbel) many.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK = 256  # tokens in a block; near the square root of common vocabularies

FIRST_CANDIDATES = 64
"""Most probable tokens looked at first for a nucleus; grows by `CANDIDATE_GROWTH` where they do not suffice."""

CANDIDATE_GROWTH = 16

CPU_CHUNK = 2**20
"""Probabilities computed at a time on the CPU: they stay in the processor's cache, and the allocator reuses their
memory; fresh pages for a whole batch of them cost more than the arithmetic."""

Settings: TypeAlias = Sequence[tuple[float, float, float]]  # (uniform number, temperature, top_p) of each row


def sample(
    logits: Tensor, uniforms: Sequence[float], temperatures: Sequence[float], top_ps: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature), cut to the nucleus of mass `top_p`; temperature 0 is the argmax.

    A token of probability zero is never returned.

    Args:
        logits: `[n, vocabulary]`.
        uniforms: one number in [0, 1) per row.
        temperatures: one per row.
        top_ps: one per row.

    Returns:
        Token ids and their log-probabilities under the distribution sampled from, `[n]` each, computed in float32
        (float64 if the logits are). So a nucleus is renormalised and a greedy token has log-probability 0. A row whose
        logits are not finite has a log-probability of nan.
    """
    n, size = logits.shape
    settings = list(zip(uniforms, temperatures, top_ps, strict=True))
    rows = n if logits.is_cuda else max(1, CPU_CHUNK // size)
    chunks = [_sample_rows(logits[i : i + rows], settings[i : i + rows]) for i in range(0, n, rows)]
    tokens, logprobs = zip(*chunks, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_rows(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    kinds = [_greedy if temperature == 0 else _nucleus if top_p < 1 else _full for _, temperature, top_p in settings]
    if len(set(kinds)) == 1:
        return kinds[0](logits, settings)
    tokens = torch.empty(len(kinds), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(kinds), dtype=_precision(logits), device=logits.device)
    for sampler in dict.fromkeys(kinds):
        rows = [i for i, other in enumerate(kinds) if other is sampler]
        at = torch.tensor(rows, device=logits.device)
        tokens[at], logprobs[at] = sampler(logits[at], [settings[i] for i in rows])
    return tokens, logprobs


def _greedy(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    # bfloat16 has a slow argmax on the CPU
    best, tokens = logits.to(_precision(logits)).max(-1)
    return tokens, best - best  # 0, or nan


def _full(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    probabilities = _softmax(logits, settings)
    tokens = invert_cdf(probabilities, _column([uniform for uniform, _, _ in settings], logits))
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def _nucleus(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    probabilities = _softmax(logits, settings)
    uniforms, top_ps = (_column([row[i] for row in settings], logits) for i in (0, 2))
    return _sample_nucleus(probabilities, uniforms, top_ps, FIRST_CANDIDATES)


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


def _softmax(logits: Tensor, settings: Settings) -> Tensor:
    scores = logits.to(_precision(logits))
    temperatures = [temperature for _, temperature, _ in settings]
    if any(temperature != 1 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, dtype=scores.dtype, device=scores.device)[:, None]
    return scores.softmax(-1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _precision(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
