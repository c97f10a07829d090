"""Loads the compiled functions."""

import ctypes
import logging
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .build import library_path

_LOG = logging.getLogger("cpu_kernels")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The types that the functions have, each with the end of their names."""
_MULTIPLE = 32
MAX_WIDTH = 256
"""A head's width is a multiple of two vectors of the widest instruction set, and half a head of
one.
"""
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "rotate": [_POINTER] * 5 + [_INT] * 6 + [_FLOAT],
    "store_positions": [_POINTER] * 4 + [_INT] * 5,
    "attention": [_POINTER] * 12 + [_INT] * 6 + [_FLOAT],
    "sample": [_POINTER] * 8 + [_INT] * 2,
    "sample_nucleus": [_POINTER] * 8 + [_INT] * 2,
    "add": [_POINTER] * 3 + [_INT],
    "score_forward": [_POINTER] * 7 + [_INT] * 2 + [_FLOAT],
    "score_backward": [_POINTER] * 9 + [_INT] * 2 + [_FLOAT],
    "segments": [_POINTER] * 13 + [_INT] * 8 + [_FLOAT],
    "norm_forward": [_POINTER] * 5 + [_INT] * 2 + [_FLOAT],
    "norm_backward": [_POINTER] * 7 + [_INT] * 2,
    "gate_forward": [_POINTER] * 4 + [_INT],
    "gate_backward": [_POINTER] * 6 + [_INT],
}
_ARGUMENTS_OF_PRODUCTS: dict[str, list[Any]] = {
    "product": [_POINTER] * 6 + [_INT] * 4,
    "pack": [_POINTER] * 3 + [_INT] * 2,
    "decode": [_POINTER] * 13 + [_INT] * 8 + [_FLOAT] * 2,
}
"""The arguments of the functions that not every processor has for bfloat16."""


@lru_cache(1)
def library() -> Any:
    """Return the functions by name and type, and PyTorch's loop over its threads; None where they
    were not compiled.
    """
    path = library_path(Path(__file__).parent, torch.backends.cpu.get_cpu_capability())
    torch_name = "libtorch_cpu.dylib" if platform.system() == "Darwin" else "libtorch_cpu.so"
    torch_path = Path(torch.__file__).parent / "lib" / torch_name
    try:
        library = ctypes.CDLL(str(path))
        parallel_for = ctypes.CDLL(str(torch_path)).torch_parallel_for
    except (OSError, AttributeError):
        _LOG.warning(
            "%s is missing: PyTorch's functions stand in, and generation and updates are slower;"
            " install a C++ compiler (g++), then run python -m dapo.libs.cpu_kernels",
            path,
        )
        return None
    functions: dict[Any, Any] = {"run": ctypes.cast(parallel_for, ctypes.c_void_p)}
    for dtype in DTYPES:
        for name, arguments in _ARGUMENTS.items():
            functions[name, dtype] = _function(library, name, dtype, arguments)
    product_dtypes = [torch.float32]
    if library.multiplies_bfloat16():
        product_dtypes.append(torch.bfloat16)
    for dtype in product_dtypes:
        for name, arguments in _ARGUMENTS_OF_PRODUCTS.items():
            functions[name, dtype] = _function(library, name, dtype, arguments)
    functions["panel"] = library.panel_outputs()
    return functions


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype, arguments: list[Any]) -> Any:
    """Return the function of this name for a type; it takes `arguments`, and returns nothing."""
    function = getattr(library, f"{name}_{DTYPES[dtype]}")
    function.argtypes = arguments
    function.restype = None
    return function


def serves(tensor: Tensor, width: int = 0) -> bool:
    """Return True if the compiled functions serve a tensor of that width."""
    return (
        tensor.dtype in DTYPES
        and tensor.device.type == "cpu"
        and width % _MULTIPLE == 0
        and library() is not None
    )


def call(name: str, first: Tensor, *arguments: Tensor | int | float | None) -> None:
    """Call a function of the type of its first tensor that uses PyTorch's threads."""
    functions = library()
    functions[name, first.dtype](functions["run"], *addresses(first, *arguments))


def addresses(*arguments: Tensor | int | float | None) -> list[int | float | None]:
    """Return arguments for a compiled function: of tensors the address of their values."""
    return [
        argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments
    ]
