"""The table of one results file, or of several with a column for each: for people, and between a
document's markers.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compute_limits import share_of_limit

MARKER = "<!-- bench -->"
HEADER = (
    "measured",
    "ours",
    "opponent",
    "",
    "ours / opponent (min to max)",
    "of the limit: ours",
    "opponent",
)


@dataclass(frozen=True)
class Spread:
    """Repetitions as their median, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no repetition was measured")
        return cls(median(values), min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """ours / theirs, round by round where the rounds were interleaved, else of the two medians."""
    if len(ours) == len(theirs):
        return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return Spread.of([median(ours) / median(theirs)])


def table_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for each figure and opponent, and one for each that was skipped."""
    return [row for name, part in results["parts"].items() for row in _part_rows(name, part)]


def markdown_table(results: Mapping[str, Any]) -> str:
    """The table, and beneath it what it was measured on."""
    return "\n".join([*markdown_rows(HEADER, table_rows(results)), "", *footnotes(results)])


def processors_table(several: Sequence[Mapping[str, Any]]) -> str:
    """Ours against each opponent, in one column per results file; beneath it what each was measured
    on.
    """
    columns = [{(row[0], row[3]): row for row in table_rows(results)} for results in several]
    measured = list(
        dict.fromkeys(key for column in columns for key, row in column.items() if row[3])
    )
    rows = [
        (name, other, *(_comparison(column.get((name, other))) for column in columns))
        for name, other in measured
    ]
    header = (
        "ours / opponent (min to max); of the limit: ours, opponent",
        "opponent",
        *map(_processor, several),
    )
    notes = (line for results in several for line in ("", *footnotes(results)))
    return "\n".join([*markdown_rows(header, rows), *notes])


def _comparison(row: tuple[str, ...] | None) -> str:
    if row is None or not row[2]:
        return "not measured"
    *_, found, of_ours, of_other = row
    return f"{found}; {of_ours}, {of_other}" if of_ours and of_other else found


def _processor(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    dtypes = sorted({part["dtype"] for part in results["parts"].values()})
    return f"{machine['cpu']}: {', '.join((*machine['flags'], *dtypes))}"


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def footnotes(results: Mapping[str, Any]) -> list[str]:
    """The machine, the formula of the limit, and where each part comes from."""
    machine = results["machine"]
    parts = results["parts"]
    flags = ", ".join(machine["flags"]) or "none of the instructions that matter"
    rates = [rate for part in parts.values() for rate in part.get("gflops", [])]
    notes = [
        f"{machine['cpu']}, {machine['cores']} cores ({flags}). Medians; in brackets the smallest"
        " and the largest."
    ]
    if rates:
        spread = Spread.of(rates)
        notes.append(
            f"Large square matmuls of the same rounds: {spread.median:.0f} GFLOP/s"
            f" ({spread.low:.0f} to {spread.high:.0f}), from which the limit follows."
        )
    versions: dict[str, str] = {}
    for part in parts.values():
        for found in part.get("versions", {}).values():
            versions |= found
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    sources = sorted(
        {
            (part["date"], part["commit"], part["dtype"])
            for part in parts.values()
            if part["figures"]
        }
    )
    measured = "; ".join(f"{date}, commit {commit}, {dtype}" for date, commit, dtype in sources)
    notes.append(f"{measured}; {listed}." if listed else f"{measured}.")
    return notes


def replace_between_markers(text: str, table: str, *, marker: str = MARKER) -> str:
    """`text` with `table` between its two marker lines.

    Raises ValueError unless there are exactly two.
    """
    lines = text.split("\n")
    found = [number for number, line in enumerate(lines) if line.strip() == marker]
    if len(found) != 2:
        raise ValueError(
            f"expected exactly two lines {marker} around the table, found {len(found)}"
        )
    return "\n".join([*lines[: found[0] + 1], table, *lines[found[1] :]])


def console_table(results: Mapping[str, Any]) -> str:
    """The same rows in columns, for a terminal."""
    rows = [HEADER, *table_rows(results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(
        [lines[0], "  ".join("-" * width for width in widths), *lines[1:], "", *footnotes(results)]
    )


def _part_rows(name: str, part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for figure in part.get("figures", []):
        alike.setdefault((figure["name"], figure["unit"]), []).append(figure)
    rows = [row for figures in alike.values() for row in _figure_rows(figures, part)]
    label = next(iter(alike), (name, ""))[0]
    rows += [
        (label, "", "", entry["system"], f"skipped: {entry['reason']}", "", "")
        for entry in part.get("skipped", [])
    ]
    return rows


def _figure_rows(
    figures: Sequence[Mapping[str, Any]], part: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    ours = next((figure for figure in figures if figure["system"] == "ours"), None)
    if ours is None:
        return []
    others = [figure for figure in figures if figure["system"] != "ours"]
    measured = f"{ours['name']}, {ours['unit']}" + (
        " (less is better)" if ours["better"] == "lower" else ""
    )
    if not others:
        return [(measured, _figure_text(ours), "", "", "", _share_text(ours, part), "")]
    return [
        (
            measured,
            _figure_text(ours),
            _figure_text(other),
            str(other["system"]),
            _ratio_text(ours, other),
            _share_text(ours, part),
            _share_text(other, part),
        )
        for other in others
    ]


def _ratio_text(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if ours.get("unfinished"):
        return "ours did not finish"
    found = ratio(ours["values"], other["values"])
    bound = "at most " if other.get("unfinished") else ""
    spread = f" ({found.low:.2f} to {found.high:.2f})" if found.low != found.high else ""
    return f"{bound}{found.median:.2f}{spread}"


def format_spread(values: Sequence[float]) -> str:
    """The median, with the smallest and the largest where they differ."""
    found = Spread.of(values)
    spread = f" ({_number(found.low)} to {_number(found.high)})" if found.low != found.high else ""
    return f"{_number(found.median)}{spread}"


def _figure_text(figure: Mapping[str, Any]) -> str:
    return ("at least " if figure.get("unfinished") else "") + format_spread(figure["values"])


def _share_text(figure: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    flop = figure.get("flop_per_parameter")
    if flop is None:
        return ""
    shares = [
        share_of_limit(value, gflops, part["parameters"], flop)
        for value, gflops in zip(figure["values"], part["gflops"], strict=True)
    ]
    return f"{100 * median(shares):.0f} %"


def _number(value: float) -> str:
    """Three significant digits, and never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Put the table of one or several results files between the markers of documents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "documents", nargs="*", type=Path, help="Markdown files to rewrite; none: print"
    )
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        required=True,
        help="several: a column for each, with ratios alone",
    )
    parser.add_argument("--parts", nargs="+", help="only these; none: all")
    parser.add_argument(
        "--marker", default=MARKER, help="the line before and behind the table in a document"
    )
    arguments = parser.parse_args()
    several = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    for results in several if arguments.parts else ():
        results["parts"] = {
            name: part for name, part in results["parts"].items() if name in arguments.parts
        }
    table = markdown_table(several[0]) if len(several) == 1 else processors_table(several)
    for document in arguments.documents:
        document.write_text(
            replace_between_markers(
                document.read_text(encoding="utf-8"), table, marker=arguments.marker
            ),
            encoding="utf-8",
        )
    if not arguments.documents:
        print(table)


if __name__ == "__main__":
    main()
