"""Makes docs/options.md from the options themselves, and the tables of docs/from_*.md.

Run as a program, this module prints docs/options.md; with pages as arguments it writes their tables into them.
"""

import sys
from pathlib import Path

from dapo.config.option_entries import option_entries, yaml_text
from dapo.config.options import CONDITIONS
from dapo.config.other_names import COUNTERPARTS, with_table
from dapo.core.terminal import print_text


def options_page() -> str:
    """docs/options.md."""
    lines = [
        "<!-- Made from src/dapo/config/ by `make docs`: change the options, not this page. -->",
        "# Options",
        "",
        "Everything that a YAML file or `KEY=VALUE` on the command line can set; `dapo options loss` prints a section. "
        "*Paper* is the paper's value, where it has one. *Only with* is the condition under which the option has an "
        "effect; `dapo check` lists what is set without it.",
    ]
    of_sections: dict[str, list[str]] = {"A run": []}
    for entry in option_entries():
        default = entry.default_text if entry.is_required else f"`{entry.default_text}`"
        paper = f"`{yaml_text(entry.paper)}`" if entry.has_paper_value else ""
        shown = CONDITIONS.get(entry.condition) or (f"`{entry.condition}`" if entry.condition else "")
        row = f"| `{entry.name}` | {default} | {paper} | {entry.unit} | {entry.meaning} | {shown} |".replace("*", r"\*")
        of_sections.setdefault(entry.section or "A run", []).append(row)
    for heading, rows in of_sections.items():
        title = heading if heading == "A run" else f"`{heading}`"
        lines += [
            "",
            f"## {title}",
            "",
            "| option | default | paper | unit | meaning | only with |",
            "|---|---|---|---|---|---|",
        ]
        lines += rows
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        (peer,) = (each for each in COUNTERPARTS if page.stem == f"from_{each}")
        page.write_text(with_table(page.read_text(encoding="utf-8"), peer), encoding="utf-8")
    if not sys.argv[1:]:
        print_text(options_page(), end="")
