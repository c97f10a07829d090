"""A device without memory left ends a run like any other failure: state saved, options named,
resumable.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from dapo.cli.train import resume_run, start_run
from dapo.core.errors import OutOfMemory
from dapo.core.memory import explain_out_of_memory
from dapo.policy.model import load_model
from dapo.policy.policy import peak_gpu_memory
from dapo.sampling.rollout_metrics import mean_of_updates
from helpers.fake_cuda import fake_cuda
from helpers.tiny_policies import loaded, make_policy
from helpers.tiny_runs import contents, differences, metrics, saved_steps, tiny

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB of"
    " which 512.00 MiB is free. Including non-PyTorch memory, it has 78.60 GiB in use. Of the"
    " allocated memory 77.00 GiB is allocated by PyTorch. See the documentation for Memory"
    " Management."
)
RUN = ("train.num_steps=4", "train.save_every=2", "train.minibatch_groups=2", "model.dtype=float64")
COMPUTATIONS = {
    "generation": (torch.is_inference_mode_enabled, "rollout.native.slots"),
    "the old log-probabilities": (
        lambda: not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()),
        "train.microbatch_tokens",
    ),
    "an update of the policy": (torch.is_grad_enabled, "train.recompute=true"),
}


@contextmanager
def full_device(run: Path, at: Callable[[], bool]) -> Iterator[None]:
    """Inside, the first forward of the third step where `at` holds finds no memory."""

    def check(module: torch.nn.Module, _: Any) -> None:
        if (
            at()
            and (run / "rollouts/step_000002.parquet").exists()
            and metrics(run)[-1]["step"] == 2
        ):
            raise torch.OutOfMemoryError(MESSAGE)

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("whole") / "run"
    start_run(tiny(*RUN, "rollout.prompts_per_step=4"), run_dir=path, config_name="t")
    return contents(path)


@pytest.mark.parametrize("doing", COMPUTATIONS)
def test_a_run_that_finds_no_memory_is_saved_says_what_to_lower_and_resumes(
    doing: str, whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, (at, option) = tmp_path / "run", COMPUTATIONS[doing]
    with full_device(run, at), pytest.raises(OutOfMemory) as caught:
        start_run(tiny(*RUN, "rollout.prompts_per_step=4"), run_dir=run, config_name="t")
    message = str(caught.value)
    assert message.startswith(
        f"{doing} ran out of memory (1.50 GiB were requested, 512.00 MiB of 79.11 GiB were free):"
        " lower "
    )
    assert option in message
    assert caught.value.exit_code == 1
    assert "step_000002" in saved_steps(run)
    printed = capsys.readouterr().out
    assert (
        f"with the same options the step would fail again: dapo resume {run} OPTION=VALUE"
        in printed
    )
    if doing == "generation":  # the others end at the same place of the run, between two steps
        resume_run(run, [])
        assert differences(contents(run), whole) == []


def test_a_run_resumes_with_smaller_microbatches_and_recomputation(
    whole: dict[str, Any], tmp_path: Path
):
    run = tmp_path / "run"
    with full_device(run, torch.is_grad_enabled), pytest.raises(OutOfMemory):
        start_run(tiny(*RUN, "rollout.prompts_per_step=4"), run_dir=run, config_name="t")
    resume_run(run, ["train.microbatch_tokens=64", "train.recompute=true"])
    # microbatches cut otherwise share other beginnings, whose gradients RMSNorm rounds to float32
    # as a sum or each
    shared = "optim/shared_token_fraction"
    for row, other in zip(metrics(run), whole["metrics"], strict=True):
        assert row | {shared: 0} == pytest.approx(
            other | {shared: 0}, rel=1e-6, abs=1e-7, nan_ok=True
        )


class FullDevice(TorchDispatchMode):
    """Nothing fits on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str((kwargs or {}).get("device")).startswith("cuda"):
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


def test_a_model_that_does_not_fit_on_its_gpu_names_what_to_change():
    with fake_cuda(), FullDevice(), pytest.raises(OutOfMemory) as caught:
        load_model("tiny-random", dtype=torch.float32, device="cuda")
    message = str(caught.value)
    assert message.startswith(
        "loading the model ran out of memory (1.50 GiB were requested, 512.00 MiB of 79.11 GiB"
    )
    assert all(
        option in message
        for option in ("model.dtype", "distributed.trainer_ranks", "rollout.vllm.cache_gib")
    )
    assert message.endswith("and start again")


def test_memory_that_ends_while_attention_is_checked_is_not_taken_for_an_unsupported_model():
    def fill(module: torch.nn.Module, _: Any) -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    model = loaded()
    handle = register_module_forward_pre_hook(fill)
    try:
        with pytest.raises(
            OutOfMemory, match=r"^preparing the policy ran out of memory .*model\.dtype=bfloat16"
        ):
            make_policy(model)
    finally:
        handle.remove()


def test_the_peak_of_gpu_memory_starts_anew_with_each_reading_and_a_cpu_has_none():
    class Memory:
        """One gibibyte stays allocated; the first reading comes after a peak of three."""

        peak = 3 * 2**30

        def is_available(self) -> bool:
            return True

        def max_memory_allocated(self, device: torch.device) -> int:
            return self.peak

        def reset_peak_memory_stats(self, device: torch.device) -> None:
            self.peak = 2**30

    memory = Memory()
    readings = [peak_gpu_memory(torch.device("cuda", 0), memory) for _ in range(2)]
    assert readings == [{"time/peak_gpu_memory_gib": 3.0}, {"time/peak_gpu_memory_gib": 1.0}]
    assert mean_of_updates(readings) == {"time/peak_gpu_memory_gib": 3.0}
    assert peak_gpu_memory(torch.device("cpu"), memory) == {}


def test_what_the_failed_computation_held_is_freed():
    freed: list[str] = []

    class Held:
        def __del__(self) -> None:
            freed.append("tensor")

    @explain_out_of_memory(MemoryError, "this", "do less")
    def fill() -> None:
        tensor = Held()
        raise MemoryError(f"no room beside {type(tensor).__name__}")

    with pytest.raises(
        OutOfMemory,
        match=r"^this ran out of memory \(no room beside Held\): do less, and resume the run$",
    ):
        fill()
    assert freed == ["tensor"]
