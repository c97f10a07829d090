"""`python -m benchmarks.compilers`: three ways to compile the work between the products of a decode
step.

Each way computes two functions of 64 rows in float32: RMSNorm of a sum with a residual, and a
sample from a vocabulary by inverting the cumulative distribution. Every way runs in two new
processes, the first without a cache. The seconds of a start are those from the import of the
compiler to the first results. Numba must be installed: `pip install numba`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.report import markdown_rows
from dapo.libs import cpu_kernels

ROWS = 64
HIDDEN = 576
VOCABULARY = 49152
EPSILON = 1e-5
REPETITIONS = 40

Norm: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
Sample: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def norm_in_torch(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """The normed sum, `[rows, hidden]`."""
    total = x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON) * weight


def sample_in_torch(logits: Tensor, uniforms: Tensor) -> Tensor:
    """`[rows]` tokens."""
    totals = torch.softmax(logits, -1).double().cumsum(-1)
    return torch.searchsorted(totals, uniforms * totals[:, -1:]).squeeze(-1)


def by_torch() -> tuple[Norm, Sample]:
    """PyTorch's functions, one after another."""
    return norm_in_torch, sample_in_torch


def by_torch_compile() -> tuple[Norm, Sample]:
    """The same through the C++ backend of `torch.compile`, at run time."""
    return torch.compile(norm_in_torch), torch.compile(sample_in_torch)


def by_extension() -> tuple[Norm, Sample]:
    """`cpu_kernels`, compiled when the package is installed."""
    temperatures = torch.ones(ROWS, 1, dtype=torch.float64)
    ends = torch.arange(1, ROWS + 1)

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return cpu_kernels.rms_norm(x + residual, weight, EPSILON, compiled=True)

    return (
        norm,
        lambda logits, uniforms: cpu_kernels.sample(logits, temperatures, uniforms, ends)[0],
    )


def by_numba() -> tuple[Norm, Sample]:
    """Loops in Python compiled by Numba at run time, over PyTorch's memory."""
    import numba  # type: ignore[import-not-found]
    import numpy as np

    compiled = numba.njit(parallel=True, fastmath=True, cache=True, error_model="numpy")

    @compiled  # type: ignore[untyped-decorator]
    def norm_rows(x: Any, residual: Any, weight: Any, out: Any) -> None:
        for row in numba.prange(x.shape[0]):
            squares = np.float32(0.0)
            for i in range(x.shape[1]):
                out[row, i] = x[row, i] + residual[row, i]
                squares += out[row, i] * out[row, i]
            factor = np.float32(1.0) / np.sqrt(
                squares / np.float32(x.shape[1]) + np.float32(EPSILON)
            )
            for i in range(x.shape[1]):
                out[row, i] *= factor * weight[i]

    @compiled  # type: ignore[untyped-decorator]
    def sample_rows(logits: Any, uniforms: Any, powers: Any, out: Any) -> None:
        for row in numba.prange(logits.shape[0]):
            largest = logits[row, 0]
            for i in range(logits.shape[1]):
                largest = max(largest, logits[row, i])
            total = np.float32(0.0)
            for i in range(logits.shape[1]):
                powers[row, i] = np.exp(logits[row, i] - largest)
                total += powers[row, i]
            left = uniforms[row, 0] * total
            token = 0
            while token < logits.shape[1] - 1 and left >= powers[row, token]:
                left -= powers[row, token]
                token += 1
            out[row] = token

    powers = np.empty((ROWS, VOCABULARY), dtype=np.float32)

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        norm_rows(x.numpy(), residual.numpy(), weight.numpy(), out.numpy())
        return out

    def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        sample_rows(logits.numpy(), uniforms.numpy(), powers, out.numpy())
        return out

    return norm, sample


WAYS = {
    "PyTorch": by_torch,
    "torch.compile": by_torch_compile,
    "Numba": by_numba,
    "C++ extension": by_extension,
}


def measure(way: str, threads: int) -> dict[str, float]:
    """In a new process: seconds to the first results, the shortest microseconds of each function,
    and their errors.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    x = torch.randn(ROWS, HIDDEN)
    residual = torch.randn(ROWS, HIDDEN)
    weight = torch.randn(HIDDEN)
    logits = 2 * torch.randn(ROWS, VOCABULARY)
    uniforms = torch.rand(ROWS, 1, dtype=torch.float64)
    started = time.perf_counter()
    with torch.inference_mode():
        norm, sample = WAYS[way]()
        normed = norm(x, residual, weight)
        tokens = sample(logits, uniforms)
        start_s = time.perf_counter() - started
        error = (normed - norm_in_torch(x.double(), residual.double(), weight.double())).abs().max()
        equal = (tokens == sample_in_torch(logits.double(), uniforms)).double().mean()
        again = torch.equal(norm(x, residual, weight), normed) and torch.equal(
            sample(logits, uniforms), tokens
        )
        return {
            "start_s": start_s,
            "norm_us": _shortest(lambda: norm(x, residual, weight)),
            "sample_us": _shortest(lambda: sample(logits, uniforms)),
            "error": float(error),
            "equal": float(equal),
            "repeats": float(again),
        }


def _shortest(run: Callable[[], Any]) -> float:
    """Microseconds."""
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return 1e6 * min(seconds)


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compilers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help="measure one in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.threads)))
        return
    head = (
        "way",
        "first start, s",
        "next start, s",
        "norm, us",
        "sampling, us",
        "error of the norm",
        "equal tokens, %",
    )
    rows: list[tuple[str, ...]] = [head]
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            first, second = (_in_new_process(way, arguments.threads, Path(cache)) for _ in range(2))
        figures = [f"{each['start_s']:.2f}" for each in (first, second)]
        figures += [
            f"{second['norm_us']:.0f}",
            f"{second['sample_us']:.0f}",
            f"{second['error']:.1e}",
        ]
        rows.append((way, *figures, f"{100 * second['equal']:.0f}"))
    machine = describe_machine()
    print(f"{machine['cpu']}, {arguments.threads} threads, torch {torch.__version__}\n")
    print("\n".join(markdown_rows(rows[0], rows[1:])))


def _in_new_process(way: str, threads: int, cache: Path) -> dict[str, float]:
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "NUMBA_CACHE_DIR": str(cache),
        "NUMBA_NUM_THREADS": str(threads),
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.compilers",
        "--way",
        way,
        "--threads",
        str(threads),
    ]
    done = subprocess.run(command, env=os.environ | own, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
