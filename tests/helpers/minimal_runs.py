"""What dapo and examples/minimal_dapo.py are compared with: one model, the same problems, and equal
options.
"""

from pathlib import Path

import torch

from dapo.config import Config, build_config
from dapo.data.problems import load_problems
from dapo.policy.model import LoadedModel, load_model
from dapo.types import Problem
from examples import minimal_dapo as minimal

STEPS = 5


def minimal_inputs(model: Path) -> tuple[LoadedModel, list[Problem]]:
    """The model in float64, and the problems of the example."""
    return load_model(str(model), dtype=torch.float64), load_problems(minimal.PROBLEMS)


def minimal_config(model: Path) -> Config:
    """The configuration with which dapo computes what the example does."""
    return build_config(
        {
            "model": {"name": str(model), "dtype": "float64"},
            "data": {"train": minimal.PROBLEMS},
            "rollout": {
                "prompts_per_step": minimal.PROMPTS_PER_STEP,
                "group_size": minimal.GROUP_SIZE,
                "max_response_tokens": minimal.MAX_TOKENS,
                "native": {"slots": 12},
                "temperature": minimal.TEMPERATURE,
            },
            "dynamic_sampling": {"max_groups_per_step": 40},
            "reward": {"verifier": "dapo.rewards.examples:has_digit", "workers": 1},
            "overlong": {
                "buffer_tokens": minimal.BUFFER_TOKENS,
                "penalty": minimal.OVERLONG_PENALTY,
            },
            "optim": {
                "lr": minimal.LEARNING_RATE,
                "warmup_steps": minimal.WARMUP_STEPS,
                "weight_decay": minimal.WEIGHT_DECAY,
            },
            "train": {
                "num_steps": STEPS,
                "minibatch_groups": minimal.GROUPS_PER_MINIBATCH,
                "microbatch_tokens": 200,
                "save_every": 0,
            },
        }
    )
