"""All options as a flat table: metadata, values, and differences of configurations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dapo.config.messages import nearest_option
from dapo.config.option_fields import CONDITIONS, known_about, options_of, section_in
from dapo.config.options import Config
from dapo.core.errors import ConfigError
from dapo.core.secrets import mask_options


@dataclass(frozen=True)
class OptionEntry:
    """An option with its metadata."""

    name: str  # the dotted name: `loss.clip_high`
    default: Any
    is_required: bool
    meaning: str
    unit: str  # the unit of a number; empty for a pure number
    # the condition for an effect: `option=value`, an option or a name in CONDITIONS; empty: always
    condition: str
    has_paper_value: bool
    paper: Any

    @property
    def section(self) -> str:
        """The section; empty for an option outside of sections."""
        return self.name.partition(".")[0] if "." in self.name else ""

    @property
    def default_text(self) -> str:
        return "required" if self.is_required else yaml_text(self.default)

    @property
    def condition_text(self) -> str:
        """The condition as text for users."""
        return CONDITIONS.get(self.condition, self.condition)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; without `paper` if the paper has no value."""
        fields = {
            "name": self.name,
            "default": self.default,
            "required": self.is_required,
            "meaning": self.meaning,
            "unit": self.unit or None,
            "only_with": self.condition_text or None,
        }
        if self.has_paper_value:
            fields["paper"] = self.paper
        return fields


def option_entries() -> list[OptionEntry]:
    """Return all options in the order of their sections, and the sections that may be none."""
    entries = []
    conditions: dict[str, str] = {}
    for name, info in options_of():
        facts = known_about(info)
        parent = name.rpartition(".")[0]
        condition = facts.get("only_with") or conditions.get(parent, "")
        if section_in(info.annotation) and info.default is not None:
            conditions[name] = condition
            continue
        entries.append(
            OptionEntry(
                name=name,
                default=None if info.is_required() else info.default,
                is_required=info.is_required(),
                meaning=info.description or "",
                unit=facts.get("unit", ""),
                condition=condition,
                has_paper_value="paper" in facts,
                paper=facts.get("paper"),
            )
        )
    return entries


def entries_of(section: str | None) -> list[OptionEntry]:
    """Return the options of a section (`rollout`, `rollout.vllm`), or one by its name; None: all.

    Raises ConfigError.
    """
    entries = option_entries()
    if section is None:
        return entries
    prefix = f"{section}."
    matches = [entry for entry in entries if f"{entry.name}.".startswith(prefix)]
    if not matches:
        sections = section_names(entries)
        is_section = bool(get_close_matches(section, sections, n=1, cutoff=0.75))
        near = nearest_option(section.split("."), value={} if is_section else None)
        if "lists all options" in near:
            near = f"{near}; sections: {', '.join(sections)}"
        raise ConfigError(f"no option or section {section}; {near}")
    return matches


def section_names(entries: Sequence[OptionEntry]) -> list[str]:
    """Return the sections of options, in order."""
    return list(dict.fromkeys(entry.section for entry in entries if entry.section))


def yaml_text(value: Any) -> str:
    """Format a value as YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if value != "":
        return str(value)
    return '""'


def flat_options(config: Config) -> dict[str, Any]:
    """Return every option by its dotted name as a JSON value; secrets are masked.

    >>> flat_options(config)["loss.clip_high"]
    0.28
    """
    return dict(flatten(mask_options(config.model_dump(mode="json"))))


def option_differences(*configs: Config) -> dict[str, list[Any]]:
    """Return the options that differ between configurations, with the value in each; None: not set.

    >>> option_differences(one, other)
    {'optim.lr': [1e-06, 2e-06]}
    """
    return differing([flat_options(config) for config in configs])


def differing(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the options that differ between flat tables, with the value in each; None: not set.

    A section that is empty in one table and has options in another is left out: the options differ.
    """
    names: dict[str, None] = {}
    for table in tables:
        names.update(dict.fromkeys(table))
    sections = set()
    for name in names:
        parent = name.rpartition(".")[0]
        while parent:
            sections.add(parent)
            parent = parent.rpartition(".")[0]
    differences = {}
    for name in names:
        values = [table.get(name) for table in tables]
        is_empty_section = name in sections and all(value in (None, {}) for value in values)
        if not is_empty_section and any(value != values[0] for value in values):
            differences[name] = values
    return differences


def flatten(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested options by dotted name; lists and empty sections are values."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
