"""What pyproject.toml cannot say: configs/ goes into the package, and the README without its links into the repository.

The YAML files stand once, at the top of the repository, where `dapo.config.load` finds them in a clone. Symbolic
links would need a file system that has them.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TOP = Path(__file__).parent


class BuildWithConfigs(build_py):
    """Copies configs/*.yaml to dapo/configs of what is built; an editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "dapo" / "configs"
            self.mkpath(str(target))
            for path in sorted((TOP / "configs").glob("*.yaml")):
                self.copy_file(str(path), str(target / path.name), preserve_mode=False)


def description() -> str:
    """The README for a package index, which has none of the other files: pictures go, links become their text."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?://|#)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=description(),
    long_description_content_type="text/markdown",
)
