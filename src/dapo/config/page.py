"""Makes docs/options.md from the options themselves, and the tables of docs/from_*.md.

Run as a program, this module prints docs/options.md; with pages as arguments it writes their tables into them.
"""

import sys
from pathlib import Path
from typing import Any

from dapo.config.options import CONDITIONS, known_about, options_of, section_in
from dapo.config.other_names import COUNTERPARTS, with_table
from dapo.core.terminal import print_text


def options_page() -> str:
    """docs/options.md."""
    lines = [
        "<!-- Made from src/dapo/config/ by `make docs`: change the options, not this page. -->",
        "# Options",
        "",
        "Everything that a YAML file or `KEY=VALUE` on the command line can set. *Paper* is the paper's value, where "
        "it has one. *Only with* is the condition under which the option has an effect; `dapo check` lists what is set "
        "without it.",
    ]
    of_sections: dict[str, list[str]] = {"A run": []}
    conditions: dict[str, str] = {}
    for name, info in options_of():
        parent = name.rpartition(".")[0]
        condition = known_about(info).get("only_with") or conditions.get(parent, "")
        if section_in(info.annotation) and info.default is not None:
            of_sections |= {} if parent else {name: []}
            conditions[name] = condition
            continue
        default = "required" if info.is_required() else f"`{_yaml(info.default)}`"
        paper = f"`{_yaml(known_about(info)['paper'])}`" if "paper" in known_about(info) else ""
        shown = CONDITIONS.get(condition) or (f"`{condition}`" if condition else "")
        row = f"| `{name}` | {default} | {paper} | {info.description} | {shown} |".replace("*", r"\*")
        of_sections[name.partition(".")[0] if parent else "A run"].append(row)
    for heading, rows in of_sections.items():
        title = heading if heading == "A run" else f"`{heading}`"
        lines += ["", f"## {title}", "", "| option | default | paper | meaning | only with |", "|---|---|---|---|---|"]
        lines += rows
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        (peer,) = (each for each in COUNTERPARTS if page.stem == f"from_{each}")
        page.write_text(with_table(page.read_text(encoding="utf-8"), peer), encoding="utf-8")
    if not sys.argv[1:]:
        print_text(options_page(), end="")
