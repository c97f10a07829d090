"""The table of a comparison of two commits, for a terminal and for a document."""

from collections.abc import Mapping
from typing import Any

from benchmarks.paired.sides import BASE, OURS, Ratio, Target
from benchmarks.report import format_spread, markdown_rows

MARKER = "<!-- paired -->"
HEADER = ("measured", "base", "ours", "ours / base (95 % interval)", "target")


def markdown(results: Mapping[str, Any]) -> str:
    """The rows of all parts, and beneath them where each comes from."""
    rows = [cells for part in results["parts"].values() for cells in map(cells_of, part["rows"])]
    return "\n".join([*markdown_rows(HEADER, rows), "", *footnotes(results)])


def cells_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row's cells: medians with smallest and largest, the ratio, and whether the target is
    met.
    """
    better = " (less is better)" if row["unit"] in ("s", "GiB") else ""
    name = f"{row['name']}, {row['unit']}{better}" if row["unit"] else row["name"]
    found = Ratio.of(row[OURS], row[BASE]) if all(row[BASE]) and all(row[OURS]) else None
    if found is None:
        return name, format_spread(row[BASE]), format_spread(row[OURS]), "", ""
    interval = (
        f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})"
        if found.interval is not None
        else ""
    )
    target = ""
    if "target" in row:
        wanted = Target(**row["target"])
        target = f"{wanted}: {'met' if wanted.is_met(found.mean) else 'missed'}"
    return (
        name,
        format_spread(row[BASE]),
        format_spread(row[OURS]),
        f"{found.mean:.2f}{interval}",
        target,
    )


def footnotes(results: Mapping[str, Any]) -> list[str]:
    """The machine, the commits, and how busy others kept it."""
    machine = results["machine"]
    notes = [
        f"{machine['cpu']}, {machine['cores']} cores. Medians; in brackets the smallest and the"
        " largest of the rounds. The ratio is the geometric mean over the rounds, and its interval"
        " Student's over their logarithms."
    ]
    for name, part in results["parts"].items():
        busy = max(part["others_share"], default=0.0)
        mark = "" if part["is_quiet"] else " **Not a quiet machine: these are no figures to keep.**"
        notes.append(
            f"`{name}`: {part['date']}, base {part['base']}, ours {part['commit']},"
            f" {part['rounds']} rounds; others used up to {busy:.0%} of the processor.{mark}"
        )
        notes += [f"`{name}`: skipped: {reason}" for reason in part.get("skipped", [])]
    return notes
