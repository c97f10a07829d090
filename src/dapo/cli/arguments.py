"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ConfigPath = Annotated[
    Path, Argument(metavar="CONFIG.yaml", help="A file of options, or the name of a shipped one: quickstart.")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="KEY=VALUE",
        help="Options that replace those of the file: loss.clip_high=0.3. `dapo options` lists all of them.",
    ),
]
Changes = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Options to change: train.seed=1. `dapo options` lists them.")
]
Run = Annotated[Path, Argument(metavar="RUN_DIR", help="A run directory.")]
NewRun = Annotated[Path | None, Option(help="The run directory to write; must not hold a run yet.")]
Force = Annotated[bool, Option("--force", help="Overwrite existing files.")]
Trust = Annotated[
    bool, Option("--trust", help="Also import modules from the folders that the run's manifest.json names.")
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
