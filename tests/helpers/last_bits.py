"""The C library of another machine: its functions of `math` differ from this one's by a unit in the
last place.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

FUNCTIONS = (
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "pow",
    "lgamma",
    "gamma",
    "erf",
    "erfc",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atan2",
    "sinh",
    "cosh",
    "tanh",
)
"""What a C library may round either way; `sqrt` and `fsum` are exact by their standards."""


def use_other_last_bits(patch: pytest.MonkeyPatch) -> None:
    """Let the functions of `math` err by a unit in the last place, up or down by their argument.

    Modules that import them later, or have imported them by name, get the same ones.
    """
    changed = {getattr(math, name): _erring(getattr(math, name)) for name in FUNCTIONS}
    modules = [
        math,
        *(module for name, module in sys.modules.items() if name.partition(".")[0] == "dapo"),
    ]
    for module in modules:
        for name, value in list(vars(module).items()):
            if (
                callable(value)
                and getattr(value, "__module__", None) == "math"
                and value in changed
            ):
                patch.setattr(module, name, changed[value])


def _erring(function: Callable[..., float]) -> Callable[..., float]:
    def erring(*arguments: Any) -> float:
        value = function(*arguments)
        return math.nextafter(value, math.inf if hash(arguments) % 2 else -math.inf)

    return erring
