"""Options of a run that act after sampling, changed: those that its stored responses can be judged anew with."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dapo.config import Config
from dapo.config.differences import option_differences
from dapo.config.load import PRESETS, resolve_auto_verifier
from dapo.config.options import options_of
from dapo.core.errors import ConfigError
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config

AFTER_SAMPLING = ("reward.", "overlong.", "advantage.", "dynamic_sampling.enabled", "dynamic_sampling.filter", "preset")
"""Options, and beginnings of them, that act on what was sampled."""
ON_GRADIENTS = ("loss.",)


def changed_config(directory: RunDirectory, overrides: Sequence[str], *, gradient: bool) -> tuple[Config, Config]:
    """The options of a run, and the same with changed ones.

    `preset=NAME` sets what the preset stands for, where it is not named itself. A named `reward.verifier` begins
    without the options of the run's own.

    Args:
        directory: The run.
        overrides: `key=value` as on the command line.
        gradient: Whether gradients are wanted, on which options of the loss act.

    Raises:
        ConfigError: An option is unknown or invalid, or acts before or in sampling.
    """
    named = [item.partition("=")[0] for item in overrides]
    for name in named:
        _require_after_sampling(name, gradient=gradient)
    own = resolve_auto_verifier(load_run_config(directory))
    preset = next((item.partition("=")[2] for item in reversed(overrides) if item.startswith("preset=")), None)
    more = [] if preset is None else [f"{name}={json.dumps(value)}" for name, value in _of_preset(preset)]
    if any(_is_of("reward.verifier", name) for name in named):
        more.append("reward.options={}")
    return own, resolve_auto_verifier(load_run_config(directory, [*more, *overrides]))


def _is_of(option: str, name: str) -> bool:
    return name == option or name.startswith(f"{option}.")


def _require_after_sampling(name: str, *, gradient: bool) -> None:
    if name.startswith(AFTER_SAMPLING):
        return
    if name.startswith(ON_GRADIENTS):
        if gradient:
            return
        raise ConfigError(f"{name} changes no outcome, reward or advantage, only gradients: add --gradient")
    raise ConfigError(
        f"{name} does not act between sampling and the update, so the stored responses cannot show what it changes; "
        "options that can be changed are those of reward, overlong and advantage, dynamic_sampling.enabled and "
        "dynamic_sampling.filter, preset, and with --gradient those of loss"
    )


def _of_preset(preset: str) -> Iterator[tuple[str, Any]]:
    """The values of the options that any preset sets, in the one of that name."""
    defaults = {name: info.default for name, info in options_of()}
    chosen = PRESETS.get(preset, {})  # an unknown name is refused with the configuration
    for section, options in (item for values in PRESETS.values() for item in values.items()):
        for option in options:
            yield f"{section}.{option}", chosen.get(section, {}).get(option, defaults[f"{section}.{option}"])


def differences(old: Config, new: Config) -> list[dict[str, Any]]:
    """The options that differ, with both values."""
    return [{"name": name, "old": a, "new": b} for name, (a, b) in option_differences(old, new).items()]


def judges_anew(overrides: Sequence[str]) -> bool:
    """Whether responses are judged again: where an option of the reward is named, or no option at all.

    Without any, what comes out differently shows that the verifier, or its code since then, does not repeat itself.
    """
    return not overrides or any(item.startswith("reward.") for item in overrides)
