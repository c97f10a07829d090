"""A run that is killed anywhere, and resumed, is the uninterrupted run to the byte."""

import itertools
import os
import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from helpers.fork_server import AREAS, ForkServer
from helpers.tiny_runs import CONFIGS, EVENTFUL, contents, differences, metrics

KILLS = int(os.environ.get("DAPO_KILLS", "14"))
"""`make nightly` sets 200."""

# a checkpoint every second step, so that a kill loses finished steps as well
OPTIONS = (*EVENTFUL, "train.threads=1", "train.num_steps=6", "train.save_every=2", "train.keep_checkpoints=2")


@pytest.fixture(scope="module")
def counted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The uninterrupted run, and how many calls it made in each area."""
    run = tmp_path_factory.mktemp("whole") / "run"
    code, calls = start_or_resume(fork_server, run, count=True)
    assert code == 0, output_of(run).read_text()
    return run, calls


def start_or_resume(fork_server: ForkServer, run: Path, **moment: object) -> tuple[int, dict[str, int]]:
    """What a person would type after whatever happened before: exit code, and calls by area."""
    if (run / "config.yaml").exists():
        arguments = ["resume", str(run)]
    else:
        arguments = ["train", str(CONFIGS / "tiny.yaml"), *OPTIONS, "--run-dir", str(run)]
    return fork_server.run(*arguments, output=output_of(run), **moment)


def output_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def test_the_run_that_is_killed_has_everything_that_makes_resuming_hard(counted: tuple[Path, dict[str, int]]):
    whole, _ = counted
    rows = metrics(whole)[1:]
    assert min(row["rollout/keep_rate"] for row in rows) < 1
    assert sum(row["rollout/groups_excess"] for row in rows) > 0
    assert sum(row["rollout/groups_aborted"] for row in rows) > 0
    assert [row["rollout/epoch"] for row in rows][-1] >= 2
    assert len({row["loss/entropy"] for row in rows}) == 6
    assert 0 < sum(row["rollout/shortfall_groups"] > 0 for row in rows) < 6
    assert len(contents(whole)["files"]) == 6 + 3 + 1 + 5 * (3 if (whole / "checkpoints/step_000002").exists() else 2)


def test_killed_at_random_moments_and_resumed_it_ends_as_if_nothing_had_happened(
    fork_server: ForkServer, counted: tuple[Path, dict[str, int]], tmp_path: Path
):
    """SIGKILL in each area of the program by turns: at a random call made there, or up to 20 ms after one."""
    whole, calls = counted
    expected = contents(whole)
    chance = random.Random(0)
    killed: Counter[str] = Counter()
    for number in itertools.count():
        run = tmp_path / f"run{number}"
        is_ended = False
        while not is_ended:
            moment: dict[str, object] = {}
            area = list(AREAS)[killed.total() % len(AREAS)]
            if killed.total() < KILLS:
                delay = chance.choice([0, 0, 0.02 * chance.random()])
                moment = {
                    "area": area,
                    "calls": chance.randint(1, max(2, int(0.6 * calls[area]))),  # a resumed run makes fewer
                    "signals": [(delay, signal.SIGKILL)],
                }
            code, _ = start_or_resume(fork_server, run, **moment)
            assert code in (0, -signal.SIGKILL), f"{moment}\n{output_of(run).read_text()[-3000:]}"
            is_ended = code == 0
            killed[area] += not is_ended
        assert differences(contents(run), expected) == [], f"after {killed} in {number + 1} runs"
        assert not list(run.rglob("*.tmp")), "leftovers of a broken-off write"
        shutil.rmtree(run)
        if killed.total() >= KILLS:
            break
    print(f"{killed.total()} kills in {number + 1} runs: {dict(killed)}")
    assert set(killed) == set(AREAS) or len(AREAS) > KILLS
