"""Chooses the kernels of prepacked products by timing them on this processor.

The fastest library depends on the processor: on one, MKL's blocks are as fast as oneDNN's, on
another half as fast. The choice changes the last digits of a product, so a run records it
(`rollout.native.kernels` in config.yaml). The user's cache also keeps it for later runs: if two
kernels are about equally fast, separate timings could choose differently, and runs with equal seeds
would differ.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from dapo.config.rollout_options import NativeConfig
from dapo.core.files import atomic_write_json, cache_folder, open_no_link
from dapo.core.processor import cpu_model, vector_extensions
from dapo.libs import cpu_kernels
from dapo.libs.cpu_kernels.prepacked import (
    COMPILED,
    KERNELS,
    LAYERS,
    default_kernel,
    multiplies,
    shape_name,
)

MIN_ELEMENTS = 2**18
"""The smallest weight that is timed.

Smaller ones use the default kernel: a call takes longer than the product.
"""
# the largest part of a weight that is timed; for larger weights only some outputs are
MAX_ELEMENTS = 2**22
MARGIN = 0.8  # the fraction of the default kernel's time below which another kernel is chosen
COMPILED_MARGIN = 1.05
"""The same for compiled products: if all are compiled, a decode step is one call."""
ROUNDS = 7

Measure: TypeAlias = Callable[[Iterable[str], int, int, int, torch.dtype], dict[str, float]]
"""Returns the seconds of a product by kernel, for kernels, outputs, inputs, rows and type."""


def resolve_kernels(
    options: NativeConfig, model: nn.Module, *, dtype: torch.dtype, device: str
) -> NativeConfig:
    """Resolve `rollout.native.slots`, and `kernels`: the fastest on a CPU, else none.

    Args:
        options: the section `rollout.native`.
        model: the model; it may be on the device `meta`.
        dtype: the type of its weights.
        device: `cpu` or `cuda`.
    """
    slots = options.slots_on(device)
    options = options.model_copy(update={"slots": slots})
    if options.kernels is not None:
        return options
    kernels: dict[str, str] = {}
    if device == "cpu":
        shapes = linear_shapes(model)
        kernels = choose_kernels(shapes, dtype, slots, choices=choices_file())
        if dtype in cpu_kernels.DTYPES and cpu_kernels.is_compiled():
            kernels[LAYERS] = COMPILED
    return options.model_copy(update={"kernels": kernels})


def linear_shapes(model: nn.Module) -> set[tuple[int, int]]:
    """Return (outputs, inputs) of the weights to prepack; the model may be on the device `meta`."""
    shapes = {
        (module.out_features, module.in_features)
        for module in model.modules()
        if type(module) is nn.Linear
    }
    for module in model.modules():
        parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        fused = [part for part in parts if isinstance(part, nn.Linear)]
        if len(fused) == len(parts):
            shapes.add((sum(part.out_features for part in fused), fused[0].in_features))
    return shapes


@torch.inference_mode()
def choose_kernels(
    shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    rows: int,
    *,
    choices: Path | None = None,
    measure: Measure | None = None,
) -> dict[str, str]:
    """Return the fastest kernel of each shape where it is not the default kernel for the type.

    Args:
        shapes: outputs and inputs of the weights.
        dtype: the type of the weights.
        rows: the number of rows of a product.
        choices: the file of earlier runs' choices, which is read and extended; None: all shapes are
            timed.
        measure: replaces the clock in a test.
    """
    measure = measure or measure_kernels
    default = default_kernel(dtype)
    if default is None:
        return {}
    names = [name for name in KERNELS if multiplies(name, dtype)]
    key = machine_key(dtype, rows)
    earlier = _read_choices(choices).get(key, {})
    chosen = {}
    for outputs, inputs in sorted(shapes):
        if outputs * inputs < MIN_ELEMENTS:
            continue
        kernel = earlier.get(shape_name(outputs, inputs))
        # a choice of the file may name a kernel of another version
        if kernel not in names:
            timed_outputs = min(outputs, max(1, MAX_ELEMENTS // inputs))
            seconds = measure(names, timed_outputs, inputs, rows, dtype)
            fastest = min(seconds, key=lambda name: seconds[name] / _margin(name))
            kernel = default
            if seconds[fastest] < _margin(fastest) * seconds[default]:
                kernel = fastest
        chosen[shape_name(outputs, inputs)] = kernel
    if choices is not None and not chosen.items() <= earlier.items():
        chosen = _add_choices(choices, key, chosen, names)
    return {shape: kernel for shape, kernel in chosen.items() if kernel != default}


def _margin(name: str) -> float:
    return COMPILED_MARGIN if name == COMPILED else MARGIN


def choices_file() -> Path | None:
    """Return the file of earlier choices in the user's cache; None if there is no home folder."""
    try:
        return cache_folder() / "linear_kernels.json"
    except RuntimeError:
        return None


def machine_key(dtype: torch.dtype, rows: int) -> str:
    """Return the conditions that determine the fastest kernel of a shape, in one line."""
    capability = torch.backends.cpu.get_cpu_capability()
    conditions = [
        cpu_model(),
        " ".join([capability, *vector_extensions()]),
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        str(dtype).removeprefix("torch."),
        f"{rows} rows",
    ]
    if multiplies("compiled", dtype):
        conditions.append("compiled products")
    return ", ".join(conditions)


def _read_choices(file: Path | None) -> dict[str, dict[str, str]]:
    """Return kernels by `machine_key` and shape; empty if the file is unreadable or malformed."""
    try:
        if file is None or not file.is_file():
            return {}
        with open_no_link(file, "rb") as opened:
            content: Any = json.load(opened)
        entries = {}
        for key, entry in content.items():
            entries[str(key)] = {str(shape): str(kernel) for shape, kernel in entry.items()}
        return entries
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _add_choices(
    file: Path, key: str, chosen: dict[str, str], names: Sequence[str]
) -> dict[str, str]:
    """Add choices to the file if it can be written, and return the valid ones.

    A choice that another run has written in the meantime takes precedence, so that both runs use
    the same kernels.
    """
    entries = _read_choices(file)
    recorded = entries.get(key, {})
    valid = dict(chosen)
    for shape in chosen:
        if recorded.get(shape) in names:
            valid[shape] = recorded[shape]
    with contextlib.suppress(OSError):  # in a read-only folder the next run measures again
        atomic_write_json(file, entries | {key: recorded | valid})
    return valid


def measure_kernels(
    names: Iterable[str], outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the shortest time of a product by each kernel, in seconds.

    Args:
        names: the kernels, which take turns: disturbances only lengthen a time.
        outputs: the width of the result.
        inputs: the width of the factor.
        rows: the number of rows of the factor.
        dtype: the type of all numbers.
    """
    weight = torch.full((outputs, inputs), 0.5, dtype=dtype)
    x = torch.full((rows, inputs), 0.5, dtype=dtype)
    kernels = {name: KERNELS[name](weight, rows) for name in names}
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(ROUNDS):
        for name, kernel in kernels.items():
            started = time.perf_counter()
            kernel.multiply(x, None)
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds
