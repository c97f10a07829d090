"""Kinds of work by the names of torch's operations, for a breakdown of traced seconds."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import record_function

from dapo.libs.cpu_kernels.compiled import library

COMPILED = "cpu_kernels::"
"""What the names of compiled functions begin with: torch's profiler sees only its own operations.
"""
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "mkldnn::_linear_pointwise",
    "mkl::_mkl_linear",
    f"{COMPILED}product",
)
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "log-softmax and entropy",
        ("_Score", "TokenScores", f"{COMPILED}score", "aten::_log_softmax", "aten::xlogy"),
    ),
    ("gradients and optimiser", ("AccumulateGrad", "Optimizer", "_fused_adamw", "aten::_foreach")),
)
"""Kinds by a part of an operation's name, or of one that called it."""
ATTENTION = "attention"
MATMULS = "products of the layers and the head"
LAYERS = "all decoder layers in one call"
OTHERS = "norms, rotary embedding, gates, sampling, copies"
BETWEEN = "Python between the operations"


@contextmanager
def compiled_functions_named() -> Iterator[None]:
    """Inside of the block a trace has the calls of compiled functions, by name."""
    functions = library() or {}
    plain = {key: function for key, function in functions.items() if isinstance(key, tuple)}
    functions.update(
        {key: _recorded(f"{COMPILED}{key[0]}", function) for key, function in plain.items()}
    )
    try:
        yield
    finally:
        functions.update(plain)


def _recorded(name: str, function: Any) -> Any:
    def recorded(*arguments: Any) -> None:
        with record_function(name):
            function(*arguments)

    return recorded


def kind_of(names: Sequence[str]) -> str:
    """The category of an operation, by its name and the names of its callers, nearest first."""
    # inside of attention a product is attention's
    parts = (
        "scaled_dot_product",
        "flash_attention",
        "SegmentAttention",
        f"{COMPILED}segments",
        f"{COMPILED}attention",
    )
    if any(part in name for name in names for part in parts):
        return ATTENTION
    if names[0] in PRODUCTS:
        return MATMULS
    if names[0] == f"{COMPILED}decode":
        return LAYERS
    return next(
        (kind for kind, parts in KINDS if any(part in name for name in names for part in parts)),
        OTHERS,
    )


def seconds_by_kind(events: Iterable[Any], wall_s: float) -> dict[str, float]:
    """Own seconds of a torch profiler's events by kind; what is left of the wall time is
    Python's.
    """
    seconds: Counter[str] = Counter()
    for event in events:
        if event.self_cpu_time_total > 0:
            seconds[kind_of(_names(event))] += event.self_cpu_time_total / 1e6
    return {**seconds, BETWEEN: max(0.0, wall_s - sum(seconds.values()))}


def _names(event: Any) -> list[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
