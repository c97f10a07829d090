"""The machine's matmul rate: what every figure is held against."""

import time
from typing import Any

import torch

from benchmarks.protocol import serve


@torch.inference_mode()
def multiply(dtype: str, device: str, size: int, repeats: int, threads: int) -> dict[str, Any]:
    """The fastest of `repeats` products of two `[size, size]` matrices, in GFLOP/s."""
    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"gflops": 2 * size**3 / min(seconds) / 1e9}


def why_no_gpu() -> dict[str, Any]:
    """Why nothing can be measured on a GPU; empty where it can."""
    return {"reason": "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device here"}


if __name__ == "__main__":
    serve({"multiply": multiply, "why_no_gpu": why_no_gpu})
