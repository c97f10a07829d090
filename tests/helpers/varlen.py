"""The attention kernel that a GPU has and a CPU has not, computed row by row as its definition says."""

import torch
from torch import Tensor


def naive_varlen_attention(
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
    """`varlen_attn` for one query per sequence, in float64: query i sees keys `i - left .. i` of its own sequence.

    Positions are counted from the ends of queries and keys, as that kernel aligns them.
    """
    assert max_q == 1
    assert [int(x) for x in cu_seq_q] == list(range(len(query) + 1))
    assert max_k >= int(seqused_k.max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    outputs = []
    for i, heads in enumerate(query.double()):
        end = int(seqused_k[i])
        assert int(cu_seq_k[i]) + end <= int(cu_seq_k[i + 1])
        left, right = window_size
        first = 0 if left < 0 else max(0, end - 1 - left)
        assert right <= 0  # nothing lies to the right of a single query at the end
        rows = slice(int(cu_seq_k[i]) + first, int(cu_seq_k[i]) + end)
        shared = len(heads) // key.shape[1]
        keys, values = (states[rows].double().repeat_interleave(shared, 1) for states in (key, value))
        scores = torch.einsum("hd,khd->hk", heads, keys) * (heads.shape[-1] ** -0.5 if scale is None else scale)
        outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(outputs).to(query.dtype)
