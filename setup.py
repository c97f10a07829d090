"""What pyproject.toml cannot say: configs/ and docs/ go into the package, and the README without links into the clone.

Configurations and pages stand once, at the top of the repository, where `dapo.config.load` finds them in a clone.
Symbolic links would need a file system that has them.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TOP = Path(__file__).parent


class BuildWithShipped(build_py):
    """Copies configs/*.yaml and docs/*.md to dapo/ in what is built; an editable installation reads the clone."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in sorted([*TOP.glob("configs/*.yaml"), *TOP.glob("docs/*.md")]):
                target = Path(self.build_lib) / "dapo" / path.parent.name
                self.mkpath(str(target))
                self.copy_file(str(path), str(target / path.name), preserve_mode=False)


def description() -> str:
    """The README for a package index, which has none of the other files: pictures go, links become their text."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?://|#)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithShipped},
    long_description=description(),
    long_description_content_type="text/markdown",
)
