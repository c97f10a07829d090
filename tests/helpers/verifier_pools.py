"""Verifier pools by the options of a `reward` section."""

from typing import Any

from dapo.config.reward_options import RewardConfig
from dapo.rewards import VerifierPool
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import STARTUP_S


def open_pool(
    verifier: str | dict[str, float],
    *,
    startup_s: float = STARTUP_S,
    output: VerifierOutput | None = None,
    **options: Any,
) -> VerifierPool:
    """A pool that runs this verifier; `options` are those of the section (`workers`, `timeout_s`,
    `options`, ...).
    """
    return VerifierPool(
        RewardConfig(verifier=verifier, **options), startup_s=startup_s, output=output
    )
