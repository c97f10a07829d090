"""Commands that other packages register by entry points of `dapo.commands`."""

from collections.abc import Sequence

import typer

from dapo.core.errors import ConfigError
from dapo.core.plugins import load_plugin, plugins_of
from dapo.core.terminal import warn

PANEL = "Other packages"


def add_plugin_commands(app: typer.Typer, words: Sequence[str]) -> None:
    """Add the commands of other packages to the application, where the words need them.

    A command of dapo imports no other package. An entry point refers to a `typer.Typer` or to a
    function, whose parameters are the arguments and whose docstring is the help.

    Args:
        app: the application, which is changed.
        words: the arguments of the command line.

    Raises:
        ConfigError: the package of the command that was typed cannot be imported.
    """
    command = next((word for word in words if not word.startswith("-")), None)
    names = dict.fromkeys(typer.main.get_group(app).commands)
    if command in names:
        return
    for name, plugin in plugins_of("dapo.commands", reserved=names).items():
        try:
            loaded = load_plugin(plugin)
        except ConfigError as error:
            if name == command:
                raise
            warn(str(error))
            continue
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, rich_help_panel=PANEL)
        else:
            app.command(name, rich_help_panel=PANEL)(loaded)
