"""Commands that other packages register by entry points of `dapo.commands`."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from dapo.core.errors import ConfigError
from dapo.core.plugins import load_plugin, plugins_of
from dapo.core.terminal import warn

PANEL = "Other packages"


def command_of(app: typer.Typer, words: Sequence[str]) -> Any:
    """Return the command that runs the words; it has those of other packages if they are needed.

    Commands of this package import no other package. An entry point refers to a `typer.Typer` or to
    a function, whose parameters are the arguments and whose docstring is the help.

    Args:
        app: the application, which is not changed.
        words: the arguments of the command line.

    Raises:
        ConfigError: the package of the command that was typed cannot be imported.
    """
    own = _built(app)
    typed = next((word for word in words if not word.startswith("-")), None)
    if typed in own.commands:
        return own
    others = typer.Typer()
    for name, plugin in plugins_of("dapo.commands", reserved=dict.fromkeys(own.commands)).items():
        try:
            loaded = load_plugin(plugin)
        except ConfigError as error:
            if name == typed:
                raise
            warn(str(error))
            continue
        if isinstance(loaded, typer.Typer):
            others.add_typer(loaded, name=name, rich_help_panel=PANEL)
        else:
            others.command(name, rich_help_panel=PANEL)(loaded)
    command = copy.copy(own)
    command.commands = own.commands | typer.main.get_group(others).commands
    return command


@cache
def _built(app: typer.Typer) -> Any:
    """Return the command of an application; building takes a tenth of a second."""
    return typer.main.get_command(app)
