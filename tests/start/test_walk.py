"""The trip of a configuration from the command to the loop, walked as calls of one run."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dapo
from dapo.cli.train import start_run
from dapo.config import Config
from dapo.start.run import ReadyRun  # a run's modules are imported before its calls are counted
from helpers.tables import for_each_row
from helpers.tiny_runs import tiny

ROOT = f"{Path(dapo.__file__).parent}/"
LOOP = "training/train.py"
OPTIONS = (
    "train.num_steps=1",
    "data.eval=null",
    "dynamic_sampling.filter=helpers.reward_functions:keep_all",
    "loss.function=examples.losses:reinforce",
    "audit.verifier=exact",
    "environment=helpers.environments:Echo",
    "environment.max_observation_tokens=24",
    "rollout.max_response_tokens=128",
    "reward.verifier=auto",
)


def holds_config(value: object) -> bool:
    """Whether a value is a whole Config, or one of dapo's objects that hands one on."""
    if isinstance(value, Config):
        return True
    if not type(value).__module__.startswith("dapo."):
        return False
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    inputs = attributes.get("inputs") if isinstance(value, ReadyRun) else None
    return isinstance(attributes.get("config"), Config) or inputs is not None


class Walk:
    """The calls of dapo's functions up to the loop: by name, and the rooms that see the Config."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.rooms: list[str] = []
        self._is_in_loop = False

    def follow(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        room = code.co_filename.removeprefix(ROOT)
        self._is_in_loop |= room == LOOP
        self.calls[f"{room}:{code.co_qualname}"] += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names]
        is_own_method = bool(values) and isinstance(values[0], Config) and names[0] == "self"
        if not self._is_in_loop and not is_own_method and any(map(holds_config, values)):
            self.rooms.append(room)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    path = tmp_path_factory.mktemp("walk")
    walk = Walk()
    sys.setprofile(walk.follow)
    try:
        start_run(tiny(*OPTIONS), run_dir=path / "run", config_name="tiny")
    finally:
        sys.setprofile(None)
    assert json.loads((path / "run" / "summary.json").read_text())["exit_reason"] == "finished"
    return walk


@for_each_row(
    ["step"],
    [
        ["start/resolve.py:resolve"],
        ["start/resolve.py:require_hardware"],
        ["start/resolve.py:resolve_auto"],
        ["start/resolve.py:resolve_engine"],
        ["start/read.py:read"],
        ["start/read.py:read_model"],
        ["start/check.py:load_functions"],
        ["core/loading.py:load_callable"],
        ["policy/custom_loss.py:load_loss"],
        ["rewards/pool.py:VerifierPool.__init__"],
        ["environments/pool.py:EnvironmentPool.__init__"],
    ],
)
def test_each_step_is_called_once_and_loads_each_function_of_the_user_once(
    walk: Walk, step: str
) -> None:
    # the filter and the loss; the verifiers and those of the audit
    twice = {"core/loading.py:load_callable", "rewards/pool.py:VerifierPool.__init__"}
    assert walk.calls[step] == (2 if step in twice else 1)


def test_few_rooms_see_the_whole_configuration_before_the_loop(walk: Walk) -> None:
    rooms = sorted(set(walk.rooms))
    assert {"cli/train.py", "start/check.py", "start/build.py"} <= set(rooms)
    assert len(rooms) <= 15, " ".join(rooms)
