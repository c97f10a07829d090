"""`python -m benchmarks.start`: processor time and memory of a run's start on many rows, until its
first step.

Measured in a fresh process, threads included: importing the libraries, reading the rows, loading
the model, rendering and measuring the prompts. The verifier processes are not counted.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

_MEASURED = """
import sys, time
from dapo.start.check import check, read_data
from dapo.start.read import read
from dapo.start.resolve import resolve
from dapo.config import build_config
imported_s = time.process_time()
raw = {"model": sys.argv[2], "data": {"train": sys.argv[1]}, "reward": {"verifier": "math"}}
raw |= {"rollout": {"max_response_tokens": 64}, "overlong": {"buffer_tokens": 8}}
with check(build_config(raw)) as checked:
    inputs = read(resolve(checked), read_data(checked))
print(f"imports {imported_s:.1f} s, rows, model and prompts {time.process_time() - imported_s:.1f} s of processor time")
print(f"{len(inputs.train):,} problems")
"""
_WORDS = (
    "the sum of all positive integers such that has three real roots find area triangle with sides"
)


def write_rows(path: Path, count: int) -> None:
    """Write `count` different problems of about 75 tokens as JSON Lines."""
    random.seed(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            words = " ".join(random.choices(_WORDS.split(), k=random.randint(30, 70)))
            file.write(
                json.dumps({"prompt": f"{words} {number}?", "answer": str(number % 1000)}) + "\n"
            )


def main() -> None:
    """Write the rows, start, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, given.rows)
        subprocess.run([sys.executable, "-c", _MEASURED, str(path), given.model], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"in all {used.ru_utime + used.ru_stime:.1f} s of processor time,"
        f" {used.ru_maxrss / 2**20:.2f} GiB at most"
    )


if __name__ == "__main__":
    main()
