"""The name and the instruction sets of this machine's processor, and a bound for GPUs."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
BFLOAT16_CAPABILITY = (8, 0)
"""The lowest compute capability of a GPU with bfloat16 units, and with attention kernels for
variable lengths.
"""

VECTOR_EXTENSIONS = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
"""Prefixes of the flags by which libraries choose their matrix kernels."""


def cpu_model() -> str:
    """Return the name of the processor."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def vector_extensions() -> list[str]:
    """Return the processor's sorted flags for vectors and matrices, if the system reports them."""
    fields = _cpuinfo()
    flags = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    return sorted({flag for flag in flags if flag.startswith(VECTOR_EXTENSIONS)})


def _cpuinfo() -> dict[str, str]:
    """Return the entries of the first processor in Linux's /proc/cpuinfo."""
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    entries = {}
    for line in first.splitlines():
        name, _, value = line.partition(":")
        entries[name.strip()] = value.strip()
    return entries
