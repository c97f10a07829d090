"""The layout of help: commands by subject, one line each; metavars without Python types; examples
from help.txt.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])
TRAIN = "Train"
INSPECT = "Look into runs"
COMPARE = "Compare"
DATA = "Data and rewards"
REFERENCE = "Options and configurations"
TEXTS = Path(__file__).with_name("help.txt")
"""Notes, two examples and the meanings of parameters per command, in blocks that begin with the
command's name.
"""
_WHOLE_SENTENCE = 1000  # characters
_NAME_WIDTH = 10


class Commands(typer.Typer):
    """A table of commands with this layout of help."""

    def __init__(self, **settings: Any) -> None:
        settings |= {
            "add_completion": False,
            "pretty_exceptions_enable": False,
            "rich_markup_mode": None,
        }
        super().__init__(cls=CommandGroup, no_args_is_help=True, **settings)

    def command(
        self, name: str | None = None, *, group: str = "Commands", **settings: Any
    ) -> Callable[[F], F]:
        """Register a command in a group of the help."""
        return super().command(name, cls=Command, rich_help_panel=group, **settings)


class Command(TyperCommand):
    """A command whose help names arguments and options by their metavars, and ends with
    examples.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        texts = dict(
            line.strip().split(": ", 1) for line in _more_of(self) if line.startswith("  ")
        )
        for parameter in self.params:
            parameter.help = parameter.help or texts.get(parameter.name)  # type: ignore[attr-defined]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [
            "[OPTIONS]",
            *(_in_usage(each) for each in self.params if each.param_type_name == "argument"),
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title in ("Argument", "Option"):
            parameters: list[Any] = self.get_params(ctx)
            kind = [each for each in parameters if each.param_type_name == title.lower()]
            if rows := [(_name(each), _help(each)) for each in kind if not each.hidden]:
                with formatter.section(f"{title}s"):
                    formatter.write_dl(rows)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        with formatter.indentation():
            notes = (line for line in _more_of(self) if not line.startswith(("dapo ", "  ")))
            formatter.write_text("\n\n".join(notes))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = (f"  {line}\n" for line in _more_of(self) if line.startswith("dapo "))
        formatter.write("\nExamples:\n" + "".join(examples))


class CommandGroup(TyperGroup):
    """Commands by subject, each with the whole first sentence of its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        subjects: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            row = f"{name:<{_NAME_WIDTH}}", command.get_short_help_str(_WHOLE_SENTENCE)
            subjects.setdefault(getattr(command, "rich_help_panel", "Commands"), []).append(row)
        for subject, rows in subjects.items():
            with formatter.section(subject):
                formatter.write_dl(rows)
        Command.format_options(self, ctx, formatter)  # type: ignore[arg-type]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        Command.format_epilog(self, ctx, formatter)  # type: ignore[arg-type]
        super().format_epilog(ctx, formatter)


def _more_of(command: Any) -> list[str]:
    """The notes, examples and parameters of a command; two of one name have functions named after
    both words.
    """
    blocks = [block.splitlines() for block in TEXTS.read_text(encoding="utf-8").split("\n\n")]
    found = {title: lines for title, *lines in blocks if title.split()[-1] == command.name}
    function = getattr(command.callback, "__name__", "")
    exact = (lines for title, lines in found.items() if title.split()[1:] == function.split("_"))
    return next(exact, next(iter(found.values())))


def _in_usage(argument: Any) -> str:
    name = str(argument.metavar)
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    word = "N" if parameter.min is not None else parameter.name.rpartition("_")[2].upper()
    return ", ".join(parameter.opts) + (
        "" if parameter.is_flag else f" {parameter.metavar or word}"
    )


def _help(parameter: Any) -> str:
    if parameter.param_type_name == "option" and parameter.required:
        return f"{parameter.help} [required]"
    is_shown = parameter.default not in (None, False, ...)
    return f"{parameter.help} [default: {parameter.default}]" if is_shown else str(parameter.help)
