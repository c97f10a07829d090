"""`torch.nn.attention.varlen` on a CPU, sequence by sequence, by the formulas, in float64.

Training calls the two operators behind it, a decode step the function itself. The flash-attention
kernels check nothing of the caller's numbers; here each requirement is an assertion.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def varlen_on_cpu() -> Iterator[None]:
    """While the block runs, `torch.ops.torch_attn` computes on the CPU."""
    importlib.import_module("torch.nn.attention.varlen")  # defines them
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", attention, "CPU")
        library.impl("_varlen_attn_backward", attention_backward, "CPU")
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`[total_q, heads, d]` outputs, `[heads, total_q]` log-sum-exp of the scores, and the state of
    no dropout.
    """
    _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size)
    assert enable_gqa or query.shape[1] == key.shape[1]
    out = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], len(query)), torch.nan, dtype=torch.float64)
    for rows, keys in _sequences(cu_seq_q, cu_seq_k):
        scores = _scores(query[rows], key[keys], scale, window_size)
        lse[:, rows] = scores.logsumexp(dim=2)
        out[rows] = _outputs(scores, value[keys], query)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    num_splits: int | None,
) -> Tensor:
    """`varlen_attn` for one query per sequence, over the first `seqused_k` keys of each; `[n,
    heads, d]`.
    """
    assert max_q == 1
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert max_k >= int(seqused_k.max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    outputs = []
    for (row, reserved), used in zip(
        _sequences(cu_seq_q, cu_seq_k), seqused_k.tolist(), strict=True
    ):
        assert reserved.start + used <= reserved.stop
        keys = slice(reserved.start, reserved.start + used)
        scores = _scores(query[row], key[keys], scale, list(window_size))
        outputs.append(_outputs(scores, value[keys], query))
    return torch.cat(outputs)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: with P = exp(S - lse), dS = P * (dO V^T - rowsum(dO *
    O)).
    """
    _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size)
    assert grad_out.shape == out.shape == query.shape
    assert lse.shape == (query.shape[1], len(query))
    assert lse.is_contiguous()
    assert rng_state.dtype == torch.uint64
    gradients = [torch.full_like(states, torch.nan) for states in (query, key, value)]
    factor = query.shape[2] ** -0.5 if scale is None else scale
    for rows, keys in _sequences(cu_seq_q, cu_seq_k):
        # [H, n, m]
        p = (
            _scores(query[rows], key[keys], scale, window_size) - lse[:, rows, None].double()
        ).exp()
        do, o = (states[rows].transpose(0, 1).double() for states in (grad_out, out))  # [H, n, d]
        ds = p * (do @ _heads(value[keys], query).mT - (do * o).sum(dim=2, keepdim=True)) * factor
        q = query[rows].transpose(0, 1).double()
        parts = (
            ds @ _heads(key[keys], query),
            _sum_groups(ds.mT @ q, key),
            _sum_groups(p.mT @ do, key),
        )
        for gradient, at, part in zip(gradients, (rows, keys, keys), parts, strict=True):
            gradient[at] = part.transpose(0, 1).to(gradient.dtype)
    return gradients[0], gradients[1], gradients[2]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size: list[int] | None,
) -> None:
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2]
    assert query.shape[1] % key.shape[1] == 0
    assert all(states.stride(-1) == 1 for states in (query, key, value))
    assert is_causal == (window_size == [-1, 0])
    assert len(cu_seq_q) == len(cu_seq_k) > 1
    for cumulative, states, longest in ((cu_seq_q, query, max_q), (cu_seq_k, key, max_k)):
        assert cumulative.dtype == torch.int32
        assert cumulative.is_contiguous()
        lengths = cumulative.diff()
        # what no sequence covers would stay uninitialised memory
        assert [int(cumulative[0]), int(cumulative[-1])] == [0, len(states)]
        assert 1 <= int(lengths.min()) <= int(lengths.max()) <= longest
    # else FlashAttention may take heads for queries, with results in another arrangement
    assert max_q > 1


def _sequences(cu_seq_q: Tensor, cu_seq_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q = cu_seq_q.tolist()
    k = cu_seq_k.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def _scores(
    query: Tensor, key: Tensor, scale: float | None, window_size: list[int] | None
) -> Tensor:
    """`[heads, n, m]`, -inf where a query does not see a key: the last query is aligned with the
    last key.
    """
    n = len(query)
    m = len(key)
    q = query.transpose(0, 1).double()
    scores = q @ _heads(key, query).mT * (query.shape[2] ** -0.5 if scale is None else scale)
    left, right = window_size or (-1, -1)
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)  # of a key behind its query
    unseen = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        unseen |= distance < -left
    if right >= 0:
        unseen |= distance > right
    return scores.masked_fill(unseen, -torch.inf)


def _outputs(scores: Tensor, value: Tensor, query: Tensor) -> Tensor:
    """`[n, heads, d]` of `[heads, n, m]` scores, in the type of the queries."""
    return (scores.softmax(dim=2) @ _heads(value, query)).transpose(0, 1).to(query.dtype)


def _heads(states: Tensor, query: Tensor) -> Tensor:
    """`[m, kv_heads, d]` -> `[heads, m, d]`."""
    return (
        states.repeat_interleave(query.shape[1] // states.shape[1], dim=1).transpose(0, 1).double()
    )


def _sum_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """`[heads, m, d]` -> `[kv_heads, m, d]`."""
    return gradient.unflatten(0, (like.shape[1], -1)).sum(dim=1)
