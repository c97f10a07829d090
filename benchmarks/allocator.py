"""`python -m benchmarks.allocator`: page faults and kernel time of an update, with freed memory
kept and without.

Each side updates in a fresh process, in turn: `keep_freed_memory`, which `dapo train` calls, the
allocator as it is, and with huge pages. The first two updates of a process are not counted: they
take the memory.
"""

import argparse
import json
import os
import subprocess
import sys
from statistics import median

from benchmarks.report import format_spread, markdown_rows

_MEASURED = """
import json, resource, sys
from dapo.core.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory(), "the C library is not glibc, or the environment sets its allocator"
from benchmarks.workers.dapo_internals import Studies
studies = Studies()
studies.open(sys.argv[2], "float32", "cpu", int(sys.argv[3]))
found = []
for _ in range(int(sys.argv[4])):
    before = resource.getrusage(resource.RUSAGE_SELF)
    studies.update(groups=2, group=2, prompt=16, tokens=32, microbatch_tokens=1024)
    after = resource.getrusage(resource.RUSAGE_SELF)
    kernel = after.ru_stime - before.ru_stime
    found.append([after.ru_minflt - before.ru_minflt, kernel, kernel + after.ru_utime - before.ru_utime])
print(json.dumps({"updates": found[2:], "peak": after.ru_maxrss / 2**10}))
"""
SIDES = {"as it is": {}, "kept": {}, "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}
"""The environment of each."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=8, help="of each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    given = parser.parse_args()
    words = [given.model, str(given.threads), str(given.updates)]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side, environment in SIDES.items():
            command = [sys.executable, "-c", _MEASURED, side, *words]
            answer = subprocess.run(
                command, check=True, env=os.environ | environment, stdout=subprocess.PIPE, text=True
            )
            measured = json.loads(answer.stdout.splitlines()[-1])
            faults, kernel, processor = (
                median(column) for column in zip(*measured["updates"], strict=True)
            )
            found[side].append(
                {
                    "faults": faults,
                    "kernel": kernel,
                    "processor": processor,
                    "peak": measured["peak"],
                }
            )
    header = (
        "an update of 128 response tokens",
        "page faults",
        "kernel time, s",
        "processor time, s",
        "peak, MiB",
    )
    columns = ("faults", "kernel", "processor", "peak")
    rows = [
        (side, *(format_spread([each[name] for each in of]) for name in columns))
        for side, of in found.items()
    ]
    print("\n".join(markdown_rows(header, rows)))


if __name__ == "__main__":
    main()
