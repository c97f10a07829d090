"""What pyproject.toml cannot say: configs/ and docs/ go into the package, the README without links
into the clone, and `cpu_kernels` is compiled if there is a compiler.

Configurations and pages stand once, at the top of the repository, where `dapo.config.load` finds
them in a clone. Symbolic links would need a file system that has them.
"""

import re
import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

TOP = Path(__file__).parent
KERNELS = runpy.run_path(str(TOP / "src" / "dapo" / "libs" / "cpu_kernels" / "build.py"))


class BuildWithShipped(build_py):
    """Compiles the kernels, and copies configs/*.yaml and docs/*.md to dapo/ in what is built.

    An editable installation reads the clone, where the compiled kernels lie beside their source.
    """

    def run(self) -> None:
        super().run()
        top = TOP / "src" if self.editable_mode else Path(self.build_lib)
        if not KERNELS["compile_kernels"](top / "dapo" / "libs" / "cpu_kernels"):
            self.warn(
                "no C++ compiler: on a CPU, PyTorch's slower functions stand in for cpu_kernels"
            )
        if not self.editable_mode:
            for path in sorted([*TOP.glob("configs/*.yaml"), *TOP.glob("docs/*.md")]):
                target = Path(self.build_lib) / "dapo" / path.parent.name
                self.mkpath(str(target))
                self.copy_file(str(path), str(target / path.name), preserve_mode=False)


class WheelForThisProcessor(bdist_wheel):
    """A wheel for this platform and every Python: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithKernels(Distribution):
    """Compiled files belong to a platform."""

    def has_ext_modules(self) -> bool:
        return KERNELS["find_compiler"]() is not None


def description() -> str:
    """The README for a package index, which has none of the other files: pictures go, links become
    their text.
    """
    text = (TOP / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?://|#)[^)]*\)", r"\1", text)


setup(
    distclass=WithKernels,
    cmdclass={"build_py": BuildWithShipped, "bdist_wheel": WheelForThisProcessor},
    long_description=description(),
    long_description_content_type="text/markdown",
)
