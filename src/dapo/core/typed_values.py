"""Values of data that JSON lacks, such as dates and decimals: which are kept, how JSON holds them
without a loss, and as which texts they are shown.

The form in JSON is part of the protocol of worker processes and of rows in run directories:
`{"__dapo_type__": "date", "value": "2024-05-06"}`.
"""

import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

MARK = "__dapo_type__"
"""The key of a mapping that stands for a value of another type."""
_ESCAPED = "mapping"
"""The type of a mapping that has this key itself."""


def standard_value(value: object) -> Any:
    """Return a value of pandas or NumPy as the same value of a standard type, if there is one.

    Values of time with a part below a microsecond have none; missing ones become None.
    """
    kind = type(value).__name__
    module = type(value).__module__.partition(".")[0]
    if kind in ("NAType", "NaTType"):
        return None
    if module == "numpy" and kind in ("datetime64", "timedelta64"):
        return _of_numpy(value)
    if module == "pandas" and kind == "Timestamp" and isinstance(value, datetime):
        return value if value.nanosecond else _with_standard_zone(value.to_pydatetime())  # type: ignore[attr-defined]
    if module == "pandas" and kind == "Timedelta" and isinstance(value, timedelta):
        return value if value.nanoseconds else value.to_pytimedelta()  # type: ignore[attr-defined]
    if type(value) in (datetime, time):
        return _with_standard_zone(value)
    return value


def is_kept(value: object) -> bool:
    """Return True for a value of a type that JSON lacks and that is kept, also in a process."""
    if type(value) is float:
        return math.isinf(value)
    return type(value) in _ENCODERS and _zone_is_known(value)


def as_text(value: object) -> str:
    """Return the text of a kept value, for what takes JSON alone: `2024-05-06`, `1.50`."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value)


def with_texts(value: Any) -> Any:
    """Return JSON values alone: kept values as texts, also within lists and mappings."""
    return _mapped(value, as_text)


def to_json_values(value: Any) -> Any:
    """Return JSON values from which `of_json_values` makes an equal value of equal types."""
    return _mapped(value, _encoded, escapes=True)


def of_json_values(value: Any) -> Any:
    """Return the value that `to_json_values` encoded.

    Raises ValueError for a mark with an unknown type, or a value that its type cannot have.
    """
    if isinstance(value, list):
        return [of_json_values(item) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: of_json_values(item) for key, item in value.items()}
    kind = value[MARK]
    content = value.get("value")
    if kind == _ESCAPED and isinstance(content, dict):
        return {key: of_json_values(item) for key, item in content.items()}
    decode = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decode is None:
        raise ValueError(
            f"{MARK} must be one of {', '.join(_DECODERS)} or {_ESCAPED}, got {kind!r}"
        )
    try:
        decoded = decode(content)
        zone = value.get("zone")
        return decoded if zone is None else _in_zone(decoded, zone)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{content!r} is no {kind} ({type(error).__name__})") from None


def _mapped(value: Any, change: Callable[[Any], Any], *, escapes: bool = False) -> Any:
    """Return the value with `change` of each kept value in it."""
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, Mapping):
        changed = {key: _mapped(item, change, escapes=escapes) for key, item in value.items()}
        return {MARK: _ESCAPED, "value": changed} if escapes and MARK in changed else changed
    if isinstance(value, list | tuple):
        return [_mapped(item, change, escapes=escapes) for item in value]
    return change(value) if is_kept(value) else value


def _encoded(value: Any) -> dict[str, Any]:
    kind = type(value).__name__
    encoded = {MARK: kind, "value": _ENCODERS[type(value)](value)}
    zone = getattr(getattr(value, "tzinfo", None), "key", None)
    if zone is not None:
        encoded["zone"] = zone
        encoded["value"] = value.replace(tzinfo=None).isoformat()
        if value.fold:
            encoded["zone"] = f"{zone}#1"
    return encoded


def _in_zone(value: Any, zone: str) -> Any:
    """Return a time on the clocks of a zone; `#1` marks the second of two equal readings."""
    name, _, fold = zone.partition("#")
    return value.replace(tzinfo=ZoneInfo(name), fold=int(fold or 0))


def _with_standard_zone(value: Any) -> Any:
    """Return a time with its zone as `datetime.timezone` or ZoneInfo; as it is if that fails."""
    zone = value.tzinfo
    if zone is None or isinstance(zone, ZoneInfo) or type(zone) is timezone:
        return value
    standard = _standard_zone(zone, value)
    return value if standard is None else value.replace(tzinfo=standard)


def _standard_zone(zone: tzinfo, value: Any) -> tzinfo | None:
    name = getattr(zone, "zone", None)  # of pytz
    offset = value.utcoffset()
    if offset is None:
        return None
    if isinstance(name, str):
        try:
            named = ZoneInfo(name)
        except (ValueError, OSError, KeyError):
            named = None
        if named is not None and value.replace(tzinfo=named).utcoffset() == offset:
            return named
    return timezone(offset)


def _zone_is_known(value: object) -> bool:
    zone = getattr(value, "tzinfo", None)
    return (
        zone is None
        or type(zone) is timezone
        or (isinstance(zone, ZoneInfo) and zone.key is not None)
    )


def _of_numpy(value: Any) -> Any:
    """Return a time of NumPy as datetime, date or timedelta; as it is if that is not exact."""
    if str(value) == "NaT":
        return None
    item = value.item()
    if isinstance(item, date | timedelta):
        return item
    rounded = value.astype(
        "datetime64[us]" if "datetime" in value.dtype.name else "timedelta64[us]"
    )
    item = rounded.item()
    is_exact = isinstance(item, date | timedelta) and rounded.astype(value.dtype) == value
    return item if is_exact else value


def _decoded_delta(parts: Any) -> timedelta:
    days, seconds, microseconds = parts
    return timedelta(days, seconds, microseconds)


def _decoded_decimal(text: Any) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(text) from None


def _decoded_infinity(text: Any) -> float:
    return {"inf": math.inf, "-inf": -math.inf}[text]


_ENCODERS: Mapping[type, Callable[[Any], Any]] = {
    date: date.isoformat,
    datetime: datetime.isoformat,
    time: time.isoformat,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    Decimal: str,
    UUID: str,
    float: str,  # an infinite one
}
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": _decoded_delta,
    "Decimal": _decoded_decimal,
    "UUID": UUID,
    "float": _decoded_infinity,
}
