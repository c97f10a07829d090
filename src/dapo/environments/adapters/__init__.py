"""Makes environments from their names: `environment.name` and `environment.tools`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import Failure, load_callable, try_call
from dapo.core.text import did_you_mean
from dapo.environments.adapters.tools import ToolEnvironment, methods_of, schemas_of
from dapo.environments.environment import Environment

GAMES: Mapping[str, str] = {"calculator": "calculator:Calculator"}
"""Environments of this package: their module in `games` and class."""
PACKAGES: Mapping[str, str] = {"textarena": "TextArenaGame", "skyrl": "SkyRLEnvironment"}
"""Prefixes of names of other packages' environments: the class in the module of `adapters` with
that name.
"""
_OPTION = "environment.name="


@dataclass(frozen=True)
class EnvironmentMaker:
    """Makes environments, one for each episode."""

    make: Callable[..., Environment]
    """`make(form, begun)` makes one that reads tool calls in this form, see `CallReader`."""
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The schemas of the tools that the policy may call."""


def environment_maker(
    name: str | None, options: Mapping[str, Any], tools: Sequence[str]
) -> EnvironmentMaker:
    """Load an environment, and make one to check that its constructor works.

    Args:
        name: calculator, textarena:ID, skyrl:ID, module:Class, or None with `tools` alone.
        options: keyword arguments of its constructor.
        tools: functions, as module:function, that the policy may call.

    Raises:
        ConfigError: there is no such environment, or it cannot be made.
        DataError: a tool has no types or no descriptions.
    """
    functions = {
        path.rpartition(":")[2]: load_callable(path, error=ConfigError, option="environment.tools=")
        for path in tools
    }
    if name is None:
        schemas = schemas_of(None, functions)
        return EnvironmentMaker(
            lambda form=None, begun="": ToolEnvironment(
                None, functions, schemas, form or "hermes", begun
            ),
            schemas,
        )
    factory = _factory(name)
    made = try_call(lambda: _made_or_error(factory, options))
    if isinstance(made, ConfigError):
        raise ConfigError(f"{_OPTION}{name}: {made}")
    if isinstance(made, Failure):
        given = ", ".join(options) or "no options"
        raise ConfigError(f"{_OPTION}{name}: making one with {given} {made.reason}")
    if not callable(getattr(made, "reset", None)):
        raise ConfigError(f"{_OPTION}{name}: {type(made).__name__} has no method reset")
    if callable(getattr(made, "step", None)):
        if functions:
            raise ConfigError(
                f"{_OPTION}{name} answers turns itself, and environment.tools are not called; leave"
                " one out"
            )
        return EnvironmentMaker(lambda form=None, begun="": factory(**options))
    if not methods_of(made) and not functions:
        expected = "step(action), or public methods as tools"
        raise ConfigError(
            f"{_OPTION}{name}: {type(made).__name__} has only reset; expected {expected}"
        )
    schemas = schemas_of(made, functions)
    return EnvironmentMaker(
        lambda form=None, begun="": ToolEnvironment(
            factory(**options), functions, schemas, form or "hermes", begun
        ),
        schemas,
    )


def _made_or_error(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """An environment, or the ConfigError of an adapter, which is a sentence already."""
    try:
        return factory(**options)
    except ConfigError as error:
        return error


def _factory(name: str) -> Callable[..., Any]:
    first, colon, rest = name.partition(":")
    if first in PACKAGES:
        adapter = getattr(
            importlib.import_module(f"dapo.environments.adapters.{first}"), PACKAGES[first]
        )
        return lambda **options: adapter(rest, **options)
    if colon:
        found = load_callable(name, error=ConfigError, option=_OPTION)
        is_of_skyrl = callable(getattr(found, "init", None)) and callable(
            getattr(found, "step", None)
        )
        if is_of_skyrl and not hasattr(found, "reset"):
            from dapo.environments.adapters.skyrl import SkyRLEnvironment

            return lambda **options: SkyRLEnvironment(found, **options)
        return found
    if name not in GAMES:
        known = (
            f"known: {', '.join(GAMES)}, {':ID, '.join(PACKAGES)}:ID, or your own class as"
            " module:Class"
        )
        suggestion = did_you_mean(name, GAMES, otherwise="")
        raise ConfigError(
            f"{_OPTION}{name}: there is no such environment;"
            f" {suggestion}{' ' * bool(suggestion)}{known}"
        )
    module, _, attribute = GAMES[name].partition(":")
    game: Callable[..., Any] = getattr(
        importlib.import_module(f"dapo.environments.games.{module}"), attribute
    )
    return game
