"""Finds the option here that does what an option of TRL, verl or AReaL does: for error messages and docs/from_*.md.

The table is other_names.tsv, a row for each of their options or values; its rows of the system `dapo` are options that
dapo had once, with the advice for who still sets them.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Peer: TypeAlias = Literal["trl", "verl", "areal"]
TITLES: Mapping[Peer, str] = {"trl": "TRL", "verl": "verl", "areal": "AReaL"}


@dataclass(frozen=True)
class Counterpart:
    """A row of the table: an option of another system, and the options that do the same here."""

    theirs: str
    """Its name, or `name=value` for one of its values."""
    ours: tuple[str, ...]
    """Names of options here, or overrides `option=value`; empty: there is none."""
    remark: str
    converted: bool
    """Whether the value of a single option changes, in the way that the remark describes."""

    @property
    def name(self) -> str:
        return self.theirs.partition("=")[0]

    @property
    def keeps_value(self) -> bool:
        """Whether the value moves to our option unchanged."""
        return len(self.ours) == 1 and "=" not in self.ours[0] and "=" not in self.theirs and not self.converted


def _read_table() -> dict[str, tuple[Counterpart, ...]]:
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    tables: dict[str, tuple[Counterpart, ...]] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        ours = tuple(row["here"].split(", ")) if row["here"] else ()
        found = Counterpart(row["theirs"], ours, row["remark"], converted=row["value"] == "converted")
        tables[row["system"]] = (*tables.get(row["system"], ()), found)
    return tables


_TABLES = _read_table()
COUNTERPARTS: Mapping[Peer, tuple[Counterpart, ...]] = {peer: _TABLES[peer] for peer in TITLES}
REMOVED: Mapping[str, str] = {row.name: row.remark for row in _TABLES["dapo"]}
"""Advice for each option that was removed."""


def called_elsewhere(name: str, value: object = None) -> str | None:
    """A sentence on an unknown option that another system has: `TRL's beta is loss.kl_coef here`; None: none has it.

    Args:
        name: the option as it was typed, with dots; the last part alone is enough.
        value: what it was set to: a mapping stands for the options in it.
    """
    rows = [(peer, row) for peer, table in COUNTERPARTS.items() for row in table]
    for typed in _leaves(name, value):
        # the name itself, else names that end in it, else those that share its last part
        exact = [(peer, row) for peer, row in rows if row.name == typed]
        ending = [(peer, row) for peer, row in rows if row.name.endswith(f".{typed}")]
        alike = [(peer, row) for peer, row in rows if row.name.rpartition(".")[2] == typed.rpartition(".")[2]]
        for found in filter(None, (exact, ending, alike)):
            peer, first = found[0]
            theirs = f"{TITLES[peer]}'s {first.name}"
            same = [row for other, row in found if other == peer and row.name == first.name]
            if ours := dict.fromkeys(option.partition("=")[0] for row in same for option in row.ours):
                return f"{theirs} is {' and '.join(ours)} here (docs/from_{peer}.md)"
            return f"{theirs} has no option here: {first.remark[0].lower()}{first.remark[1:].rstrip('.')}"
    return None


def _leaves(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name
