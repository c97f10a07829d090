"""Rows of a table that translates the options of one program to those of another."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from foreign_options.formulas import compute


@dataclass(frozen=True)
class Counterpart:
    """A row of the table: an option of another system, and the options that do the same here."""

    theirs: str
    """Its name, `name=value` for one of its values, or `section.*` for all options of a section without a row."""
    ours: tuple[str, ...]
    """Names of options here, or overrides `option=value`; empty: there is none."""
    remark: str
    converted: bool
    """Whether the value of a single option changes, in the way that the remark describes."""
    formula: str
    """The value here, from their options by name; empty: it is the same, or a person converts it."""

    @property
    def name(self) -> str:
        return self.theirs.partition("=")[0]

    @property
    def keeps_value(self) -> bool:
        """Whether the value moves to our option unchanged."""
        return len(self.ours) == 1 and "=" not in self.ours[0] and "=" not in self.theirs and not self.converted

    @property
    def reason(self) -> str:
        """The remark in the middle of a sentence."""
        text = self.remark.rstrip(".")
        return text if text[1:2].isupper() or text.startswith("`") else f"{text[:1].lower()}{text[1:]}"

    def states(self, value: object) -> bool:
        """Whether the row is that of this value."""
        return "=" in self.theirs and self.theirs.partition("=")[2].casefold() == shown_value(value).casefold()


def translated(
    rows: Sequence[Counterpart], value: Any, names: Mapping[str, Any]
) -> tuple[Counterpart | None, dict[str, Any]]:
    """The row of an option that holds for a value, and the values of our options that it gives; None: no row does.

    `names` are all options of the other system by name, for formulas. A row without values here is for a person.
    """
    row = next((row for row in rows if row.states(value)), None)
    row = row or next((row for row in rows if "=" not in row.theirs), None)
    if row is None or (not row.formula and (value is None or row.converted)):
        return row, {}
    pairs = (option.partition("=") for option in row.ours if "=" in option)
    stated = {option: text if text in ("on", "off") else yaml.safe_load(text) for option, _, text in pairs}
    if row.keeps_value:
        return row, {row.ours[0]: value}
    if not row.formula:
        return row, stated
    try:
        found = compute(row.formula, names)
    except (TypeError, ValueError, ArithmeticError):
        return row, {}  # one of the options in it is not set, or no number
    values = found if len(row.ours) > 1 else [found]
    options = [option.partition("=")[0] for option in row.ours]
    return row, {option: each for option, each in zip(options, values, strict=True) if each is not None}


def leaves_of(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the options in a section by their whole names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves_of(f"{name}.{key}".lstrip("."), inner)
    else:
        yield name, value


def shown_value(value: object) -> str:
    """Format the value of another system's option as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
