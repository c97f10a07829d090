"""On a CUDA device engine and update give what the CPU gives in float32: in the same type, and
rounded to bfloat16.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.acceptance.runner import run_check
from benchmarks.gpu_acceptance import CHECKS
from dapo.cli.train import start_run
from dapo.config import load_config
from dapo.policy.model import load_model
from dapo.types import Sample
from helpers.paths import CONFIGS
from helpers.tiny_policies import make_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision():
    """TF32 would round the comparison away."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    "name", ["logprobs", "gradients", "kernels", "syncs", "engine-gap", "equal-tokens"]
)
def test_a_check_of_gpu_acceptance_is_within_its_bounds(name: str) -> None:
    """bfloat16, heads of 64 and 128, masks, sliding windows, cuDNN's attention off, and what a
    decode step takes.
    """
    (check,) = (check for check in CHECKS if check.name == name)
    result = run_check(check, "cuda", None, limit_s=check.limit_s)
    assert result.status == "pass", result


def test_an_update_is_that_of_the_cpu():
    def after_two_updates(device: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        loaded = load_model("tiny-random", dtype=torch.float32, device=device)
        policy = make_policy(loaded)
        lengths = (2, 5, 8)
        samples = [
            Sample(
                g,
                (5, 6, 7 + g),
                tuple(range(10, 10 + n)),
                1.0,
                1.0 - i,
                (-4.0,) * n,
                None,
                (True,) * n,
            )
            for g in range(3)
            for i, n in enumerate(lengths)
        ]
        samples = policy.record_old_logprobs(samples)
        policy.update(samples, step=1)
        metrics = policy.update(samples, step=2)
        return {
            name: tensor.cpu() for name, tensor in policy.weights(version=0).named_tensors()
        }, metrics

    here = after_two_updates("cuda")
    there = after_two_updates("cpu")
    for name, tensor in there[0].items():
        torch.testing.assert_close(here[0][name], tensor, rtol=0, atol=2e-5)
    assert here[1]["loss/entropy"] == pytest.approx(there[1]["loss/entropy"], abs=1e-4)
    assert here[1]["optim/grad_norm"] == pytest.approx(there[1]["optim/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tiny_config_trains_on_it(tmp_path: Path, dtype: str):
    config = load_config(CONFIGS / "tiny.yaml", ["train.device=cuda", f"model.dtype={dtype}"])
    start_run(config, run_dir=tmp_path / "run", config_name="tiny")
    assert (tmp_path / "run" / "checkpoints" / "step_000005" / "weights.safetensors").is_file()
