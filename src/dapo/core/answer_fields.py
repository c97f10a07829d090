"""The fields of other people's answers: each has a type and a range, and what is outside of them is
an error.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_COUNT = 1 << 31
"""The largest count of tokens that a server may claim."""
MAX_LOGPROB = 1e-3
"""Rounding may lift a log-probability above 0 by this much; a larger one is a logit or nonsense."""
MIN_LOGPROB = -1e5
"""No softmax over a vocabulary gives less; servers write -9999 for "impossible"."""
_SHOWN_CHARS = 60


class WrongField(ValueError):
    """A field of an answer has another type or value than expected; the message names both."""


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text. Raises WrongField if it is none, or too deep to be read."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise WrongField("it is not JSON") from None


def field(value: Any, *path: str | int) -> Any:
    """Return the value at a path of keys and positions. Raises WrongField if there is none."""
    for index, key in enumerate(path):
        fits = isinstance(value, list) if isinstance(key, int) else isinstance(value, dict)
        if not fits or (
            key not in value if isinstance(key, str) else not -len(value) <= key < len(value)
        ):
            raise WrongField(f"it has no {_dotted(path[: index + 1])}")
        value = value[key]
    return value


def text_field(value: Any, name: str, *, default: str) -> str:
    """Return a text that any file can hold; `default` stands for null.

    Raises WrongField for any other type.
    """
    if value is None:
        return default
    if not isinstance(value, str):
        raise WrongField(f"its {name} is {_shown(value)}, expected text")
    return value.encode(errors="replace").decode()  # halves of surrogate pairs


def count_field(value: Any, name: str) -> int:
    """Return a whole number from 0 to MAX_COUNT; null stands for 0.

    Raises WrongField for anything else.
    """
    if value is None:
        return 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_COUNT or value != int(value):
        raise WrongField(
            f"its {name} is {_shown(value)}, expected a whole number from 0 to {MAX_COUNT:,}"
        )
    return int(value)


def logprob_field(value: Any, name: str) -> float:
    """Return a log-probability, at most 0.

    Raises WrongField if it is no number or outside of MIN_LOGPROB to MAX_LOGPROB.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not MIN_LOGPROB <= value <= MAX_LOGPROB:
        raise WrongField(
            f"its {name} is {_shown(value)}, expected a log-probability from {MIN_LOGPROB:g} to 0"
        )
    return min(float(value), 0.0)


def optional_mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a JSON object; null stands for an empty one. Raises WrongField for anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WrongField(f"its {name} is {_shown(value)}, expected an object")
    return value


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (ValueError, RecursionError):  # deep, or an integer of too many digits
        return f"a {type(value).__name__}"
    if len(text) > _SHOWN_CHARS:
        return f"{text[:_SHOWN_CHARS]}..."
    return text
