"""Makes environments from their names: `environment.name` and `environment.tools`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import Failure, load_callable, try_call
from dapo.core.plugins import load_plugin, plugins_of
from dapo.core.text import did_you_mean
from dapo.environments.adapters.tools import ToolEnvironment, methods_of, schemas_of
from dapo.environments.environment import Environment

GAMES: Mapping[str, str] = {"calculator": "calculator:Calculator"}
"""Environments of this package: their module in `games` and class."""
PACKAGES: Mapping[str, str] = {"textarena": "TextArenaGame", "skyrl": "SkyRLEnvironment"}
"""Prefixes of other packages' environments: the class in the module of `adapters` of that name."""
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
    environment = try_call(lambda: _made_or_error(factory, options))
    if isinstance(environment, ConfigError):
        raise ConfigError(f"{_OPTION}{name}: {environment}")
    if isinstance(environment, Failure):
        arguments = ", ".join(options) or "no options"
        raise ConfigError(f"{_OPTION}{name}: making one with {arguments} {environment.reason}")
    if not callable(getattr(environment, "reset", None)):
        raise ConfigError(f"{_OPTION}{name}: {type(environment).__name__} has no method reset")
    if callable(getattr(environment, "step", None)):
        if functions:
            raise ConfigError(
                f"{_OPTION}{name} answers turns itself, and environment.tools are not called; leave"
                " one out"
            )
        return EnvironmentMaker(lambda form=None, begun="": factory(**options))
    if not methods_of(environment) and not functions:
        expected = "step(action), or public methods as tools"
        raise ConfigError(
            f"{_OPTION}{name}: {type(environment).__name__} has only reset; expected {expected}"
        )
    schemas = schemas_of(environment, functions)
    return EnvironmentMaker(
        lambda form=None, begun="": ToolEnvironment(
            factory(**options), functions, schemas, form or "hermes", begun
        ),
        schemas,
    )


def _made_or_error(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return an environment, or the ConfigError of an adapter, which is a sentence already."""
    try:
        return factory(**options)
    except ConfigError as error:
        return error


def _factory(name: str) -> Callable[..., Any]:
    first, colon, identifier = name.partition(":")
    if first in PACKAGES:
        package = importlib.import_module(f"dapo.environments.adapters.{first}")
        adapter = getattr(package, PACKAGES[first])
        return lambda **options: adapter(identifier, **options)
    if colon:
        return _adapted(load_callable(name, error=ConfigError, option=_OPTION))
    plugins = plugins_of("dapo.environments", reserved=GAMES)
    if name in plugins:
        return _adapted(load_plugin(plugins[name]))
    if name not in GAMES:
        choices = (
            f"known: {', '.join([*GAMES, *plugins])}, {':ID, '.join(PACKAGES)}:ID, or your own class as"
            " module:Class"
        )
        suggestion = did_you_mean(name, [*GAMES, *plugins], otherwise="")
        raise ConfigError(
            f"{_OPTION}{name}: there is no such environment;"
            f" {suggestion}{' ' * bool(suggestion)}{choices}"
        )
    module, _, attribute = GAMES[name].partition(":")
    game: Callable[..., Any] = getattr(
        importlib.import_module(f"dapo.environments.games.{module}"), attribute
    )
    return game


def _adapted(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's class; one in the form of skyrl-gym becomes an environment."""
    has_init = callable(getattr(factory, "init", None))
    has_step = callable(getattr(factory, "step", None))
    if not has_init or not has_step or hasattr(factory, "reset"):
        return factory
    from dapo.environments.adapters.skyrl import SkyRLEnvironment

    return lambda **options: SkyRLEnvironment(factory, **options)
