"""The whole system against examples/minimal_dapo.py: no packing, no cache, no microbatches, no
engine.
"""

import inspect
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from dapo.config import Config
from dapo.training.train import on_policy_step, train
from examples.minimal_dapo import GROUP_SIZE, MinimalDapo
from helpers.fork_server import ForkServer
from helpers.minimal_runs import STEPS, minimal_config, minimal_inputs
from helpers.paths import ROOT


def run_real(config: Config, path: Path) -> dict[str, torch.Tensor]:
    from dapo.cli.train import start_run

    start_run(config, run_dir=path, config_name="tiny")
    (weights,) = (path / "checkpoints" / f"step_{STEPS:06d}").glob("weights*.safetensors")
    return load_file(weights)


def test_five_steps_of_the_system_equal_a_naive_reimplementation(
    tmp_path: Path, float64_model: Path
) -> None:
    naive = MinimalDapo(*minimal_inputs(float64_model))
    before = {name: tensor.clone() for name, tensor in naive.model.named_parameters()}
    for step in range(1, STEPS + 1):
        naive.step(step)
    real = run_real(minimal_config(float64_model), tmp_path / "run")

    moved = max(
        (tensor - before[name]).abs().max().item()
        for name, tensor in naive.model.named_parameters()
    )
    assert moved > 2e-3  # the comparison would mean nothing if training did nothing
    for name, tensor in naive.model.named_parameters():
        torch.testing.assert_close(real[name], tensor.detach(), rtol=0, atol=1e-8)
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    dropped = sum(
        row["rollout/groups_all_wrong"] + row["rollout/groups_all_correct"] for row in metrics
    )
    assert dropped == naive.num_dropped > 0


def test_the_example_runs_as_a_script_and_prints_its_steps(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    code, _ = fork_server.run(
        str(ROOT / "examples" / "minimal_dapo.py"),
        program="helpers.commands:run_script",
        output=log,
    )
    printed = log.read_text()
    assert code == 0, printed
    steps = [line.split(":")[0] for line in printed.splitlines() if line.startswith("step")]
    assert steps == [f"step {step}" for step in range(1, 6)]
    assert printed.count("advantage") == 5 * GROUP_SIZE
    assert printed.count("update on") == 5 * 2


def test_the_loop_reads_on_one_screen() -> None:
    source = inspect.getsource(train) + inspect.getsource(on_policy_step)
    assert len(source.splitlines()) <= 36
