"""Runs for the tests of the page: a real one of the tiny model, and servers for it."""

import http.client
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from dapo.analysis.view.queries import Runs
from dapo.analysis.view.server import listen, make_server
from dapo.runs.directory import SUMMARY_FIELDS, RunDirectory
from dapo.runs.evaluations import load_evaluation, write_evaluation
from dapo.start.check import check, read_data
from dapo.start.run import RunCallbacks, new_run, run_training
from helpers.paths import TINY
from helpers.tiny_runs import tiny

SHORT = (
    "train.num_steps=4",
    "train.minibatch_groups=1",
    "train.eval_every=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.max_response_tokens=8",
    "overlong.buffer_tokens=2",
    "rollout.native.slots=8",
    "dynamic_sampling.max_groups_per_step=12",
    "data.train={builtin: {sums: {high: 4}}, size: 12, seed: 1}",
    "data.eval={builtin: {sums: {high: 4}}, size: 6, seed: 2}",
    "reward.verifier=dapo.rewards.examples:has_digit",
    "reward.workers=1",
    "optim.lr=0.003",
)
EPISODES = (
    "environment=helpers.environments:Echo",
    "environment.max_observation_tokens=24",
    "rollout.max_response_tokens=128",
    "reward.verifier=auto",
    "train.num_steps=1",
    "data.eval=null",
)
"""A single step of episodes: half of the responses of 128 tokens or more have several turns."""


def make_run(path: Path, *overrides: str) -> Path:
    """A finished run of the tiny model, four steps with three evaluations."""
    command = ["dapo", "train", str(TINY), *SHORT, *overrides, "--run-dir", str(path)]
    with (
        check(tiny(*SHORT, *overrides)) as checked,
        new_run(checked, read_data(checked), path, command=command) as ready,
    ):
        run_training(ready, RunCallbacks(warn=pytest.fail))
    return path


def close_with(path: Path, reason: str) -> None:
    """Give a run the summary that it writes when it ends for this reason."""
    run = RunDirectory(path)
    summary = dict.fromkeys(SUMMARY_FIELDS)
    run.write_summary(summary | {"exit_reason": reason})


def copy_judged(run: Path, path: Path, **changed: Any) -> Path:
    """Copy a run, with other settings of its last evaluation."""
    shutil.copytree(run, path)
    evaluation = load_evaluation(RunDirectory(run).eval(4))
    table = evaluation.pop("table")
    assert changed.keys() <= evaluation.keys()
    write_evaluation(RunDirectory(path), 4, evaluation | changed, table)
    return path


class Client:
    """Asks a server of the page, and keeps nothing."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case name, and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return (
                answer.status,
                {name.lower(): value for name, value in answer.getheaders()},
                answer.read(),
            )
        finally:
            connection.close()

    def get(self, path: str, **parameters: Any) -> Any:
        """The JSON value of a successful answer."""
        status, _, body = self.request(f"/api/{path}?{urlencode(parameters)}")
        assert status == 200, body
        return json.loads(body)


@contextmanager
def serving(*paths: Path) -> Iterator[Client]:
    """A server of these runs in a thread."""
    runs = Runs(paths)
    with listen(0) as listener:
        port = listener.getsockname()[1]
        server = make_server(runs, port=port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield Client(port)
        finally:
            server.should_exit = True
            thread.join(30)
            runs.close()


@contextmanager
def training(path: Path, *overrides: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that trains a run of the tiny model in this directory; it is killed at the end of
    the block.

    An override replaces the option of SHORT: a command refuses an option that is set twice.
    """
    values = dict(option.split("=", 1) for option in (*SHORT, *overrides))
    options = [f"{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "dapo", "train", str(TINY), "--run-dir", str(path), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()
