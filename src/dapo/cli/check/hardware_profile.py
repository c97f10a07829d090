"""What an estimate assumes of the hardware and of the responses: printed defaults, which `--assume` changes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.policy.memory_model import GIB, ResponseLengths
from dapo.policy.model_dimensions import KNOWN_DIMENSIONS


def _assumed(value: Any, meaning: str) -> Any:
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True)
class HardwareProfile:
    """What a configuration does not say. Rates are those of one device: a GPU, or this machine's processor."""

    device: str = _assumed("gpu", "gpu or cpu")
    dimensions: str = _assumed("", "known model whose sizes are taken")
    memory_gib: float = _assumed(80.0, "GiB of memory per device")
    tflops: float = _assumed(989.0, "1e12 FLOP/s of large matrix products in model.dtype, per device")
    bandwidth_gb_s: float = _assumed(3000.0, "GB/s between a device and its memory")
    link_gb_s: float = _assumed(25.0, "GB/s between two nodes, or two processes of one")
    storage_gb_s: float = _assumed(1.0, "GB/s at which all nodes together read the model's files")
    devices_per_node: int = _assumed(8, "devices per node")
    train_utilisation: float = _assumed(0.51, "fraction of tflops that the products of an update reach")
    generate_utilisation: float = _assumed(0.45, "fraction of tflops that the products of a decode step reach")
    attention_utilisation: float = _assumed(0.67, "fraction of bandwidth at which a decode step reads its cache")
    moves_per_activation: float = _assumed(6.0, "times that each kept byte of activations moves in an update")
    issue_us: float = _assumed(16.5, "microseconds of the host per kernel that Python launches, views between included")
    launch_us: float = _assumed(8.0, "microseconds of the host per kernel in a row of equal ones")
    kernel_us: float = _assumed(3.0, "microseconds of a small kernel on the GPU")
    keep_rate: float = _assumed(1 / 3, "fraction of groups that carry a signal (Eq. 11)")
    mean_response_tokens: float = _assumed(0.0, "tokens of a response, on average")
    length_spread: float = _assumed(0.75, "standard deviation of the logarithm of response lengths")
    prompt_tokens: float = _assumed(256.0, "tokens of a prompt, on average")
    process_gib: float = _assumed(0.6, "GiB of a process without its tensors")
    engine_overhead_gib: float = _assumed(4.0, "GiB that vLLM takes for itself on each GPU")


def hardware_profile_for(config: Config, given: Sequence[str] = ()) -> HardwareProfile:
    """The defaults for a configuration's devices, and `name=value` over them. Raises ConfigError."""
    changed = dict(_parse(text) for text in given)
    device = changed.get("device", "cpu" if _trains_on_cpu(config) else "gpu")
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"--assume device={device}: expected gpu or cpu")
    base = HardwareProfile() if device == "gpu" else _this_machine()
    lengths = ResponseLengths.expected(config)
    base = replace(
        base,
        mean_response_tokens=lengths.response,
        prompt_tokens=lengths.prompt,
        keep_rate=base.keep_rate if config.dynamic_sampling.enabled else 1.0,
    )
    profile = replace(base, **changed)
    if profile.dimensions and profile.dimensions not in KNOWN_DIMENSIONS:
        raise ConfigError(f"--assume dimensions={profile.dimensions}: known are {', '.join(KNOWN_DIMENSIONS)}")
    for entry in fields(HardwareProfile):
        value = getattr(profile, entry.name)
        if not isinstance(value, str) and not value > 0:
            raise ConfigError(f"--assume {entry.name}={value}: expected a number above 0")
    return profile


def _parse(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    kinds: dict[str, Any] = {entry.name: type(entry.default) for entry in fields(HardwareProfile)}
    if not equals or name not in kinds:
        raise ConfigError(f"--assume {text}: expected NAME=VALUE with one of {', '.join(kinds)}")
    try:
        return name, kinds[name](value)
    except ValueError:
        raise ConfigError(f"--assume {text}: expected a number") from None


def _this_machine() -> HardwareProfile:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HardwareProfile(
        device="cpu",
        memory_gib=round(memory / GIB, 1),
        tflops=0.085 * cores,  # this and the rates below as measured in docs/lab/performance.md
        bandwidth_gb_s=10.0 * cores,
        link_gb_s=2.0,
        devices_per_node=1,
        train_utilisation=0.5,
        generate_utilisation=0.35,
        engine_overhead_gib=1.0,
    )


def _trains_on_cpu(config: Config) -> bool:
    if config.train.device != "auto":
        return config.train.device == "cpu"
    return config.launcher == "local" and not Path("/dev/nvidia0").exists()
