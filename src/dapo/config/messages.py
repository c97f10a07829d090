"""Messages for an invalid configuration: option, expected and actual value, nearest name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from dapo.config.model_options import DATA_SOURCES
from dapo.config.option_fields import names_by_keyword, options_of, section_in
from dapo.config.options import STAGES, Config
from dapo.config.other_names import GUESSED, OTHERS, TITLES, called_elsewhere, peer_that_knows
from dapo.core.text import quoted
from dapo.libs.foreign_options import leaves_of, shown_value

SECTIONS = frozenset(
    name for name, info in Config.model_fields.items() if section_in(info.annotation)
)
"""The names of the sections."""
_SECTION_TYPES = [section_in(info.annotation) for _, info in options_of()]
_BRANCHES = {section.__name__ for section in _SECTION_TYPES if section is not None}
_SIGNS = re.compile(r"[^a-z0-9]+")
# pydantic's names of branches of unions, as if options
_BRANCHES |= {"str", "dict[str,any]", "dict[str,float]"}


def format_validation_errors(error: ValidationError) -> Iterator[str]:
    """Yield a line per fault; options of another system come last."""
    reported = set()
    unknown = dict[str, Any]()
    for detail in error.errors():
        branch = detail["loc"][-1] if detail["loc"] else None
        parts = [str(part) for part in detail["loc"] if part not in _BRANCHES]
        # a union reports each of its branches: one line for the option is enough
        option = ".".join(parts)
        value = detail.get("input")
        value_text = quoted(value)
        # a union's branch for mappings reports the fault inside
        is_other_union_branch = (
            detail["type"] == "string_type" and branch == "str" and isinstance(value, Mapping)
        )
        if option in reported or is_other_union_branch:
            continue
        reported.add(option)
        if detail["type"] == "extra_forbidden":
            unknown[option] = value
        elif detail["type"] == "missing":
            info = _innermost_section(parts).model_fields.get(parts[-1])
            yield (
                f"option {option} is missing."
                f" {info.description if info else 'More values are expected.'}"
            )
        elif detail["type"] == "value_error":
            reason = detail["msg"].removeprefix("Value error, ")
            # a check of several options names them itself
            if isinstance(value, BaseModel | Mapping):
                yield reason
            else:
                yield f"option {option}: {reason}, got {value_text}"
        else:
            expected = detail["msg"][0].lower() + detail["msg"][1:]
            if option.startswith(tuple(f"data.{name}" for name in DATA_SOURCES)):
                expected = "input should be a data source as text or a mapping"
            elif detail["type"] == "model_type":
                expected = f"input should be a section of options{_example_in(option)}"
            yield f"option {option}: {expected}, got {value_text}"
    yield from _unknown_options(unknown)


def _example_in(section: str) -> str:
    """Return an example of an option in a section, for the end of a message."""
    fields = dict(options_of())
    if section not in fields:
        return ""
    kind = section_in(fields[section].annotation)
    if kind is None:
        return ""
    return f", such as {section}.{next(iter(kind.model_fields))}"


def _unknown_options(unknown: Mapping[str, Any]) -> Iterator[str]:
    """Answer unknown options; a section of another system is answered by each option in it."""
    leaves: dict[str, Any] = {}
    for option, content in unknown.items():
        leaves.update(leaves_of(option, content))
    # names that dapo has or had say nothing about another system
    peer = peer_that_knows(leaves.keys() - GUESSED.keys() - names_by_keyword().keys())
    reasons: dict[str, list[str]] = {}
    num_theirs = 0
    for option, content in unknown.items():
        option_leaves = dict(leaves_of(option, content))
        is_theirs = False
        if peer is not None and option not in GUESSED:
            is_theirs = any(OTHERS[peer].rows_of(name) for name in option_leaves)
        if not is_theirs:
            yield f"unknown option {option}; {nearest_option(option.split('.'), content)}"
            continue
        num_theirs += len(option_leaves)
        for name, value in option_leaves.items():
            hint = called_elsewhere(name, value, peer=peer, others=leaves)
            if hint is None:
                hint = nearest_option(name.split("."), value)
            answer, _, why = hint.partition(" has no option here: ")
            if why and len(leaves) > 1:
                reasons.setdefault(why, []).append(f"{name}={shown_value(value)}")
            else:
                yield f"unknown option {name}; {answer if len(leaves) > 1 else hint}"
    for why, names in reasons.items():
        yield f"no option here for {', '.join(names)}: {why}"
    if peer is not None and num_theirs > 1:
        yield (
            f"dapo show docs coming_from shows a run of {TITLES[peer]} and the same run here; dapo convert"
            " FILE translates a file of them"
        )


def nearest_option(parts: Sequence[str], value: object) -> str:
    """Return a hint for an unknown option: its name here or the nearest one."""
    advice = GUESSED.get(".".join(parts))
    if advice:
        return advice
    leaf, leaf_value = next(leaves_of(".".join(parts), value))
    joined = option_written_as(leaf)
    if joined is not None:
        return f"did you mean {joined}?"
    by_keyword = names_by_keyword()
    if leaf.rpartition(".")[2] not in by_keyword:
        elsewhere = called_elsewhere(leaf, leaf_value)
        if elsewhere:
            return elsewhere
    is_section = isinstance(value, Mapping)
    section = _innermost_section(parts)
    names = [STAGES] if is_section else []
    for name, info in options_of():
        # a section is not meant by a value, nor an option by a mapping
        if (section_in(info.annotation) is not None) == is_section:
            names.append(name)
    prefix = "".join(f"{part}." for part in parts[:-1])
    is_top = section is Config
    siblings = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    siblings = [name for name in siblings if "." not in name]
    similar_siblings = get_close_matches(parts[-1].lower(), siblings, n=1)
    if similar_siblings:
        return f"did you mean {prefix}{similar_siblings[0]}?"
    same_kind: dict[str, list[str]] = {}
    for word, options in by_keyword.items():
        candidates = [option for option in options if option in names]
        if candidates:
            same_kind[word] = candidates
    # a similar name of another section would be a guess
    cutoff = 0.75 if is_top else 1
    similar_words = get_close_matches(parts[-1].lower(), same_kind, n=1, cutoff=cutoff)
    if similar_words:
        return f"did you mean {' or '.join(same_kind[similar_words[0]])}?"
    if is_top:
        return "`dapo show options` lists all options"
    return f"known here: {', '.join(section.model_fields)}"


def option_written_as(name: str) -> str | None:
    """Return the option whose dots were typed as other signs: `optim_lr`, `optim-lr`, `OPTIM.LR`."""
    letters = _SIGNS.sub("", name.lower())
    for option, _ in options_of():
        if "." in option and option != name and _SIGNS.sub("", option) == letters:
            return option
    return None


def _innermost_section(parts: Sequence[str]) -> type[BaseModel]:
    """Return the innermost section that a dotted name leads to."""
    section: type[BaseModel] = Config
    for part in parts[:-1]:
        inner = None
        if part in section.model_fields:
            inner = section_in(section.model_fields[part].annotation)
        if inner is None:
            break
        section = inner
    return section
