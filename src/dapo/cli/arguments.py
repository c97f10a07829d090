"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def set_once(overrides: list[str] | None) -> list[str] | None:
    """Refuse options that contradict each other, such as `optim.lr=1e-4 optim.lr=1e-3`.

    Raises ConfigError.
    """
    from dapo.config.load import parse_overrides, require_set_once

    options = [item for item in overrides or [] if "=" in item]  # the command answers others
    require_set_once([(item, parse_overrides([item])) for item in options])
    return overrides


ConfigPath = Annotated[
    Path,
    Argument(
        metavar="CONFIG.yaml", help="A file of options, or the name of a shipped one: quickstart."
    ),
]
ConfigOrOption = Annotated[
    str,
    Argument(
        metavar="CONFIG.yaml",
        help="A file of options, or the name of a shipped one: quickstart.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="KEY=VALUE",
        callback=set_once,
        help=(
            "Options that replace those of the file: loss.clip_high=0.3. `dapo options` lists all"
            " of them."
        ),
    ),
]
Changes = Annotated[
    list[str] | None,
    Argument(
        metavar="KEY=VALUE",
        callback=set_once,
        help="Options to change: train.seed=1. `dapo options` lists them.",
    ),
]
MoreOptions = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", callback=set_once)]
Run = Annotated[Path, Argument(metavar="RUN_DIR", help="A run directory.")]
NewRun = Annotated[Path | None, Option(help="The run directory to write; must not hold a run yet.")]
Force = Annotated[bool, Option("--force", help="Overwrite existing files.")]
Trust = Annotated[
    bool,
    Option(
        "--trust", help="Also import modules from the folders that the run's manifest.json names."
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
