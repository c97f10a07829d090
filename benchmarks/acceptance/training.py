"""A short training of the whole system, after which the reward must be higher than before."""

import json
from statistics import fmean
from typing import Any

from benchmarks.acceptance.check import Measurement, Setting
from benchmarks.acceptance.correctness import SMALL_MODEL_GAP_NATS
from benchmarks.worker_session import ROOT
from dapo.cli.train import start_run
from dapo.config import load_config

WINDOW = 3
"""Steps at each end whose mean reward is compared."""
GPU_RISE = 0.3
TINY_RISE = 0.2
"""Scores are from -1 to 1 in the quickstart, from 0 to 1 for the tiny model, whose rose by 0.57 on
a CPU.
"""


def check_learns(setting: Setting) -> list[Measurement]:
    """The mean score of the last steps against that of the first: the quickstart on a GPU, the tiny
    model on a CPU.
    """
    own = [
        f"train.device={setting.device}",
        "train.save_every=0",
        "train.eval_every=0",
        "data.eval=null",
    ]
    if setting.on_gpu:
        name = "quickstart"
        rise = GPU_RISE
        own += [
            "model.dtype=bfloat16",
            "rollout.prompts_per_step=16",
            "train.minibatch_groups=16",
            "train.num_steps=15",
        ]
    else:
        name = "tiny"
        rise = TINY_RISE
        own += [
            "reward.verifier=dapo.rewards.examples:digit_share",
            "train.num_steps=15",
            "optim.lr=1.0e-2",
        ]
    path = setting.folder / "run"
    start_run(load_config(ROOT / "configs" / f"{name}.yaml", own), run_dir=path, config_name=name)
    rows = [
        json.loads(line)
        for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return _measured(rows, rise)


def _measured(rows: list[dict[str, Any]], rise: float) -> list[Measurement]:
    steps = [row for row in rows if "reward/score_mean" in row]
    first, last = (
        fmean(row["reward/score_mean"] for row in part)
        for part in (steps[:WINDOW], steps[-WINDOW:])
    )
    gap = max(row["rollout/engine_logprob_gap_mean"] for row in steps)
    return [
        Measurement(f"mean score of steps 1 to {WINDOW}", first),
        Measurement("rise of the mean score to the last steps", last - first, at_least=rise),
        Measurement("updates skipped", sum(row["optim/skipped"] for row in steps), at_most=0),
        Measurement(
            "largest mean gap of a step between engine and policy",
            gap,
            "nats",
            at_most=SMALL_MODEL_GAP_NATS,
        ),
    ]
