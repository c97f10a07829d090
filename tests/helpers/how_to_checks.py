"""What the how-to texts of CONTRIBUTING.md promise.

`tests/system/test_contributing.py` runs these tests in a copy of the repository that all of the
how-tos have changed; here they fail.
"""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dapo
from dapo.config.reward_options import RewardConfig
from dapo.rewards import VerifierPool, get_verifier
from dapo.types import Problem
from helpers.commands import run
from helpers.paths import ROOT, TINY

ONE_STEP = ("train.num_steps=1", "data.eval=null")


def train(capsys: pytest.CaptureFixture[str], run_dir: Path, *options: str) -> dict[str, float]:
    """The metrics of a run of one step."""
    code, _, err = run(capsys, "train", str(TINY), *ONE_STEP, *options, "--run-dir", str(run_dir))
    assert (code, err) == (0, "")
    [line] = (run_dir / "metrics.jsonl").read_text().splitlines()
    metrics: dict[str, float] = json.loads(line)
    return metrics


def rollouts(run_dir: Path) -> pa.Table:
    return pq.read_table(run_dir / "rollouts" / "step_000001.parquet")


def test_a_verifier_is_a_file_and_a_row_of_the_table(capsys: pytest.CaptureFixture[str]):
    problem = Problem("1", "An even number?", "", "here")
    verify = get_verifier("even", minimum=4)
    verdicts = [verify(problem, response) for response in ("4", "2", "5", "")]
    assert [verdict.correct for verdict in verdicts] == [True, False, False, False]
    assert verify(Problem("1", "", "", "here"), "4").error == "even: the problem has no prompt"
    with VerifierPool(RewardConfig(verifier="even", workers=1)) as pool:
        verdicts = pool.submit(problem, ["2", "x"], [(), ()]).result(60)
    assert [verdict.score for verdict in verdicts] == [1.0, -1.0]
    assert run(capsys, "test", "even", "--right", "42")[0] == 0


def test_a_loss_is_a_function_and_a_row_of_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    options = ("loss.surrogate=reinforce", "train.minibatch_groups=4")
    metrics = train(capsys, tmp_path / "run", *options)
    trained = [row for row in rollouts(tmp_path / "run").to_pylist() if row["outcome"] == "trained"]
    num_tokens = sum(row["response_tokens"] for row in trained)
    sums = [row["advantage"] * math.fsum(row["engine_logprobs"]) for row in trained]
    loss = -math.fsum(sums) / num_tokens
    assert abs(loss) > 1e-3
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-6)
    assert (
        "  loss        REINFORCE, without a ratio, averaged by token\n"
        in (run(capsys, "check", str(TINY), *ONE_STEP, *options, "--verbose")[1])
    )
    assert " reinforce: A log pi; clip: " in (ROOT / "docs" / "options.md").read_text()


def test_an_engine_is_a_folder_a_section_and_a_row_of_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    section = run(capsys, "show", "rollout.plain")[1]
    assert "per_poll  default 4, unit responses\n" in section
    engine = "rollout.engine=plain"
    assert "the plain engine" in run(capsys, "check", str(TINY), *ONE_STEP, engine, "--verbose")[1]
    here = train(capsys, tmp_path / "here", engine)
    own_process = (engine, "rollout.engines=1", "rollout.plain.per_poll=3")
    there = train(capsys, tmp_path / "there", *own_process)
    assert rollouts(tmp_path / "here").num_rows >= 16
    assert rollouts(tmp_path / "here").equals(rollouts(tmp_path / "there"))
    for metrics in (here, there):  # the engine samples from the distribution that trains
        assert 0 <= metrics["rollout/engine_logprob_gap_max"] < 1e-5


def test_an_option_is_a_field_that_is_read_where_its_section_arrives(
    capsys: pytest.CaptureFixture[str],
):
    shown = run(capsys, "show", "optim.eps")[1]
    assert shown.startswith("optim.eps  default 1e-08, paper 1e-08\n")
    checked = run(capsys, "check", "tiny", "optim.eps=0.1", "--verbose")[1]
    assert "  - optim.eps: 0.1 (paper: 1e-08)\n" in checked
    page = (ROOT / "docs" / "options.md").read_text()
    assert "| `optim.eps` | `1e-08` | `1e-08` |  | Number" in page
    assert run(capsys, "check", "tiny", "optim.eps=0") == (
        2,
        "",
        "error: command line: option optim.eps: input should be greater than 0, got 0\n",
    )
    divergences = []
    for eps in (1e-8, 1e6):
        with dapo.session(config="tiny", **{"optim.eps": eps}) as session:
            divergences.append(session.update(session.collect())["loss/approx_kl"])
    assert divergences[0] > 1e-9 >= divergences[1]  # so large an eps leaves no update


def test_a_metric_is_a_row_of_the_table_and_a_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    metrics = train(capsys, tmp_path / "run")
    assert metrics["rollout/responses_trained"] == 16
    page = (ROOT / "docs" / "metrics.md").read_text()
    row = "| `rollout/responses_trained` | responses | The number of responses that train. |"
    assert row in page
