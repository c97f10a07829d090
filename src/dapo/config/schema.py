"""The JSON schema of a configuration file, for editors and programs."""

from typing import Any

from dapo.config.option_entries import yaml_text
from dapo.config.option_fields import CONDITIONS, known_about, options_of, section_in
from dapo.config.options import STAGES, Config
from dapo.config.section import Auto, Switch

_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_SWITCH = {"enum": [True, False]}  # YAML reads a bare `on` or `off` as a boolean
_AGENT = {
    "description": "module:function of an agent, or {command: [python, my_agent.py]}.",
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["command"],
            "additionalProperties": False,
            "properties": {
                "command": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
                }
            },
        },
        {"type": "null"},
    ],
}


def config_schema() -> dict[str, Any]:
    """Return a JSON schema (draft 2020-12) of all options with their metadata.

    A schema cannot check combinations of options or names of files, models and verifiers: `dapo
    check` does.
    """
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    sections = {"": schema}
    for name, info in options_of():
        section = section_in(info.annotation)
        if section:
            sections[name] = definitions[section.__name__]
    for name, info in options_of():
        parent, _, leaf = name.rpartition(".")
        entry = sections[parent]["properties"][leaf]
        facts = known_about(info)
        for key in ("paper", "only_with", "unit", "also"):
            entry.pop(key, None)
        alternatives = list(facts.get("also", ()))
        if Auto in info.metadata:
            alternatives.append({"const": "auto"})
        if Switch in info.metadata:
            alternatives.append(_SWITCH)
        if section_in(info.annotation) and info.default is not None:
            entry.pop("default", None)
            # an empty section
            if not info.is_required():
                alternatives.append({"type": "null"})
        if alternatives:
            _widen(entry, alternatives)
        description = _description(info.description or "", facts)
        if description:
            entry["description"] = description
    # a short form: `_with_agent` of config/load.py
    for parent in ("", "environment"):
        sections[parent]["properties"]["agent"] = _AGENT
    _add_stages(schema)
    _use_names_of_the_standard(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Configuration of dapo",
        "description": "A run of dapo; `dapo show options` lists every option.",
    }


def _add_stages(schema: dict[str, Any]) -> None:
    """Let a file have stages, of which each has any options; without them it needs all required."""
    # demonstrations may stand in its place
    schema["$defs"]["DataConfig"].pop("required")
    schema["$defs"]["Stage"] = {
        "description": "The options of a stage, which win over those of the file.",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(schema["properties"]),
    }
    schema["properties"][STAGES] = {
        "description": "Runs that train one after the other, each the model of the one before.",
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"$ref": "#/$defs/Stage"},
    }
    required = schema.pop("required")
    schema["anyOf"] = [{"required": required}, {"required": [STAGES]}]


def _use_names_of_the_standard(value: Any) -> None:
    """Rename the bounds of types that may be null, for which pydantic has its own names."""
    if isinstance(value, dict):
        for name, standard in _BOUNDS.items():
            if isinstance(value.get(name), int | float):
                value[standard] = value.pop(name)
        for inner in value.values():
            _use_names_of_the_standard(inner)
    elif isinstance(value, list):
        for inner in value:
            _use_names_of_the_standard(inner)


def _widen(entry: dict[str, Any], also: list[dict[str, Any]]) -> None:
    """Add alternatives to the type of an option; its other entries stay outside of them."""
    outside: dict[str, Any] = {}
    for key in ("default", "description", "title"):
        if key in entry:
            outside[key] = entry.pop(key)
    branches = [dict(entry)]
    # a union has its branches already
    if set(entry) == {"anyOf"}:
        branches = entry["anyOf"]
    entry.clear()
    entry["anyOf"] = [*branches, *also]
    entry |= outside


def _description(meaning: str, facts: dict[str, Any]) -> str:
    """Return the text of an option with what is known about it."""
    parts = []
    if meaning:
        parts.append(meaning)
    if facts.get("unit"):
        parts.append(f"Unit: {facts['unit']}.")
    if "paper" in facts:
        parts.append(f"Paper: {yaml_text(facts['paper'])}.")
    condition = facts.get("only_with")
    if condition:
        parts.append(f"Only with {CONDITIONS.get(condition, condition)}.")
    return " ".join(parts)
