"""`python -m benchmarks.kernels`: how fast each kernel multiplies each weight shape of a model on
this processor.

These are the times by which a run chooses kernels when it starts. Nothing is chosen or kept here. A
second table has the work between the products of a decode step, by PyTorch's functions and by those
of `cpu_kernels`.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import describe_machine
from benchmarks.report import markdown_rows
from dapo.engines.native.linear_probe import (
    MAX_ELEMENTS,
    MIN_ELEMENTS,
    linear_shapes,
    measure_kernels,
)
from dapo.engines.native.token_sampling import SamplingSettings, UniformDraws, sample
from dapo.libs.cpu_kernels import Prompts, Rows, attend, rms_norm, rotate_
from dapo.libs.cpu_kernels.prepacked import KERNELS, multiplies
from dapo.policy.model import load_model

REPETITIONS = 40
GROUP = 8
OWN = 48  # the rows that share a prompt, and the positions of each row's own
PROMPTS = (48, 512)


def rates(model: nn.Module, dtype: torch.dtype, rows: int) -> list[tuple[str, ...]]:
    """The header, then for each timed shape the GFLOP/s of each kernel that multiplies this
    type.
    """
    names = [name for name in KERNELS if multiplies(name, dtype)]
    found: list[tuple[str, ...]] = [("outputs x inputs", *(f"{name}, GFLOP/s" for name in names))]
    for outputs, inputs in sorted(linear_shapes(model)):
        if outputs * inputs < MIN_ELEMENTS:
            continue
        timed = min(outputs, max(1, MAX_ELEMENTS // inputs))
        with torch.inference_mode():
            seconds = measure_kernels(names, timed, inputs, rows, dtype)
        flop = 2 * rows * timed * inputs
        found.append(
            (f"{outputs} x {inputs}", *(f"{flop / seconds[name] / 1e9:.0f}" for name in names))
        )
    return found


@torch.inference_mode()
def between_products(model: nn.Module, dtype: torch.dtype, rows: int) -> list[tuple[str, ...]]:
    """The header, then for each operation of a decode step the shortest time by PyTorch and by
    `cpu_kernels`.
    """
    config = model.config
    heads = config.num_attention_heads
    key_heads = config.num_key_value_heads
    hidden = config.hidden_size
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    x = torch.randn(rows, 1, hidden, dtype=dtype)
    weight = torch.randn(hidden, dtype=dtype)
    states = torch.randn(rows, 1, heads + 2 * key_heads, width, dtype=dtype)
    cosines, sines = torch.randn(2, rows, 1, width, dtype=dtype)
    found: list[tuple[str, ...]] = [("between the products", "PyTorch, us", "compiled, us")]
    for name, run in (
        ("RMSNorm", lambda compiled: rms_norm(x, weight, 1e-5, compiled=compiled)),
        (
            "rotary embedding",
            lambda compiled: rotate_(states, cosines, sines, heads, key_heads, compiled=compiled),
        ),
    ):
        found.append(
            (
                f"{name} of {rows} rows",
                *(f"{1e6 * shortest(run, way):.0f}" for way in (False, True)),
            )
        )
    query = states[:, 0, :heads]
    first = torch.zeros(rows, dtype=torch.int64)
    lengths = torch.full((rows,), OWN)
    own_keys, own_values = torch.randn(2, rows, key_heads, OWN, width, dtype=dtype)
    for length in PROMPTS:
        prompts = torch.randn(2, -(-rows // GROUP), key_heads, length, width, dtype=dtype)
        pointers = torch.tensor([[[prompt.data_ptr() for prompt in part] for part in prompts]])
        of_row = torch.arange(rows) // GROUP
        shared = Prompts(of_row, torch.full((len(prompts[0]),), length), pointers)
        keys, values = torch.cat((prompts[:, of_row], torch.stack((own_keys, own_values))), 3)
        grouped = query.reshape(rows, key_heads, -1, width)
        seconds = (
            shortest(
                lambda _, k, v, q: scaled_dot_product_attention(q, k, v),
                None,
                keys,
                values,
                grouped,
            ),
            shortest(
                lambda _, s: attend(query, own_keys, own_values, Rows(first, first, lengths, s)),
                None,
                shared,
            ),
        )
        name = f"attention to {length} of a prompt of {GROUP} rows and {OWN} of their own"
        found.append((name, *(f"{1e6 * each:.0f}" for each in seconds)))
    logits = torch.randn(rows, config.vocab_size, dtype=dtype)
    ones = np.ones((2, rows))
    draws = UniformDraws(torch.rand(rows, 1, dtype=torch.float64))
    settings = [
        SamplingSettings.of(ones, torch.from_numpy(ones), draws, compiled=way)
        for way in (False, True)
    ]
    name = f"sampling from {rows} x {config.vocab_size} logits"
    found.append(
        (
            name,
            *(
                f"{1e6 * shortest(lambda each: sample(logits, each), each):.0f}"
                for each in settings
            ),
        )
    )
    return found


def shortest(
    run: Callable[..., object], *arguments: bool | Tensor | SamplingSettings | Prompts | None
) -> float:
    """The shortest of some repetitions, in seconds: disturbances only lengthen a time."""
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        run(*arguments)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=64, help="of a product")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    model = load_model(given.model, dtype=dtype, device="cpu").model
    for table in (rates(model, dtype, given.rows), between_products(model, dtype, given.rows)):
        print("\n".join(markdown_rows(table[0], table[1:])), "\n")
    machine = describe_machine()
    print(
        f"{machine['cpu']} ({', '.join(machine['flags'])}), {given.threads} threads, {given.dtype},"
        f" {given.rows} rows"
    )


if __name__ == "__main__":
    main()
