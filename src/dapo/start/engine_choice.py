"""Chooses the engine of `rollout.engine: auto`, for a machine and a model."""

from dataclasses import dataclass

from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.core.text import one_line
from dapo.distributed.vllm_spec import require_vllm
from dapo.engines.vllm.package import INSTALL

LONG_RESPONSE = 4096
"""Tokens of a response from which vLLM is expected to be faster on a GPU.

The native engine reserves a row of full length for each sequence, so long limits leave it few.
"""
LARGE_MODEL = 3e9
"""Parameters from which vLLM is expected to be faster on a GPU: its cache leaves room for more
sequences.
"""


@dataclass(frozen=True)
class EngineChoice:
    """An engine, and the reason in a line that begins with `auto:`."""

    engine: str
    reason: str


def choose_engine(
    config: Config,
    *,
    has_vllm: bool,
    parameters: int | None,
    training: bool = True,
    is_here: bool = True,
) -> EngineChoice:
    """Return the engine for a GPU: vLLM if it pays, is installed and takes the other options.

    Args:
        config: the options, with `rollout.engine: auto`.
        has_vllm: whether vLLM is installed where engines run.
        parameters: the number of the model's parameters; None: unknown.
        training: False for an evaluation.
        is_here: whether engines run on this machine, so that their requirements can be tried.
    """
    if config.is_supervised and config.data.eval is None:
        return _native("demonstrations are given, so nothing is sampled")
    tokens = _longest_response(config, training=training)
    size = "of unknown size" if parameters is None else f"of {_count(parameters)} parameters"
    if tokens >= LONG_RESPONSE:
        why = f"a response may have {tokens:,} tokens, and from {LONG_RESPONSE:,} on"
    elif parameters is not None and parameters >= LARGE_MODEL:
        why = f"the model has {_count(parameters)} parameters, and from {_count(LARGE_MODEL)} on"
    else:
        return _native(
            f"for responses of at most {tokens:,} tokens and a model {size} it is expected to be as"
            " fast as vLLM, and starts in seconds"
        )
    why = f"{why} vLLM is expected to be faster"
    if not has_vllm:
        return _native(f"{why}, but it is not installed; {INSTALL}")
    candidate = config.changed("rollout", engine="vllm")
    obstacle = candidate.conflict()
    if obstacle is None and is_here:
        try:
            require_vllm(candidate)
        except ConfigError as error:
            obstacle = str(error)
    if obstacle is not None:
        return _native(f"{why}, but {one_line(obstacle)}")
    return EngineChoice("vllm", f"auto: rollout.engine=vllm: {why}")


def _native(reason: str) -> EngineChoice:
    return EngineChoice("native", f"auto: rollout.engine=native: {reason}")


def _count(parameters: float) -> str:
    """Return a number of parameters with its unit: `7.62 B`, `135 M`."""
    if parameters < 1e9:
        return f"{parameters / 1e6:.3g} M"
    return f"{parameters / 1e9:.3g} B"


def _longest_response(config: Config, *, training: bool) -> int:
    """Return the most tokens of a response, or of all turns of an episode."""
    tokens = config.eval.max_response_tokens or config.rollout.max_response_tokens
    if training:
        tokens = max(tokens, config.rollout.max_response_tokens)
    return tokens + config.max_observed_tokens
