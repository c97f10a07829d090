"""The options of a configuration as one flat table, and in which of them two configurations differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.config.options import Config
from dapo.core.secrets import mask_options


def flat_options(config: Config) -> dict[str, Any]:
    """Every option by its dotted name as a JSON value, those of data sources and verifiers too; secrets are masked.

    >>> flat_options(config)["loss.clip_high"]
    0.28
    """
    return dict(flatten(mask_options(config.model_dump(mode="json"))))


def option_differences(*configs: Config) -> dict[str, list[Any]]:
    """The options that are not the same in all configurations, with the value in each; None where one has none.

    >>> option_differences(one, other)
    {'optim.lr': [1e-06, 2e-06]}
    """
    return differing([flat_options(config) for config in configs])


def differing(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The options that are not the same in all flat tables, with the value in each; None where one has none."""
    names = dict.fromkeys(name for table in tables for name in table)
    values = {name: [table.get(name) for table in tables] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def flatten(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested options by dotted name; lists stay values."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
