"""The options that are set and have no effect, with the reason."""

from collections.abc import Iterator

from dapo.config import Config
from dapo.config.option_fields import (
    CONDITIONS,
    known_about,
    option_text,
    options_of,
    section_in,
)
from dapo.core.processor import NVIDIA_DRIVER
from dapo.rewards.verifier import is_binary


def _may_have_gpus(config: Config) -> bool:
    """Return False if engines will run on CPUs, for which `auto` is the native engine."""
    return config.uses_ray or (config.train.device != "cpu" and NVIDIA_DRIVER.is_file())


def ignored_options(config: Config) -> Iterator[str]:
    """Describe each option that is set but has no effect, with the reason."""
    for name, info in options_of():
        condition = known_about(info).get("only_with")
        # turned off: no contradiction
        if condition is None or not config.sets(name) or not config.value_of(name):
            continue
        required, _, expected = condition.partition("=")
        value = config.value_of(required)
        if value == "auto" and required == "rollout.engine" and not _may_have_gpus(config):
            value = "native"
        # `auto` is not chosen yet
        is_met = value in (expected, "auto") if expected else bool(value)
        if not is_met:
            label = f"{name}.*" if section_in(info.annotation) else name
            reason = f"{required} is {'not set' if value is None else option_text(value)}"
            if condition in CONDITIONS:
                reason = f"needs {CONDITIONS[condition]}"
            yield f"{label}: {reason}"
    loss = config.loss
    verifier = config.reward.verifier
    # estimators whose gradient vanishes where loss.kl_in puts them
    if loss.has_kl_term and loss.kl_estimator == "k1":
        yield (
            "loss.kl_coef: k1 in the loss has a gradient of 0 in expectation, so it adds only"
            " noise; set loss.kl_estimator=k2 or k3, or loss.kl_in=reward"
        )
    if loss.has_kl_reward and loss.kl_estimator != "k1":
        yield (
            f"loss.kl_coef: {loss.kl_estimator} in the reward has next to no gradient near the"
            " reference; set loss.kl_estimator=k1, or loss.kl_in=loss"
        )
    if config.reward.threshold is not None and isinstance(verifier, str) and is_binary(verifier):
        yield "reward.threshold: the verifier gives no score, only correct or wrong"
