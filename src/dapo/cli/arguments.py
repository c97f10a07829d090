"""Arguments, options, completion and help panels that several commands share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Argument, Context, Option

TRAIN = "Train"
ASK = "Ask a model"
INSPECT = "Look into runs"
COMPARE = "Compare"
DATA = "Data and rewards"
REFERENCE = "Options and configurations"


def set_once(overrides: list[str] | None) -> list[str] | None:
    """Refuse options that contradict each other, such as `optim.lr=1e-4 optim.lr=1e-3`.

    Raises ConfigError.
    """
    from dapo.config.load import parse_overrides, require_set_once

    options = [item for item in overrides or [] if "=" in item]  # the command answers others
    require_set_once([(item, parse_overrides([item])) for item in options])
    return overrides


def complete_option(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield `NAME=`, or `NAME=VALUE` for an option with few values, and its meaning."""
    from dapo.config.option_fields import known_about, options_of, section_in

    for name, field in options_of():
        if section_in(field.annotation) is None and f"{name}=".startswith(
            incomplete.partition("=")[0]
        ):
            values = list(_values(field.annotation))
            for schema in known_about(field).get("also", ()):
                values += schema.get("enum", ())
            for value in values or [""]:
                yield f"{name}={value}", field.description or ""


def _values(annotation: Any) -> Iterator[str]:
    """Yield the values of a type that has few."""
    if annotation is bool:
        yield from ("true", "false")
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _values(part)


def complete_config(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the names and titles of the shipped configurations."""
    from dapo.config.load import shipped, title_of

    yield from ((name, title_of(path)) for name, path in shipped("configs").items())


def complete_shown(context: Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield what `dapo show` may be followed by, with its meaning."""
    from dapo.cli.show import names_after

    what = context.params.get("what")
    yield from names_after(None if what is None else str(what))


def complete_tested(incomplete: str) -> list[str]:
    """Return the names of the verifiers and environments."""
    from dapo.environments.adapters import GAMES
    from dapo.rewards.verifier import VERIFIERS

    return [*VERIFIERS, *GAMES]


def overrides_argument(help: str) -> Any:
    """Return an argument for options of the configuration."""
    return Argument(
        metavar="KEY=VALUE", callback=set_once, autocompletion=complete_option, help=help
    )


_CONFIG: dict[str, Any] = {
    "metavar": "CONFIG.yaml",
    "autocompletion": complete_config,
    "help": "A file of options, or the name of a shipped configuration, such as quickstart.",
}
ConfigPath = Annotated[Path, Argument(**_CONFIG)]
ConfigOrOption = Annotated[str, Argument(**_CONFIG)]
Overrides = Annotated[
    list[str] | None,
    overrides_argument(
        "Options that replace those of the file, such as loss.clip_high=0.3; dapo show options"
        " lists them."
    ),
]
Changes = Annotated[
    list[str] | None,
    overrides_argument("Options to change, such as train.seed=1; dapo show options lists them."),
]
Run = Annotated[Path, Argument(metavar="RUN_DIR", help="A run directory.")]
NewRun = Annotated[Path | None, Option(help="Run directory to write; must not hold a run yet.")]
Force = Annotated[bool, Option("--force", help="Overwrite existing files.")]
Trust = Annotated[
    bool,
    Option(
        "--trust", help="Also import modules from the folders that the run's manifest.json names."
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
