"""Writes tests that call a function by its name, as APPS, TACO, PRIME and LiveCodeBench store them,
as statements.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .required_names import UnusableTests

_HELPERS = """\
def as_lists(value):
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value
"""


@dataclass(frozen=True)
class FunctionCall:
    """The arguments of a function, and the results of which it must return one."""

    arguments: Sequence[Any]
    accepted: Sequence[Any]


def function_of(value: Any, entry_point: str | None) -> str | None:
    """Return the name of the function that tests name themselves, else the row's entry point."""
    for test in (value, *(value if isinstance(value, list) else ())):
        if isinstance(test, Mapping) and test.get("fn_name"):
            return str(test["fn_name"])
    return entry_point


def calls_of(value: Any) -> list[FunctionCall]:
    """Read calls from `{"inputs": ..., "outputs": ...}` or `[{"input": ..., "output": ...}, ...]`.

    Raises UnusableTests if they have neither form.
    """
    if isinstance(value, Mapping) and "inputs" in value:
        inputs = value["inputs"]
        outputs = value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise UnusableTests("its tests call a function; expected lists of inputs and outputs")
        if len(inputs) != len(outputs):
            raise UnusableTests(
                f"its tests have {len(inputs)} inputs and {len(outputs)} outputs; expected an output"
                " for each input"
            )
        return [
            FunctionCall(_arguments(given), _in_or_without_list(output))
            for given, output in zip(inputs, outputs, strict=True)
        ]
    items = value if isinstance(value, list) else [value]
    calls = []
    for item in items:
        if not isinstance(item, Mapping) or not {"input", "output"} <= item.keys():
            raise UnusableTests("its tests call a function; expected an input and an output each")
        output = item["output"]
        # LiveCodeBench writes values as JSON
        expected = _value(output) if isinstance(output, str) else output
        calls.append(FunctionCall(_arguments(item["input"]), [expected]))
    return calls


def statements_of(calls: Sequence[FunctionCall]) -> str:
    """Write calls as a function `check` of the program's function.

    Tuples and lists are equal, as in the harnesses that these tests are written for.
    """
    lines = [_HELPERS, "def check(candidate):"]
    for call in calls:
        arguments = ", ".join(map(repr, call.arguments))
        lines.append(f"    assert as_lists(candidate({arguments})) in {list(call.accepted)!r}")
    return "\n".join(lines)


def _in_or_without_list(output: Any) -> list[Any]:
    """Return an output and, of a list, its first item: APPS writes the result 3 as 3 and as [3]."""
    return [output, output[0]] if isinstance(output, list) and output else [output]


def _arguments(given: Any) -> list[Any]:
    """Return arguments that are a list, or a text with a JSON value on each line."""
    if isinstance(given, list):
        return given
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines() if line.strip()]
    raise UnusableTests(
        f"its tests call a function; expected its arguments as a list, got {given!r:.80}"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableTests(
            f"its tests call a function; expected JSON values, got {text!r:.80}"
        ) from None
