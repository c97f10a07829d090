"""Runs a `dapo` command, a script or lines of Python in this process."""

import runpy
from collections.abc import Sequence

import pytest

from dapo.cli.main import main

NO_KERNELS = "is missing: PyTorch's functions stand in"
"""In the line that a process writes once, where compiled layers would serve and this installation
has none.
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out, err = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), out, err


def own_errors(stderr: str) -> str:
    """The standard error of a process without the line on missing kernels, in an installation that
    has none.
    """
    from dapo.libs.cpu_kernels import is_compiled  # imports torch

    lines = stderr.splitlines(keepends=True)
    return stderr if is_compiled() else "".join(line for line in lines if NO_KERNELS not in line)


def run_script(arguments: Sequence[str]) -> None:
    """What `python SCRIPT` does, for the fork server."""
    runpy.run_path(arguments[0], run_name="__main__")


def run_code(arguments: Sequence[str]) -> None:
    """What `python -c CODE` does, for the fork server."""
    exec(arguments[0], {"__name__": "__main__"})
