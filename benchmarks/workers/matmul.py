"""The machine's rates of products and of copies: what every figure is held against."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.protocol import serve
from dapo.libs.cpu_kernels.prepacked import KERNELS, multiplies


@torch.inference_mode()
def multiply(dtype: str, device: str, size: int, repeats: int, threads: int) -> dict[str, Any]:
    """The fastest of `repeats` products of two `[size, size]` matrices by each way, in GFLOP/s.

    On a CPU these are torch's own and the engine's kernels, because no library is the fastest on
    every processor.
    """
    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    ways: list[Callable[[], Any]] = [lambda: a @ b]
    for name, kernel in KERNELS.items():
        if device == "cpu" and name != "plain" and multiplies(name, a.dtype):
            prepacked = kernel(b, size)
            ways.append(lambda prepacked=prepacked: prepacked.multiply(a, None))
    seconds = []
    for way in ways:
        for _ in range(repeats):
            started = time.perf_counter()
            way()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return {"gflops": 2 * size**3 / min(seconds) / 1e9}


@torch.inference_mode()
def copy_rate(device: str, size: int, repeats: int = 5) -> dict[str, Any]:
    """The fastest of `repeats` copies of a float32 `[size, size]` matrix, in 1e9 bytes per second,
    read and written.
    """
    source = torch.ones(size, size, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):  # the first one touches the pages
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"gb_per_s": 2 * source.nbytes / min(seconds[1:]) / 1e9}


if __name__ == "__main__":
    serve({"multiply": multiply})
