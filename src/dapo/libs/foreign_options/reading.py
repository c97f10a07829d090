"""What is found in a script: the options that it sets, and what could not be read."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reading:
    """The options of a command or of a script, with all that stands there besides."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values by name; one that is known only when the script runs is Unknown."""
    unread: list[str] = field(default_factory=list)
    """What may set further options that are not known, each with its line."""
    assumed: list[str] = field(default_factory=list)
    """What the values rest on, each with its line: a branch that was taken, arguments that are not
    there.
    """
    command: str = ""
    """The command that the options belong to, without them."""
    program: str = ""
    """The module or file that the command runs; empty: it runs neither."""
    line: int = 0
    script: str = ""
    """The path of the script that the command runs, if its calls were followed, too."""
    methods: dict[str, list[str]] = field(default_factory=dict)
    """The names of the methods of each class of the script that is an option, by `module:name`."""
    num_processes: int | None = None
    """The number of trainer processes, if a launcher's option says so."""

    @property
    def program_name(self) -> str:
        """The name of the program, without its folder or package."""
        return self.program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
