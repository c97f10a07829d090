"""Runs a `dapo` command, a script or lines of Python in this process."""

import runpy
from collections.abc import Sequence

import pytest

from dapo.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out, err = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), out, err


def run_script(arguments: Sequence[str]) -> None:
    """What `python SCRIPT` does, for the fork server."""
    runpy.run_path(arguments[0], run_name="__main__")


def run_code(arguments: Sequence[str]) -> None:
    """What `python -c CODE` does, for the fork server."""
    exec(arguments[0], {"__name__": "__main__"})
