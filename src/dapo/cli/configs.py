"""`dapo configs`: which configurations come with the package, and what stands in one."""

from dapo.config.shipped import find_config, first_comment, shipped_configs
from dapo.core.terminal import print_json, print_text


def list_configs(*, as_json: bool) -> None:
    """Print the name of each shipped configuration, what it is for, and its file."""
    found = {name: {"about": first_comment(path), "path": str(path)} for name, path in shipped_configs().items()}
    if as_json:
        print_json(found)
        return
    width = max(map(len, found), default=0)
    for name, each in found.items():
        print_text(f"{name:<{width}}  {each['about']}")
    print_text("\ndapo train NAME [KEY=VALUE]... trains with one; dapo configs NAME > my.yaml makes a file to change")


def print_config(name: str) -> None:
    """Print the YAML of the shipped configuration `name`. Raises ConfigError where there is none."""
    print_text(find_config(name).read_text(encoding="utf-8"), end="")
