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
_MULTIPLE = 32
MAX_WIDTH = 256
"""A head's width is a multiple of two vectors of the widest instruction set, and half a head of
one.
"""
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float
_ARGUMENTS = {
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
_OF_PRODUCTS = {
    "product": [_POINTER] * 6 + [_INT] * 4,
    "pack": [_POINTER] * 3 + [_INT] * 2,
    "decode": [_POINTER] * 13 + [_INT] * 8 + [_FLOAT] * 2,
}


@lru_cache(1)
def library() -> Any:
    """Return the functions by name and type, and PyTorch's loop over its threads; None where they
    were not compiled.
    """
    path = library_path(Path(__file__).parent, torch.backends.cpu.get_cpu_capability())
    try:
        library = ctypes.CDLL(str(path))
        name = "libtorch_cpu.dylib" if platform.system() == "Darwin" else "libtorch_cpu.so"
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        functions: dict[Any, Any] = {
            "run": ctypes.cast(torch_library.torch_parallel_for, ctypes.c_void_p)
        }
    except (OSError, AttributeError):
        _LOG.warning(
            "%s is missing: PyTorch's functions stand in, and generation and updates are slower;"
            " install a C++ compiler (g++), then run python -m dapo.libs.cpu_kernels",
            path,
        )
        return None
    for name, arguments in _ARGUMENTS.items():
        for dtype, suffix in DTYPES.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes = arguments
            function.restype = None
            functions[name, dtype] = function
    for dtype in (torch.float32, torch.bfloat16)[: 1 + bool(library.multiplies_bfloat16())]:
        for name, arguments in _OF_PRODUCTS.items():
            functions[name, dtype] = getattr(library, f"{name}_{DTYPES[dtype]}")
            functions[name, dtype].argtypes = arguments
            functions[name, dtype].restype = None
    functions["panel"] = library.panel_outputs()
    return functions


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
    return [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in arguments]
