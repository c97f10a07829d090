"""`dapo show`: options, shipped configurations, pages of the documentation and the JSON schema.

Imports no torch.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from rich.padding import Padding
from rich.text import Text

from dapo.config.load import shipped, title_of
from dapo.config.messages import nearest_option
from dapo.config.option_entries import (
    OptionEntry,
    entries_of,
    option_entries,
    section_names,
    yaml_text,
)
from dapo.config.schema import config_schema
from dapo.core.errors import ConfigError
from dapo.core.terminal import print_json, print_text
from dapo.runs.console import SafeConsole

KINDS = {
    "options": "The options with their meanings, defaults, units and the paper's values.",
    "configs": "The configurations that come with dapo.",
    "docs": "The pages of the documentation.",
    "schema": "The JSON schema of configuration files, for editors.",
}
"""What can be shown, by the word that names it."""


def show(word: str | None, name: str | None, *, as_json: bool) -> None:
    """Print what the words name.

    Args:
        word: one of KINDS, or the name of an option, a section, a configuration or a page; None:
            list what can be shown.
        name: after one of KINDS, which of them; None: all.
        as_json: print one JSON object.

    Raises ConfigError if nothing has that name, or several things have it.
    """
    if word is None:
        _show_overview(as_json)
        return
    kind = word
    if word not in KINDS:
        if name is not None:
            raise ConfigError(
                f"dapo show {word} {name}: expected one name, or a name after one of"
                f" {', '.join(KINDS)}"
            )
        kind = _kind_of(word)
        name = word
    if kind == "options":
        _show_options(name, as_json)
    elif kind == "configs":
        _show_shipped("configs", name, as_json)
    elif kind == "docs":
        _show_shipped("docs", name, as_json)
    elif name is None:
        print_json(config_schema())
    else:
        raise ConfigError(f"the schema is one file and has no part {name}: dapo show schema")


def _kind_of(name: str) -> str:
    """Return the one kind that has something of this name."""
    kinds = [kind for kind in ("options", "configs", "docs") if _has(kind, name)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        commands = " or ".join(f"dapo show {kind} {name}" for kind in kinds)
        raise ConfigError(f"{name} is the name of several things: {commands}")
    names = [*KINDS, *section_names(option_entries()), *shipped("configs"), *shipped("docs")]
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else nearest_option(name.split("."), None)
    raise ConfigError(f"no option, section, configuration or page is named {name}; {hint}")


def _has(kind: str, name: str) -> bool:
    if kind == "options":
        return any(
            entry.name == name or entry.name.startswith(f"{name}.") for entry in option_entries()
        )
    if kind == "configs":
        return _config_name(name) in shipped("configs")
    return _page_name(name) in shipped("docs")


def _config_name(name: str) -> str:
    return name.removeprefix("configs/").removesuffix(".yaml")


def _page_name(name: str) -> str:
    return name.removeprefix("docs/").removesuffix(".md")


def _show_overview(as_json: bool) -> None:
    """List the sections, configurations and pages that can be shown."""
    names = {
        "options": section_names(option_entries()),
        "configs": list(shipped("configs")),
        "docs": list(shipped("docs")),
    }
    if as_json:
        print_json(names)
        return
    console = SafeConsole()
    for kind, about in KINDS.items():
        console.print(Text.assemble((f"dapo show {kind}", "bold")))
        console.print(Padding(about, (0, 0, 0, 4)))
        if kind in names:
            console.print(Padding(", ".join(names[kind]), (0, 0, 0, 4)))
    print_text(
        "\ndapo show NAME finds an option, a section, a configuration or a page, for example\n"
        "dapo show loss.clip_high, dapo show quickstart > my.yaml, dapo show tutorial"
    )


def _show_options(section: str | None, as_json: bool) -> None:
    """Print all options, those of a section, or one."""
    entries = entries_of(section)
    if as_json:
        print_json({"options": [entry.as_json() for entry in entries]})
        return
    console = SafeConsole()
    for entry in entries:
        facts = ", ".join(_facts(entry))
        console.print(Text.assemble((entry.name, "bold"), f"  {facts}"), soft_wrap=True)
        condition = f" Only with {entry.condition_text}." if entry.condition else ""
        console.print(Padding(f"{entry.meaning}{condition}", (0, 0, 0, 4)))
    sections = section_names(entries)
    if len(sections) > 1:
        console.print(
            f"\n{len(entries)} options; one section: dapo show {'|'.join(sections)}",
            soft_wrap=True,
        )


def _facts(entry: OptionEntry) -> Iterator[str]:
    """Yield an option's default, the paper's value and the unit."""
    yield "required" if entry.is_required else f"default {entry.default_text}"
    if entry.has_paper_value:
        yield f"paper {yaml_text(entry.paper)}"
    if entry.unit:
        yield f"unit {entry.unit}"


def _show_shipped(kind: Literal["configs", "docs"], name: str | None, as_json: bool) -> None:
    """List the configurations or pages, or print one."""
    paths = shipped(kind)
    if name is None:
        _list_shipped(kind, paths, as_json)
        return
    if kind == "configs":
        name = _config_name(name)
        noun = "configuration"
    else:
        name = _page_name(name)
        noun = "page"
    if name not in paths:
        raise ConfigError(f"no {noun} {name}; expected one of {', '.join(paths)}")
    text = paths[name].read_text(encoding="utf-8")
    if as_json:
        print_json({"name": name, "path": str(paths[name]), "text": text})
    else:
        print_text(text, end="")


def _list_shipped(kind: Literal["configs", "docs"], paths: dict[str, Path], as_json: bool) -> None:
    titles = {name: title_of(path) for name, path in paths.items()}
    if as_json:
        print_json(
            {name: {"about": titles[name], "path": str(path)} for name, path in paths.items()}
        )
        return
    width = max(map(len, paths), default=0)
    for name, title in titles.items():
        print_text(f"{name:<{width}}  {title}")
    if kind == "configs":
        print_text(
            "\ndapo train NAME [KEY=VALUE]... trains with one; dapo show NAME > my.yaml makes a"
            " file to change"
        )
    else:
        print_text("\ndapo show NAME prints one")


def names_after(kind: str | None) -> Iterator[tuple[str, str]]:
    """Yield the names that may follow `dapo show KIND`, with their meanings, for completion.

    None: the kinds and the names of all kinds.
    """
    if kind is None:
        yield from KINDS.items()
    if kind in (None, "configs"):
        for name, path in shipped("configs").items():
            yield name, title_of(path)
    if kind in (None, "docs"):
        for name, path in shipped("docs").items():
            yield name, title_of(path)
    if kind in (None, "options"):
        entries = option_entries()
        for name in section_names(entries):
            yield name, f"The options of {name}."
        for entry in entries:
            yield entry.name, entry.meaning
