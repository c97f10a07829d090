"""What is wrong with a configuration, in words: the option, what was expected, what came, the nearest known name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dapo.core.suggest import nearest


def section_names(options: type[BaseModel]) -> frozenset[str]:
    """The names of the sections."""
    return frozenset(name for name, info in options.model_fields.items() if _is_section(info.annotation))


def format_validation_errors(error: ValidationError, options: type[BaseModel]) -> Iterator[str]:
    """A line for each fault of a configuration that is validated as `options`."""
    seen = set()
    for detail in error.errors():
        branch = detail["loc"][-1] if detail["loc"] else None
        parts = [str(part) for part in detail["loc"] if part not in SECTION_BRANCHES]
        # a union reports each of its branches: one line for the option is enough
        option = ".".join(part for part in parts if part not in ("str", "dict[str,any]", "dict[str,float]"))
        got = detail.get("input")
        # where a union has a branch for mappings, that one says what is wrong inside
        is_other_union_branch = detail["type"] == "string_type" and branch == "str" and isinstance(got, Mapping)
        if option in seen or is_other_union_branch:
            continue
        seen.add(option)
        if detail["type"] == "extra_forbidden":
            yield f"unknown option {option}; {_nearest(options, parts, is_section=isinstance(got, Mapping))}"
        elif detail["type"] == "missing":
            yield f"option {option} is missing; {_description(options, parts)}"
        elif detail["type"] == "value_error":
            reason = detail["msg"].removeprefix("Value error, ")
            yield f"option {option}: {reason}, got {got!r}" if parts else reason
        else:
            expected = detail["msg"][0].lower() + detail["msg"][1:]
            if option.startswith(("data.train", "data.eval")):
                expected = "input should be a data source as text or a mapping"
            elif detail["type"] == "model_type":
                expected = "input should be a section of options"
            yield f"option {option}: {expected}, got {got!r}"


def _nearest(options: type[BaseModel], parts: Sequence[str], *, is_section: bool) -> str:
    sections = section_names(options)
    leaves = [name for name in option_names(options) if (name in sections) == is_section]
    same_leaf = [name for name in leaves if name.split(".")[-1] == parts[-1]]
    here = _section(options, parts)
    known_here = f"known here: {', '.join(here.model_fields)}"
    prefix = "".join(f"{part}." for part in parts[:-1])
    siblings = [name.removeprefix(prefix) for name in leaves if name.startswith(prefix)]
    if close := nearest(parts[-1], [name for name in siblings if "." not in name], cutoff=0.6):
        return f"did you mean {prefix}{close[0]}?"
    if same_leaf or here is not options:  # a similar name of another section would be a guess
        return f"did you mean {same_leaf[0]}?" if same_leaf else known_here
    by_leaf = {name.split(".")[-1]: name for name in leaves}
    close = nearest(parts[-1], by_leaf, cutoff=0.75)
    return f"did you mean {by_leaf[close[0]]}?" if close else known_here


def _description(options: type[BaseModel], parts: Sequence[str]) -> str:
    info = _section(options, parts).model_fields.get(parts[-1])
    return (info.description if info else None) or f"set {'.'.join(parts)}"


SECTION_BRANCHES = {"ScoreThresholdsConfig", "LoraConfig"}
"""How pydantic names the sections that are one branch of a union."""


def _as_section(annotation: Any) -> type[BaseModel] | None:
    """The section that an option is, or that it may be instead of a text."""
    return next((kind for kind in (annotation, *get_args(annotation)) if _is_section(kind)), None)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _section(options: type[BaseModel], parts: Sequence[str]) -> type[BaseModel]:
    """The innermost section that a dotted name leads to."""
    section = options
    for part in parts[:-1]:
        inner = section.model_fields[part].annotation if part in section.model_fields else None
        if (found := _as_section(inner)) is None:
            break
        section = found
    return section


def option_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every option of a section by its dotted name."""
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        if inner := _as_section(info.annotation):
            yield from option_names(inner, f"{prefix}{name}.")
