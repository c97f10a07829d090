"""Finds the option here that does what an option of TRL, verl or AReaL does.

The table is other_names.tsv, a row for each of their options or values; its rows of the system
`dapo` are options that dapo had once, with the advice for who still sets them.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from dapo.libs.foreign_options import Algorithm, Counterpart, Table, shown_value, translate_value

Peer: TypeAlias = Literal["trl", "verl", "areal"]
TITLES: Mapping[Peer, str] = {"trl": "TRL", "verl": "verl", "areal": "AReaL"}


def _read_table() -> dict[str, tuple[Counterpart, ...]]:
    """Return the rows of the table by system."""
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    tables: dict[str, list[Counterpart]] = {}
    # remarks hold quotation marks, which csv would take for the quotes of a field
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        tables.setdefault(row["system"], []).append(_counterpart(row))
    return {system: tuple(rows) for system, rows in tables.items()}


def _counterpart(row: Mapping[str, str]) -> Counterpart:
    """Read a row of the table."""
    options: tuple[str, ...] = ()
    if row["here"]:
        options = tuple(row["here"].split(", "))
    # `converted` marks a value that changes in a way that only the remark tells
    formula = ""
    if row["value"] != "converted":
        formula = row["value"]
    is_converted = bool(row["value"])
    return Counterpart(
        row["theirs"], options, row["remark"], converted=is_converted, formula=formula
    )


_TABLES = _read_table()
COUNTERPARTS: Mapping[Peer, tuple[Counterpart, ...]] = {peer: _TABLES[peer] for peer in TITLES}
GUESSED: Mapping[str, str] = {row.name: row.remark for row in _TABLES["dapo"]}
"""What to do instead of setting an option that one might try."""

_DEFAULTS = yaml.safe_load(Path(__file__).with_name("other_defaults.yaml").read_bytes())


def _other(peer: Peer) -> Table:
    """Return the rows and the defaults of a system."""
    defaults = _DEFAULTS[peer]
    algorithms = {}
    for name, entry in defaults["algorithms"].items():
        equal_values = tuple(entry.get("same", ()))
        algorithms[name] = Algorithm(equal_values, entry.get("condition", ""))
    return Table(
        TITLES[peer],
        COUNTERPARTS[peer],
        defaults["theirs"],
        defaults.get("here", {}),
        algorithms,
    )


OTHERS: Mapping[Peer, Table] = {peer: _other(peer) for peer in TITLES}
NO_OPTIONS: Mapping[str, Any] = {}


def peer_that_knows(names: Iterable[str]) -> Peer | None:
    """Return the system that has most of these options by their whole names; None: none has any."""
    counts = {}
    for peer, table in OTHERS.items():
        counts[peer] = sum(1 for name in names if table.rows_of(name))
    best = max(counts, key=lambda peer: counts[peer])
    return best if counts[best] else None


def called_elsewhere(
    name: str,
    value: object = None,
    *,
    peer: Peer | None = None,
    others: Mapping[str, Any] = NO_OPTIONS,
) -> str | None:
    """Explain an option of another system: `TRL's beta=0.1 is loss.kl_coef=0.1 here`.

    Args:
        name: the option as it was typed, with dots or its last part alone.
        value: its value; None: the sentence names options alone.
        peer: the system that is asked first.
        others: the other options of that system that are set, for formulas.
    """
    system, rows = rows_named(name, peer)
    if system is None:
        return None
    # the row of a whole section stands for each option in it
    their_name = rows[0].name
    if their_name.endswith("*"):
        their_name = name
    label = f"{TITLES[system]}'s {their_name}"
    if value is not None:
        label += f"={shown_value(value)}"
    # its own value, which a formula uses in place of the default, may not be among the others
    names = {**OTHERS[system].defaults, **others}
    if value is not None:
        names[rows[0].name] = value
    row, equivalents = translate_value(rows, value, names)
    options: dict[str, None] = {}
    for counterpart in rows:
        for option in counterpart.ours:
            options.setdefault(option.partition("=")[0])
    values = list(options)
    if equivalents and value is not None:
        values = [f"{option}={shown_value(inner)}" for option, inner in equivalents.items()]
    if row is None and options and value is not None:
        return f"{label} has no option here: {' and '.join(options)} has no such value"
    remark = rows[0].reason if row is None else row.reason
    if not options:
        return f"{label} has no option here: {remark}"
    page = "coming_from"
    if rows[0].converted and not equivalents:
        page += f": {remark}"
    return f"{label} is {' and '.join(values)} here (dapo show docs {page})"


def rows_named(name: str, peer: Peer | None) -> tuple[Peer | None, list[Counterpart]]:
    """Return the rows of one option by its name, and the system of that option, `peer` first.

    The option has the name itself, else its name ends in it, else it has the same last part.
    """
    systems = sorted(TITLES, key=lambda system: system != peer)
    for system in systems:
        rows = OTHERS[system].rows_of(name)
        if rows:
            return system, _of_first_name(rows)
    for ending in (f".{name}", f".{name.rpartition('.')[2]}"):
        for system in systems:
            rows = [row for row in COUNTERPARTS[system] if f".{row.name}".endswith(ending)]
            if rows:
                return system, _of_first_name(rows)
    return None, []


def _of_first_name(rows: Sequence[Counterpart]) -> list[Counterpart]:
    """Return the rows of the first option among several."""
    return [row for row in rows if row.name == rows[0].name]
