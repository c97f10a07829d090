"""Whole runs with predictions: killed, resumed, one step off, and over several engines they are the
same run.
"""

import signal
from pathlib import Path

from dapo.cli.train import start_run
from helpers.async_runs import async_config, resumed_from, run_or_resume
from helpers.fork_server import ForkServer
from helpers.paths import CONFIGS
from helpers.tiny_runs import EVENTFUL, contents, differences, metrics, tiny

THINNED = (*EVENTFUL, "dynamic_sampling.predict=true", "train.num_steps=4")
KILLED_AT = 30_000
"""A call of the sampling in the middle of the run."""
SAVES = ("train.save_every=1", "train.keep_checkpoints=9")


def test_killed_in_a_step_that_skips_problems_and_resumed_it_is_the_uninterrupted_run(
    fork_server: ForkServer, tmp_path: Path
):
    def start(run: Path, **moment: object) -> int:
        options = [*THINNED, "train.threads=1", "train.save_every=1", "data.eval=null"]
        command = ["train", str(CONFIGS / "tiny.yaml"), *options, "--run-dir", str(run)]
        return fork_server.run(*command, output=tmp_path / "log", **moment)[0]

    whole = tmp_path / "whole"
    run = tmp_path / "run"
    assert start(whole) == 0, (tmp_path / "log").read_text()
    rows = metrics(whole)
    assert sum(row["rollout/problems_skipped"] for row in rows) > 0
    assert (
        start(run, area="rollout", calls=KILLED_AT, signals=[(0, signal.SIGKILL)])
        == -signal.SIGKILL
    )
    assert 0 < len(metrics(run)) < len(rows)
    assert fork_server.run("resume", str(run), output=tmp_path / "log")[0] == 0, (
        tmp_path / "log"
    ).read_text()
    assert differences(contents(run), contents(whole)) == []


def test_one_step_off_with_predictions_it_resumes_from_any_step_to_the_byte(tmp_path: Path):
    whole = tmp_path / "whole"
    run_or_resume(whole, async_config(*THINNED, *SAVES))
    rows = metrics(whole)[1:]
    assert sum(row["rollout/problems_skipped"] for row in rows) > 0
    for step in (1, 3):
        run = tmp_path / f"run{step}"
        resumed_from(whole, run, step=step)
        assert differences(contents(run), contents(whole)) == [], step


def test_two_engines_in_processes_of_their_own_ask_the_same_problems(tmp_path: Path):
    options = (*THINNED, "train.num_steps=3")
    start_run(tiny(*options), run_dir=tmp_path / "one", config_name="tiny")
    engines = ("rollout.engines=2", "train.threads=1")
    start_run(tiny(*options, *engines), run_dir=tmp_path / "two", config_name="tiny")
    names = ("rollout/problems_skipped", "rollout/skipped_chance", "rollout/tokens_trained")
    one, two = (
        [{name: row[name] for name in names} for row in metrics(tmp_path / run)[1:]]
        for run in ("one", "two")
    )
    assert one == two
