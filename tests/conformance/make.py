"""Write the conformance set: `python tests/conformance/make.py [FOLDER]`, by default beside this
file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import cases_losses
import cases_minibatches
import cases_rewards

FAMILIES = cases_rewards.FAMILIES | cases_losses.FAMILIES | cases_minibatches.FAMILIES
WIDTH = 110
SCHEMA = 1


def text_of(value: Any, indent: int = 0) -> str:
    """JSON with what fits on a line on one line: Python's floats are the shortest that read back
    the same.
    """
    if value == 0 and isinstance(value, float):
        value = 0.0  # not -0.0
    short = json.dumps(value, allow_nan=False)
    if len(short) + indent <= WIDTH or not isinstance(value, dict | list) or not value:
        return short
    space = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [
            f"{space}{json.dumps(key)}: {text_of(entry, indent + 1)}"
            for key, entry in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{' ' * indent}}}"
    lines = [space + text_of(entry, indent + 1) for entry in value]
    return "[\n" + ",\n".join(lines) + f"\n{' ' * indent}]"


def main(folder: Path) -> None:
    for name, make in FAMILIES.items():
        content = {"family": name, "schema": SCHEMA, **make()}
        (folder / f"{name}.json").write_text(text_of(content) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
