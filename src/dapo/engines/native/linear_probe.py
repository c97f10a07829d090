"""Chooses the kernels of prepacked products by timing them on this processor.

Which library multiplies fastest depends on the processor: on one MKL's blocks are as fast as oneDNN's, on another half
as fast. The choice changes the last digits of a product, so a run records it, and a resumed run takes the recorded one.
"""

import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dapo.engines.native.prepacked_linear import KERNELS, PrepackedWeight, default_kernel, multiplies, shape_name

MIN_ELEMENTS = 2**18
"""Weights below that are not timed: a call takes longer than their product. They get the kernel for their type."""

MAX_ELEMENTS = 2**22
"""Of larger weights only as many outputs are timed as fit."""

MARGIN = 0.9
"""The part of the time of the kernel for the type that another one may take at most to be chosen: where two are about
as fast, every run makes the same choice."""

ROUNDS = 7

Measure: TypeAlias = Callable[[Iterable[str], int, int, int, torch.dtype], dict[str, float]]
"""From kernels, outputs, inputs, rows and type to the seconds of a product by each kernel."""


def linear_shapes(model: nn.Module) -> set[tuple[int, int]]:
    """Outputs and inputs of the weights that an engine prepacks; the model may be on the device `meta`."""
    shapes = {(module.out_features, module.in_features) for module in model.modules() if type(module) is nn.Linear}
    for module in model.modules():
        parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        joint = [part for part in parts if isinstance(part, nn.Linear)]
        if len(joint) == len(parts):
            shapes.add((sum(part.out_features for part in joint), joint[0].in_features))
    return shapes


@torch.inference_mode()
def choose_kernels(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype, rows: int, *, measure: Measure | None = None
) -> dict[str, str]:
    """The fastest kernel of each shape for products of `rows` rows, where it is not the one for the type.

    `measure` replaces the clock in a test.
    """
    measure = measure or measure_kernels
    default = default_kernel(dtype)
    if default is None:
        return {}
    names = [name for name in KERNELS if multiplies(name, dtype)]
    chosen = {}
    for outputs, inputs in sorted(shapes):
        if outputs * inputs >= MIN_ELEMENTS:
            seconds = measure(names, min(outputs, max(1, MAX_ELEMENTS // inputs)), inputs, rows, dtype)
            fastest = min(seconds, key=lambda name: seconds[name])
            if seconds[fastest] < MARGIN * seconds[default]:
                chosen[shape_name(outputs, inputs)] = fastest
    return chosen


def measure_kernels(names: Iterable[str], outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """The shortest time of a product by each kernel, which take turns: a disturbance only ever makes one longer."""
    weight, x = torch.full((outputs, inputs), 0.5, dtype=dtype), torch.full((rows, inputs), 0.5, dtype=dtype)
    kernels = {name: KERNELS[name](weight, rows) for name in names}
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(ROUNDS):
        for name, kernel in kernels.items():
            seconds[name] = min(seconds[name], _seconds(kernel, x))
    return seconds


def _seconds(kernel: PrepackedWeight, x: Tensor) -> float:
    started = time.perf_counter()
    kernel.multiply(x, None)
    return time.perf_counter() - started
