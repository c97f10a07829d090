"""Compiles `kernels.cpp` for the instruction sets of this kind of processor: `python -m
cpu_kernels`.

setup.py also runs it, where torch need not be installed.
"""

import os
import platform
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
"""The instruction sets of x86 by the names that PyTorch gives a processor's capability."""
_OPTIONS = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti"]
_OPTIONS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]


def library_path(folder: Path, capability: str) -> Path:
    """Return the library compiled from this source for a processor of that capability, which may
    not exist.
    """
    level = LEVELS[capability] if _is_x86() and capability in LEVELS else platform.machine()
    return folder / f"kernels-{level}-{zlib.crc32(SOURCE.read_bytes()):08x}.so"


def find_compiler() -> str | None:
    """Return the command of the C++ compiler: `CXX`, as for other packages, else a common name."""
    if sys.platform == "win32":
        return None
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def compile_kernels(folder: Path) -> list[Path]:
    """Compile the libraries into a folder, where they replace older ones; returns them, none
    without a compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    libraries = []
    for capability in LEVELS if _is_x86() else [""]:
        target = library_path(folder, capability)
        level = [f"-march={LEVELS[capability]}"] if capability else []
        command = [*compiler.split(), *_OPTIONS, *level, str(SOURCE), "-o", str(target)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            libraries.append(target)
    for old in set(folder.glob("kernels-*.so")) - set(libraries) if libraries else ():
        old.unlink()
    return libraries


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
