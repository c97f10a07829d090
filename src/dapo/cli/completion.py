"""Shell completion: the words that may stand at the end of a command line. Imports no torch."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

Candidate: TypeAlias = tuple[str, str]
"""A word and its description.

After a word that ends in `.`, `/` or `=`, the shell writes no space.
"""
SHELLS = ("bash", "fish", "zsh")


def candidates(root: Any, line: str) -> list[Candidate]:
    """The words that complete the last word of a command line.

    If there are none, the shell proposes files.

    `root` is the group of all commands.
    """
    *before, current = [*_words(line), ""] if line[-1:].isspace() else _words(line)
    if not before:
        return []
    del before[0]
    command = root
    found = list[Candidate]()
    while before and before[0] in getattr(command, "commands", {}):
        command = command.commands[before.pop(0)]
    if current.startswith("-"):
        options = (
            each for each in command.params if each.param_type_name == "option" and not each.hidden
        )
        found = [
            *((each.opts[0], each.help) for each in options),
            ("--help", "Show this message and exit."),
        ]
    elif hasattr(command, "commands"):
        found = [(name, each.get_short_help_str(1000)) for name, each in command.commands.items()]
    else:
        for metavar in _expected(command, before, current):
            if metavar in _SOURCES:
                found += _SOURCES[metavar](current)
    return [each for each in dict.fromkeys(found) if each[0].startswith(current)]


def _words(line: str) -> list[str]:
    for ending in ("", '"', "'"):  # a quote may still be open
        try:
            return shlex.split(line + ending)
        except ValueError:
            continue
    return line.split()


def _expected(command: Any, before: Sequence[str], current: str) -> list[str]:
    """The metavars of the option's value, or of the arguments, that the current word may be."""
    with_value = {
        each.opts[0]: each for each in command.params if not getattr(each, "is_flag", False)
    }
    if before and before[-1] in with_value:
        return str(with_value[before[-1]].metavar).split("|")
    position = sum(
        not word.startswith("-") and previous not in with_value
        for previous, word in zip(["", *before], before, strict=False)
    )
    metavars = [str(each.metavar) for each in command.params if each.param_type_name == "argument"]
    expected = metavars[min(position, len(metavars) - 1)].split("|") if metavars else []
    return [*expected, *(["KEY=VALUE"] if "." in current and "KEY=VALUE" in metavars else [])]


def _options(current: str) -> Iterator[Candidate]:
    """Options of a configuration, one section at a time, and the values of an option that has a
    few.
    """
    from dapo.config.option_fields import known_about, options_of, section_in

    fields = {name: field for name, field in options_of() if section_in(field.annotation) is None}
    name, equals, _ = current.partition("=")
    if equals:
        if name in fields:
            enumerated = [
                word
                for schema in known_about(fields[name]).get("also", ())
                for word in schema.get("enum", ())
            ]
            yield from (
                (f"{name}={value}", "")
                for value in (*_choices(fields[name].annotation), *enumerated)
            )
        return
    fitting = [each for each in fields if each.startswith(current)]
    heads = list(
        dict.fromkeys(each[: each.find(".", len(current)) + 1] or each for each in fitting)
    )
    if len(heads) == 1 and heads[0].endswith("."):
        yield from _options(heads[0])
        return
    for head in heads:
        yield (head, "") if head.endswith(".") else (f"{head}=", fields[head].description or "")


def _choices(annotation: Any) -> Iterator[str]:
    yield from ("true", "false") if annotation is bool else ()
    for part in get_args(annotation):
        yield from (part,) if isinstance(part, str) else _choices(part)


def _configs(current: str) -> Iterator[Candidate]:
    from dapo.config.load import shipped, title_of

    yield from ((name, title_of(path)) for name, path in shipped().items())


def _pages(current: str) -> Iterator[Candidate]:
    from dapo.config.load import shipped, title_of

    yield from ((name, title_of(path)) for name, path in shipped("docs").items())


def _verifiers(current: str) -> Iterator[Candidate]:
    from dapo.rewards.verifier import VERIFIERS

    yield from ((name, "") for name in VERIFIERS)


_SOURCES: Mapping[str, Callable[[str], Iterable[Candidate]]] = {
    "CONFIG.yaml": _configs,
    "KEY=VALUE": _options,
    "NAME": _configs,
    "PAGE": _pages,
    "SHELL": lambda _: [(name, "") for name in SHELLS],
    "VERIFIER": _verifiers,
}
