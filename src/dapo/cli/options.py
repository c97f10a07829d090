"""`dapo options` and `dapo configs`: prints the options, and the configurations that come with the package."""

from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from dapo.config.option_entries import OptionEntry, section_names, yaml_text
from dapo.config.shipped import first_comment, shipped_configs
from dapo.core.terminal import print_json, print_text
from dapo.runs.console import SafeConsole


def print_options(entries: Sequence[OptionEntry]) -> None:
    """Print each option with its default, the paper's value, its meaning and the condition for its effect."""
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
        console.print(f"\n{len(entries)} options; one section: dapo options {'|'.join(sections)}", soft_wrap=True)


def list_configs(*, as_json: bool) -> None:
    """Print the name of each shipped configuration with its purpose; as JSON also its file."""
    found = {name: {"about": first_comment(path), "path": str(path)} for name, path in shipped_configs().items()}
    if as_json:
        print_json(found)
        return
    width = max(map(len, found), default=0)
    for name, each in found.items():
        print_text(f"{name:<{width}}  {each['about']}")
    print_text("\ndapo train NAME [KEY=VALUE]... trains with one; dapo configs NAME > my.yaml makes a file to change")
