"""`dapo options`: what can be set, printed for a person."""

from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from dapo.config.option_entries import OptionEntry, section_names, yaml_text
from dapo.runs.console import SafeConsole


def print_options(entries: Sequence[OptionEntry]) -> None:
    """Each option with its default, the paper's value, its meaning, and when it has an effect."""
    console = SafeConsole()
    for entry in entries:
        values = [f"default {entry.default_text}" if not entry.is_required else "required"]
        if entry.has_paper_value:
            values.append(f"paper {yaml_text(entry.paper)}")
        if entry.unit:
            values.append(f"unit {entry.unit}")
        console.print(Text.assemble((entry.name, "bold"), f"  {', '.join(values)}"), soft_wrap=True)
        condition = f" Only with {entry.condition_text}." if entry.condition else ""
        console.print(Padding(f"{entry.meaning}{condition}", (0, 0, 0, 4)))
    sections = section_names(entries)
    if len(sections) > 1:
        console.print(f"\n{len(entries)} options; of one section: dapo options {'|'.join(sections)}", soft_wrap=True)
