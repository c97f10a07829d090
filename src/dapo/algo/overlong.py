"""Eq. 13 and overlong filtering: the treatment of responses that are too long."""

from typing import Literal


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Eq. 13: the length term of a training reward, from `-factor` to 0.

    It is 0 up to `max_length - buffer`, falls linearly to `-factor` at `max_length`, and stays
    there. It shapes only training rewards, never verdicts or evaluations.

    Args:
        length: the tokens of the response, its sampled end token included.
        max_length: L_max, in tokens.
        buffer: L_cache, in tokens.
        factor: the largest penalty.

    Raises:
        ValueError: `buffer` is not in 1 .. `max_length`, or `factor` is negative.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must lie in 1 .. max_length={max_length} tokens, got {buffer}")
    if factor < 0:
        raise ValueError(
            f"factor must not be negative, got {factor}: the penalty is -factor at max_length"
        )
    excess = max(0, length - (max_length - buffer))
    # never -0.0, which metrics would show
    if not excess:
        return 0.0
    return -factor * min(excess / buffer, 1.0)


def trains(finish: str, *, mode: Literal["soft", "filter", "off"]) -> bool:
    """Overlong filtering: whether a response's tokens train; in `filter` mode truncated ones do not
    train.

    The engine reports truncation (`finish == "length"`): an end token sampled exactly at the limit
    is "stop". A response that does not train still counts in its group's mean and std. Raises
    ValueError for an unknown mode.
    """
    if mode not in ("soft", "filter", "off"):
        raise ValueError(f"mode must be 'soft', 'filter' or 'off', got {mode!r}")
    return mode != "filter" or finish != "length"
