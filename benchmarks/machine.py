"""Describes the machine of a measurement."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile")
"""Instructions that decide how fast matrices are multiplied."""


def describe_machine() -> dict[str, Any]:
    """Processor, its instructions, cores and system."""
    fields = _cpuinfo()
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def describe_commit(root: Path) -> str:
    """The commit that was measured; `+` behind it where files had been changed since."""
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"


def today() -> str:
    """In UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields; empty where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
    }
