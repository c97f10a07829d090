"""Limits that measurements are compared with: FLOP per token, and what a static batch would
compute.
"""

from collections.abc import Sequence
from math import log

GENERATE_FLOP = 2
"""FLOP for each parameter and generated token: one multiply and one add.

Attention and prompts come on top.
"""
UPDATE_FLOP = 6
"""FLOP for each parameter and trained token: 2 forward, 4 backward.

Attention and prompts come on top.
"""


def limit_tokens_per_s(gflops: float, parameters: int, flop_per_parameter: float) -> float:
    """Tokens a second if the matmul rate `gflops` (1e9 FLOP/s) were all that counted."""
    return gflops * 1e9 / (flop_per_parameter * parameters)


def share_of_limit(
    tokens_per_s: float, gflops: float, parameters: int, flop_per_parameter: float
) -> float:
    """Which part of `limit_tokens_per_s` a measured rate is."""
    return tokens_per_s / limit_tokens_per_s(gflops, parameters, flop_per_parameter)


def memory_limit_tokens_per_s(
    gb_per_s: float, *, rows: int, weight_bytes: int, cache_bytes_per_row: float
) -> float:
    """Generated tokens per second if reading memory at `gb_per_s` (1e9 bytes/s) were all that
    counted.

    A decode step reads all weights once, and of each row its keys and values; it gives each row one
    token.
    """
    return rows * gb_per_s * 1e9 / (weight_bytes + rows * cache_bytes_per_row)


def static_slot_steps(lengths: Sequence[int], slots: int) -> int:
    """Slot-steps of batches of `slots` responses, in order, each batch running until its longest
    one ends.

    The last batch has as many rows as responses are left.
    """
    batches = [lengths[start : start + slots] for start in range(0, len(lengths), slots)]
    return sum(len(batch) * max(batch) for batch in batches)


def heavy_tail_lengths(
    uniforms: Sequence[float], *, shortest: int, limit: int, share_at_limit: float
) -> list[int]:
    """Pareto lengths from `shortest` to `limit`, of which `share_at_limit` reach the limit, from
    draws in [0, 1).
    """
    # P(length >= x) = (shortest / x) ** alpha, which is share_at_limit at x = limit
    survivals = [1.0 - u for u in uniforms]
    ratio = limit / shortest
    return [
        limit if s <= share_at_limit else int(shortest * ratio ** (log(s) / log(share_at_limit)))
        for s in survivals
    ]
