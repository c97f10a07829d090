"""The configurations that come with the package: in a clone the folder `configs`, installed `dapo/configs`."""

from pathlib import Path

from dapo.core.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")
"""Where an installed package has them, where setup.py puts them; and where they stand in the repository."""


def shipped_configs() -> dict[str, Path]:
    """The files of the shipped configurations by name: `quickstart`, `tiny` and others."""
    folder = next((each for each in _FOLDERS if each.is_dir()), _FOLDERS[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(path: str | Path) -> Path:
    """The YAML file at `path`, or the shipped configuration that it names where there is no such file.

    Args:
        path: a file; or `quickstart`, `quickstart.yaml`, `configs/quickstart.yaml` for one that comes with the package.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(path)
    if path.is_file():
        return path
    shipped = shipped_configs()
    name = path.name.removesuffix(".yaml")
    if name in shipped and path.parent in (Path(), Path("configs")):
        return shipped[name]
    fault = f"{path} is a folder" if path.is_dir() else f"no config file {path}"
    raise ConfigError(f"{fault}; expected a YAML file, or one that comes with dapo: {', '.join(shipped)}")


def first_comment(path: Path) -> str:
    """Return the description in the first line of a configuration."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
