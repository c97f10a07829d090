"""`python -m benchmarks.kernels`: how fast each kernel multiplies each weight shape of a model on this processor.

These are the times by which a run chooses kernels when it starts. Nothing is chosen or kept here.
"""

import argparse

import torch
from torch import nn

from benchmarks.machine import describe_machine
from benchmarks.report import markdown_rows
from dapo.engines.native.linear_probe import MAX_ELEMENTS, MIN_ELEMENTS, linear_shapes, measure_kernels
from dapo.engines.native.prepacked_linear import KERNELS, multiplies
from dapo.policy.model import load_model


def rates(model: nn.Module, dtype: torch.dtype, rows: int) -> list[tuple[str, ...]]:
    """The header, then for each timed shape the GFLOP/s of each kernel that multiplies this type."""
    names = [name for name in KERNELS if multiplies(name, dtype)]
    found: list[tuple[str, ...]] = [("outputs x inputs", *(f"{name}, GFLOP/s" for name in names))]
    for outputs, inputs in sorted(linear_shapes(model)):
        if outputs * inputs < MIN_ELEMENTS:
            continue
        timed = min(outputs, max(1, MAX_ELEMENTS // inputs))
        with torch.inference_mode():
            seconds = measure_kernels(names, timed, inputs, rows, dtype)
        flop = 2 * rows * timed * inputs
        found.append((f"{outputs} x {inputs}", *(f"{flop / seconds[name] / 1e9:.0f}" for name in names)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=64, help="of a product")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    table = rates(load_model(given.model, dtype=dtype, device="cpu").model, dtype, given.rows)
    print("\n".join(markdown_rows(table[0], table[1:])))
    machine = describe_machine()
    print(
        f"\n{machine['cpu']} ({', '.join(machine['flags'])}), {given.threads} threads, {given.dtype}, {given.rows} rows"
    )


if __name__ == "__main__":
    main()
