"""Makes the float32 references of `make gpu-acceptance` on a CPU, in a quarter of an hour.

`python -m benchmarks.make_references`; needed when a compared model or what it is given changes
(benchmarks/tests/test_gpu_acceptance.py says so). A call that was ended goes on when it is repeated.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.acceptance.correctness import (
    gradient_references,
    logprob_references,
    long_references,
)
from benchmarks.acceptance.engines import token_references
from benchmarks.acceptance.references import FILE, Reference


def all_references(*, on_gpu: bool) -> list[Reference]:
    """Those of every check, of the sizes of a GPU or of a CPU."""
    return [
        *long_references(on_gpu=on_gpu),
        *logprob_references(on_gpu=on_gpu),
        *token_references(on_gpu=on_gpu),
        *gradient_references(on_gpu=on_gpu),
    ]


def write_references(references: Sequence[Reference], path: Path) -> None:
    """Compute those that the file lacks, which is written after each; others are left out."""
    found: dict[str, Tensor] = {}
    if path.is_file():
        keys = tuple(f"{reference.key}/" for reference in references)
        stored = load_file(path)
        found = {name: tensor for name, tensor in stored.items() if name.startswith(keys)}
    for reference in references:
        if f"{reference.key}/weights" not in found:
            started = time.monotonic()
            numbers = reference.made(reference.model())
            found |= {f"{reference.key}/{name}": tensor for name, tensor in numbers.items()}
            print(f"{reference.key}: {time.monotonic() - started:.0f} s", flush=True)
        save_file(found, path)
    path.chmod(0o644)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def main(words: Sequence[str]) -> int:
    """0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.make_references")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument(
        "--sizes", choices=("cuda", "cpu"), default="cuda", help="of the checks on that device"
    )
    arguments = parser.parse_args(words)
    write_references(all_references(on_gpu=arguments.sizes == "cuda"), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
