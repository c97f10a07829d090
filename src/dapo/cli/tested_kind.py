"""Finds whether the argument of `dapo test` is a reward or an environment. Imports no torch."""

import inspect
from typing import Literal, TypeAlias

from dapo.core.errors import ConfigError
from dapo.core.loading import AGENT_PREFIX, load_callable
from dapo.core.text import did_you_mean
from dapo.environments.adapters import GAMES, PACKAGES
from dapo.rewards.verifier import VERIFIERS
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config

Kind: TypeAlias = Literal["reward", "environment"]


def find_kind(name: str, *, is_reward: bool = False, is_environment: bool = False) -> Kind:
    """Return what `name` is: a reward or an environment.

    A module is imported to look at its class or function, unless one of the flags says the kind.

    Args:
        name: a verifier, an environment, `module:function`, `module:Class` or a run directory.
        is_reward: the flag `--reward`.
        is_environment: the flag `--environment`.

    Raises ConfigError if `name` is neither, or may be both.
    """
    if is_reward and is_environment:
        raise ConfigError("--reward and --environment contradict each other; give one of them")
    if is_reward:
        return "reward"
    if is_environment:
        return "environment"
    if RunDirectory.is_run(name):
        return _kind_of_run(name)
    if name in VERIFIERS:
        return "reward"
    prefix, colon, _ = name.partition(":")
    if name in GAMES or name.startswith(AGENT_PREFIX) or (colon and prefix in PACKAGES):
        return "environment"
    if not colon:
        near = did_you_mean(name, [*VERIFIERS, *GAMES], otherwise="")
        raise ConfigError(
            f"no verifier, environment or run is named {name}; {near}{' ' * bool(near)}verifiers:"
            f" {', '.join(VERIFIERS)}; environments: {', '.join(GAMES)},"
            f" {', '.join(f'{package}:ID' for package in PACKAGES)}; or your own as"
            " module:function or module:Class"
        )
    return _kind_of_callable(name)


def _kind_of_run(path: str) -> Kind:
    config = load_run_config(RunDirectory.open(path), [])
    if config.environment.name is None and not config.runs_agent:
        return "reward"
    if config.reward.verifier in ("auto", "environment"):
        return "environment"
    raise ConfigError(
        f"{path} has both an environment and a verifier; choose with --environment or --reward"
    )


def _kind_of_callable(path: str) -> Kind:
    """Return the kind of a user's class, object or function; a function is a reward."""
    loaded = load_callable(path, error=ConfigError)
    owner = loaded if inspect.isclass(loaded) else type(loaded)
    # environments of TRL have reset and tools, those of skyrl-gym init and step
    if hasattr(owner, "reset") or hasattr(owner, "step"):
        return "environment"
    return "reward"
