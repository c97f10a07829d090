"""Laws of the device that `auto` is resolved for: where it is, its compute capability, a driver
that does not work.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_acceptance
from dapo.config import Config, load_config
from dapo.core.errors import ConfigError
from dapo.core.memory import GIB
from dapo.distributed.launch import ALLOCATOR_VARIABLES
from dapo.policy import model
from dapo.start.read import read_model_and_encoder
from dapo.start.resolve import ComputeDevice, require_hardware, resolve_auto, trainer_gpu
from helpers.commands import run
from helpers.paths import TINY
from helpers.tables import for_each_row

KNOWN = (
    "data.train=builtin:sums",
    "train.microbatch_tokens=1024",
    "train.recompute=false",
    "rollout.engine=native",
)


def tiny(*overrides: str) -> Config:
    return load_config(TINY, [*KNOWN, *overrides])


def use_gpus(monkeypatch: pytest.MonkeyPatch, capabilities: Sequence[tuple[int, int]]) -> None:
    """Make torch report GPUs of these compute capabilities."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
    properties = [
        SimpleNamespace(name=f"GPU {i}", total_memory=(16 + i) * GIB)
        for i in range(len(capabilities))
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: properties[index].name)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ([(7, 5)], "float32"),
        ([(7, 0)], "float32"),
        ([(8, 0)], "bfloat16"),
        ([(9, 0)], "bfloat16"),
        ([(9, 0), (7, 5)], "float32"),
    ],
)
def test_a_gpu_without_bfloat16_units_computes_in_float32_and_a_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: Sequence[tuple[int, int]], dtype: str
) -> None:
    use_gpus(monkeypatch, capabilities)
    lines: list[str] = []
    found = resolve_auto(tiny("model.dtype=auto"), log=lines.append)
    assert (found.train.device, found.model.dtype) == ("cuda", dtype)
    oldest = capabilities.index(min(capabilities))
    expected = (
        f"auto: model.dtype=float32: the GPU (GPU {oldest}, compute capability"
        f" {capabilities[oldest][0]}.{capabilities[oldest][1]}) has no bfloat16 units, which need"
        " compute capability 8.0"
    )
    assert lines == ([expected] if dtype == "float32" else [])


def test_processes_that_share_a_gpu_divide_the_memory_that_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_gpus(monkeypatch, [(8, 0)])
    config = tiny(
        "distributed.trainer_ranks=2",
        "train.device=cuda",
        "schedule=one_step_off",
        "rollout.engines=1",
    )
    gpu = trainer_gpu(config, ComputeDevice.of_this_process("auto"))
    assert gpu is not None
    assert gpu.available == 16 * GIB / 3  # two ranks and an engine
    assert trainer_gpu(config, ComputeDevice("cpu", "a processor", True)) is None


def use_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *, cuda: str | None = "13.0"
) -> None:
    """Make a loaded driver report this version, to a torch that was built for this CUDA and finds
    no device.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(model, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(model, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    model.NVIDIA_DRIVER.write_text(text, encoding="utf-8")


OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
REFUSAL = (
    f"this machine's NVIDIA driver 550.54.15 gives torch no GPU: torch {torch.__version__} is built"
    " for CUDA 13.0, which needs 580 or newer"
)


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_driver_that_torch_cannot_use_is_an_error_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    use_driver(monkeypatch, tmp_path, OLD)
    run_dir = ["--run-dir", str(tmp_path / "run")] if command == "train" else []
    code, out, err = run(capsys, command, str(TINY), *run_dir)
    advice = "update the driver, install torch for an older CUDA, or set train.device=cpu"
    if command == "train":
        assert err == f"error: {REFUSAL}; {advice}\n"
    else:  # beside the estimate
        assert f"problem: {REFUSAL}; {advice}" in " ".join(out.split())
    assert code == 2


def test_the_acceptance_names_the_same_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_driver(monkeypatch, tmp_path, OLD)
    monkeypatch.setattr(
        gpu_acceptance, "in_own_process", lambda *_, **__: ("pass", {"GPUs": "none"})
    )
    assert gpu_acceptance.main([]) == 2
    assert capsys.readouterr().err == f"{REFUSAL}; --device cpu checks what a CPU can\n"


def test_a_cpu_that_was_chosen_needs_no_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_driver(monkeypatch, tmp_path, OLD)
    assert model.device_of("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides every GPU
    assert model.device_of("auto") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="NVIDIA driver"):
        model.device_of("auto")
    use_driver(monkeypatch, tmp_path, OLD, cuda=None)  # a build for CPUs
    assert model.device_of("auto") == "cpu"
    use_driver(monkeypatch, tmp_path, OLD)
    (tmp_path / "nvidia0").unlink()  # a container that was given no GPU of its host
    assert model.device_of("auto") == "cpu"


def test_a_resolved_configuration_does_not_depend_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_gpus(monkeypatch, [(8, 0)])
    resolved = resolve_auto(tiny("model.dtype=auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_auto(resolved) == resolved  # read where there is no GPU


@for_each_row(
    ["options", "device", "training", "variable", "expected"],
    [
        ((), "cuda", True, None, ["expandable_segments:True"]),
        (("rollout.engines=1",), "cuda", True, None, ["expandable_segments:True"]),
        ((), "cpu", True, None, []),
        # an evaluation trains nothing; ranks are processes with variables of their own
        ((), "cuda", False, None, []),
        (("distributed.trainer_ranks=2",), "cuda", True, None, []),
        ((), "cuda", True, "max_split_size_mb:64", []),
    ],
)
def test_the_process_that_trains_on_a_gpu_has_segments_that_grow_unless_the_user_says_otherwise(
    options: tuple[str, ...],
    device: str,
    training: bool,
    variable: str | None,
    expected: list[str],
) -> None:
    settings: list[str] = []

    class ReadLater(Exception):
        """Ends the start where the model's weights would be read."""

    def read_later(*_: object) -> None:
        raise ReadLater

    with pytest.MonkeyPatch.context() as patch:
        for name in ALLOCATOR_VARIABLES:
            patch.delenv(name, raising=False)
        if variable is not None:
            patch.setenv("PYTORCH_ALLOC_CONF", variable)
        patch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
        patch.setattr("dapo.start.read.read_model", read_later)
        patch.setattr("dapo.start.read.device_for_inputs", lambda *_, **__: device)
        config = tiny(*options).changed("train", device=device)
        with pytest.raises(ReadLater):
            read_model_and_encoder(config, None, training=training)
    assert settings == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "fits"), [(1, 2, False), (2, 3, False), (2, 2, True), (0, 2, True)]
)
def test_more_ranks_than_gpus_are_refused_where_they_would_compute_on_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, fits: bool
) -> None:
    if gpus:
        use_gpus(monkeypatch, [(9, 0)] * gpus)
    wanted = f"distributed.trainer_ranks={ranks}"
    if fits:
        require_hardware(tiny(wanted))
    else:
        with pytest.raises(
            ConfigError,
            match=rf"^{wanted}: expected at most {gpus}, .*set .*trainer_ranks={gpus}, or",
        ):
            require_hardware(tiny(wanted))
    require_hardware(tiny(wanted), training=False)  # an evaluation has no ranks
    require_hardware(tiny(wanted, "train.device=cpu"))
    require_hardware(tiny(wanted, "launcher=ray"))  # whose GPUs may be on other machines
