"""Compiles the kernels where the package is installed: `python -m dapo.libs.cpu_kernels`."""

import sys

from .build import SOURCE, compile_kernels

if __name__ == "__main__":
    compiled = compile_kernels(SOURCE.parent)
    print(*compiled, sep="\n")
    sys.exit(None if compiled else f"{SOURCE} could not be compiled: install a C++ compiler (g++)")
