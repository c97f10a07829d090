"""The configurations that the repository ships, those of stages one by one."""

from pathlib import Path

from dapo.config import Config, load_config
from dapo.config.load import read_options
from dapo.config.options import STAGES
from dapo.config.stages import build_stages
from helpers.paths import CONFIGS


def configs_of(path: Path) -> dict[str, Config]:
    """The configurations in a file by their names: that of the file, with that of the stage."""
    options = read_options(path)
    if STAGES not in options:
        return {path.stem: load_config(path)}
    stages = build_stages(options, where=str(path))
    return {f"{path.stem}-{name}": stage.config for name, stage in stages.items()}


SHIPPED = {
    name: config
    for path in sorted(CONFIGS.glob("*.yaml"))
    for name, config in configs_of(path).items()
}
