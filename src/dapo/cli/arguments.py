"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ConfigPath = Annotated[
    Path, Argument(metavar="CONFIG.yaml", help="file with options, or a shipped one: quickstart (`dapo configs`)")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[KEY=VALUE]...",
        help="options over those of the file, for example loss.clip_high=0.3; dapo options lists all of them",
    ),
]
Run = Annotated[Path, Argument(metavar="RUN_DIR", help="a run directory")]
NewRun = Annotated[Path | None, Option(help="run directory to write; must not hold a run yet")]
Force = Annotated[bool, Option("--force", help="overwrite existing files")]
Trust = Annotated[
    bool, Option("--trust", help="also import modules from the folders that the run's manifest.json names")
]
AsJson = Annotated[bool, Option("--json", help="print one JSON object (docs/programs.md)")]
