"""Runs text as a notebook runs cells: each has a name, under which its lines are known."""

import linecache
from itertools import count
from typing import Any

_NUMBERS = count(1)


def run_cells(*texts: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """The namespace after the cells have run, one after the other; it is the given one, or a new
    `__main__`.
    """
    names = {"__name__": "__main__"} if namespace is None else namespace
    for text in texts:
        name = f"<ipython-input-{next(_NUMBERS)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), names)
    return names
