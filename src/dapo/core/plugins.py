"""Tables that installed packages extend by entry points, such as `dapo.verifiers`."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from dapo.core.errors import ConfigError
from dapo.core.loading import Failure, try_call

Row = TypeVar("Row")


class PluginTable(Mapping[str, Row], Generic[Row]):
    """The rows of this package by name, and then those that other packages register.

    Iteration and `in` read the names of entry points and import nothing. A row that another package
    registers is imported when it is read. A name of this package cannot be replaced: the entry
    point is ignored with a warning.

    Args:
        group: the group of entry points, such as `dapo.verifiers`; the name of an entry point is
            the name of its row.
        rows: the rows of this package.
        row_type: the class of a row, which an entry point has to refer to.
    """

    def __init__(self, group: str, rows: Mapping[str, Row], row_type: type[Row]) -> None:
        self._group = group
        self._rows = dict(rows)
        self._row_type = row_type
        self._plugins: Mapping[str, EntryPoint] | None = None

    @property
    def plugins(self) -> Mapping[str, EntryPoint]:
        """The entry points of other packages by name."""
        if self._plugins is None:
            self._plugins = plugins_of(self._group, reserved=self._rows)
        return self._plugins

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            row = load_plugin(self.plugins[name])
            if not isinstance(row, self._row_type):
                raise ConfigError(
                    f"{describe_plugin(self.plugins[name])} is a {type(row).__name__}; expected a"
                    f" {self._row_type.__module__}.{self._row_type.__name__}"
                )
            self._rows[name] = row
        return self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self.plugins

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._rows, *self.plugins])

    def __len__(self) -> int:
        return len({*self._rows, *self.plugins})


def plugins_of(group: str, *, reserved: Mapping[str, Any]) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, without those whose name is reserved.

    A name that is registered twice is ignored with a warning, but for its first entry point.
    """
    plugins: dict[str, EntryPoint] = {}
    for plugin in entry_points(group=group):
        if plugin.name in reserved:
            warnings.warn(
                f"{describe_plugin(plugin)} is ignored: dapo has a {plugin.name!r} of its own",
                stacklevel=2,
            )
        elif plugin.name in plugins and plugin.value != plugins[plugin.name].value:
            warnings.warn(
                f"{describe_plugin(plugin)} is ignored: {describe_plugin(plugins[plugin.name])}"
                " comes first",
                stacklevel=2,
            )
        else:
            # one package may be found twice on the import path
            plugins.setdefault(plugin.name, plugin)
    return plugins


def load_plugin(plugin: EntryPoint) -> Any:
    """Import what an entry point refers to; raises ConfigError with the package and the cause."""
    loader: Callable[[], Any] = plugin.load
    loaded = try_call(loader)
    if isinstance(loaded, Failure):
        raise ConfigError(f"{describe_plugin(plugin)}: importing it {loaded.reason}")
    return loaded


def describe_plugin(plugin: EntryPoint) -> str:
    """Name an entry point with its package, for messages."""
    package = ""
    if plugin.dist is not None:
        package = f" of the package {plugin.dist.name}"
    return f"{plugin.group}: {plugin.name} = {plugin.value}{package}"
