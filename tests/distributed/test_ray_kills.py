"""A run on Ray that is killed anywhere, and resumed, is the uninterrupted run to the byte."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.tiny_runs import CONFIGS, contents, differences

KILLS = int(os.environ.get("DAPO_RAY_KILLS", "0"))
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not KILLS, reason="minutes: set DAPO_RAY_KILLS=10"),
]
EPISODES = (
    "environment=helpers.environments:Digits",
    "environment.max_observation_tokens=24",
    "environment.options={delay_s: 0.05}",
    "rollout.max_response_tokens=48",
    "rollout.engines=1",
    "reward.verifier=auto",
)
VARIANTS = {
    "episodes": EPISODES,
    "async with two engines": (
        "schedule=async",
        "max_staleness=3",
        "rollout.engines=2",
        "rollout.max_response_tokens=24",
    ),
}
OPTIONS = (
    "launcher=ray",
    "train.threads=1",
    "train.num_steps=4",
    "train.save_every=1",
    "train.keep_checkpoints=9",
    "train.eval_every=2",
)
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
    "PYTHONWARNINGS": "error",
}
LIMIT_S = 240


def begin(run: Path, variant: str) -> "subprocess.Popen[bytes]":
    """Start or continue the run, in a group of its own."""
    new = ["train", str(CONFIGS / "tiny.yaml"), *OPTIONS, *VARIANTS[variant], "--run-dir", str(run)]
    arguments = ["resume", str(run)] if (run / "config.yaml").exists() else new
    with run.with_name(f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dapo", *arguments],
            env=ENVIRONMENT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_random_moments_and_resumed_it_ends_as_if_nothing_had_happened(
    tmp_path: Path, variant: str
) -> None:
    whole = begin(tmp_path / "whole", variant)
    assert whole.wait(LIMIT_S) == 0, (tmp_path / "whole.log").read_text()
    expected = contents(tmp_path / "whole")
    chance = random.Random(0)
    killed = 0
    number = 0
    while killed < KILLS:
        run = tmp_path / f"run{number}"
        number = number + 1
        code = -1
        while code != 0:
            process = begin(run, variant)
            before = lines(run)
            wanted = before + chance.randint(0, 2)
            more = chance.uniform(0, 0.6)
            until = time.monotonic() + LIMIT_S
            while killed < KILLS and process.poll() is None and lines(run) < wanted:
                assert time.monotonic() < until
                time.sleep(0.02)
            # Ray starts for some seconds before the first step
            time.sleep(more + (8 if wanted == before else 0))
            if killed < KILLS and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
            code = process.wait(LIMIT_S)
            assert code in (0, -signal.SIGKILL), run.with_name(f"{run.name}.log").read_text()
        assert differences(contents(run), expected) == []
