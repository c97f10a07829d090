"""Verifier pools by the options of a `reward` section."""

from typing import Any

from dapo.config.reward_options import RewardConfig
from dapo.processes.output import WorkerOutput
from dapo.processes.pool import STARTUP_S
from dapo.rewards import VerifierPool


def open_pool(
    verifier: str | dict[str, float],
    *,
    startup_s: float = STARTUP_S,
    output: WorkerOutput | None = None,
    **options: Any,
) -> VerifierPool:
    """A pool that runs this verifier; `options` are those of the section (`workers`, `timeout_s`,
    `options`, ...).
    """
    return VerifierPool(
        RewardConfig(verifier=verifier, **options), startup_s=startup_s, output=output
    )
