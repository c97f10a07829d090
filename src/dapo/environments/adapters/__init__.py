"""Makes environments from their names: `environment.name` and `environment.tools`."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import Failure, call_text, load_callable, own_name, try_call
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
    has_reward: bool = True
    """False if no episode gets a reward of its environment."""


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
    functions = _functions(tools)
    if name is None:
        schemas = schemas_of(None, functions)
        return EnvironmentMaker(
            lambda form=None, begun="": ToolEnvironment(
                None, functions, schemas, form or "hermes", begun
            ),
            schemas,
            has_reward=False,
        )
    factory = _factory(name)
    _require_arguments(factory, options, name)
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
        _require_methods(environment, name)
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
        has_reward=callable(getattr(environment, "get_reward", None)),
    )


def _functions(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Load functions by the names under which the policy calls them.

    Raises ConfigError if two have one name.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for path in dict.fromkeys(paths):
        # of `my_tools:Web.search` the last part: models write names without dots
        name = path.rpartition(":")[2].rpartition(".")[2]
        if name in functions:
            raise ConfigError(
                f"environment.tools={', '.join(paths)}: two functions have the name {name}, by"
                " which the policy calls them; rename one"
            )
        functions[name] = load_callable(path, error=ConfigError, option="environment.tools=")
    return functions


def _require_arguments(factory: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if a constructor needs arguments that are not among the options."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of a compiled class
        return
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.name not in options
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if missing:
        label = own_name(name).rpartition(":")[2]
        values = ", ".join(f"{parameter}: VALUE" for parameter in missing)
        raise ConfigError(
            f"{_OPTION}{name}: {call_text(label, factory)} needs {' and '.join(missing)}: set"
            f" environment.options={{{values}}}, or give default values"
        )


_CALLED_WITH: Mapping[str, Sequence[str]] = {
    "reset": ("problem", "seed"),
    "step": ("action",),
    "end": (),
    "close": (),
}


def _require_methods(environment: Environment, name: str) -> None:
    """Raise ConfigError for a method that cannot be called with its arguments.

    A first parameter `seed` of `reset`, as in Gymnasium, would get the problem.
    """
    for method, arguments in _CALLED_WITH.items():
        function = getattr(environment, method, None)
        if function is None:
            continue
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of a compiled class
            continue
        first = next(iter(signature.parameters), None)
        try:
            signature.bind(*arguments)
            is_callable = method != "reset" or first != "seed"
        except TypeError:
            is_callable = False
        if not is_callable:
            label = call_text(f"{type(environment).__name__}.{method}", function)
            raise ConfigError(
                f"{_OPTION}{name}: {label} is called as {method}({', '.join(arguments)})"
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
    if first in ("gym", "gymnasium"):
        raise ConfigError(
            f"{_OPTION}{name}: environments of Gymnasium have arrays, and a policy reads text; write"
            " a class around one, with reset(problem, seed) and step(action), and name it"
            " module:Class"
        )
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
