"""Finds the option here that does what an option of TRL, verl or AReaL does.

The table is other_names.tsv, a row for each of their options or values; its rows of the system
`dapo` are options that dapo had once, with the advice for who still sets them.
"""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from dapo.libs.foreign_options import Algorithm, Counterpart, Table, shown_value, translate_value

Peer: TypeAlias = Literal["trl", "verl", "areal"]
TITLES: Mapping[Peer, str] = {"trl": "TRL", "verl": "verl", "areal": "AReaL"}


def _read_table() -> dict[str, tuple[Counterpart, ...]]:
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    tables: dict[str, tuple[Counterpart, ...]] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        options = tuple(row["here"].split(", ")) if row["here"] else ()
        formula = row["value"] if row["value"] != "converted" else ""
        counterpart = Counterpart(
            row["theirs"], options, row["remark"], converted=bool(row["value"]), formula=formula
        )
        system = row["system"]
        tables[system] = (*tables.get(system, ()), counterpart)
    return tables


_TABLES = _read_table()
COUNTERPARTS: Mapping[Peer, tuple[Counterpart, ...]] = {peer: _TABLES[peer] for peer in TITLES}
REMOVED: Mapping[str, str] = {row.name: row.remark for row in _TABLES["dapo"]}
"""Advice for each option that was removed."""

_DEFAULTS = yaml.safe_load(Path(__file__).with_name("other_defaults.yaml").read_bytes())
OTHERS: Mapping[Peer, Table] = {
    peer: Table(
        title,
        COUNTERPARTS[peer],
        _DEFAULTS[peer]["theirs"],
        _DEFAULTS[peer].get("here", {}),
        {
            name: Algorithm(tuple(entry.get("same", ())), entry.get("condition", ""))
            for name, entry in _DEFAULTS[peer]["algorithms"].items()
        },
    )
    for peer, title in TITLES.items()
}
NO_OPTIONS: Mapping[str, Any] = {}


def peer_that_knows(names: Iterable[str]) -> Peer | None:
    """Return the system that has most of these options by their whole names; None: none has any."""
    counts = {peer: sum(bool(OTHERS[peer].rows_of(name)) for name in names) for peer in TITLES}
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
    peers = sorted(TITLES, key=lambda system: system != peer)
    candidates: list[tuple[Peer, list[Counterpart]]] = [
        (system, OTHERS[system].rows_of(name)) for system in peers
    ]
    # the name itself, else names that end in it, else those that share its last part
    for end in (f".{name}", f".{name.rpartition('.')[2]}"):
        candidates += [
            (system, [row for row in COUNTERPARTS[system] if f".{row.name}".endswith(end)])
            for system in peers
        ]
    system, rows = next(((system, rows) for system, rows in candidates if rows), (None, []))
    if system is None:
        return None
    rows = [row for row in rows if row.name == rows[0].name]
    their_name = name if rows[0].name.endswith("*") else rows[0].name
    label = f"{TITLES[system]}'s {their_name}"
    if value is not None:
        label += f"={shown_value(value)}"
    row, equivalents = translate_value(rows, value, {**OTHERS[system].defaults, **others})
    options: dict[str, None] = {}
    for counterpart in rows:
        for option in counterpart.ours:
            options.setdefault(option.partition("=")[0])
    values = [*options]
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
